"""Rules for all tests."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_addoption(parser):
    """Add the option that ``make test`` sets."""
    parser.addoption("--require-vllm", action="store_true", help="fail, instead of skipping tests, without vLLM")


def pytest_sessionstart(session):
    """End the run at once when it must not go on without vLLM: a skipped test must not look like a passed one."""
    if not session.config.getoption("--require-vllm"):
        return
    if missing := [name for name in ("torch", "vllm", "vllm_router") if importlib.util.find_spec(name) is None]:
        pytest.exit(f"--require-vllm: not installed: {', '.join(missing)}", returncode=pytest.ExitCode.USAGE_ERROR)
