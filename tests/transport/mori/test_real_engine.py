"""Runs the tests under `engine/`: the unmodified amd_mori wheel over software verbs, in a Python 3.10 of its own.

What a machine lacks for it is an error that says so.  By hand, with pytest's arguments:

    python -m tests.transport.mori.run -x tests/transport/mori/engine/test_faults.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.transport.mori.run import run_pytest

pytestmark = pytest.mark.slow

FILES = sorted(path.name for path in Path(__file__).parent.glob("engine/test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_on_the_real_engine(name):
    """All tests of one file pass on the real engine."""
    status, output = run_pytest(["-q", f"tests/transport/mori/engine/{name}"])
    assert status == 0, output
    assert " passed" in output
    assert "skipped" not in output
