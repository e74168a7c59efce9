"""What the end-to-end tests share: the model, the prompts, and a single server's answers to all of them."""

from __future__ import annotations

import pytest

from moriio_vllm.demo.baseline import baseline_answers
from moriio_vllm.demo.model import cache_dir, ensure_model
from moriio_vllm.demo.prompts import PromptMaker
from moriio_vllm.demo.stack import StackOptions


@pytest.fixture(scope="session")
def say(pytestconfig):
    """Print progress past pytest's capture: bringing servers up takes long enough to be told about."""
    reporter = pytestconfig.pluginmanager.getplugin("terminalreporter")
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def print_line(line):
        with capture.global_and_fixture_disabled():
            reporter.write_line(f"  {line}")

    return print_line


@pytest.fixture(scope="session")
def model():
    """The directory of the model."""
    return ensure_model(cache_dir())


@pytest.fixture(scope="session")
def maker(model):
    """Makes the prompts."""
    return PromptMaker(model)


@pytest.fixture(scope="session")
def expected(model, maker, tmp_path_factory, say):
    """The single server's answers: a function from prompts, of the sets in use here, to answers."""
    options = StackOptions(model, tmp_path_factory.mktemp("single"))
    every = [*maker.demo(), *maker.burst(), *maker.shared_prefix(), *maker.long_answers()]
    known = dict(zip(every, baseline_answers(every, options, cache_dir(), say), strict=True))
    return lambda prompts: [known[prompt] for prompt in prompts]
