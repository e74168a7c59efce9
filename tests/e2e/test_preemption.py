"""A decode server whose cache is too small for its requests, so that it preempts some."""

from __future__ import annotations

import pytest

from moriio_vllm.demo.report import rows
from moriio_vllm.demo.stack import StackOptions, running_stack

pytestmark = pytest.mark.e2e

# Two blocks a request at its beginning, five at its end: twelve requests are let in and outgrow these together.
SMALL_CACHE = ("--num-gpu-blocks-override=30", "--max-model-len=512")


@pytest.mark.parametrize("mode", ["write", "read"])
def test_preempted_requests_are_exact(mode, model, maker, expected, tmp_path, say):
    """Requests preempted on the decode server after their cache arrived still get the single server's answer."""
    prompts = maker.long_answers()
    with running_stack(StackOptions(model, tmp_path, mode, decode_args=SMALL_CACHE), say) as stack:
        answers = stack.router.ask_all(prompts)
        preemptions = stack.decode.metric("vllm:num_preemptions_total")
    wrong = [row for row in rows(mode, prompts, answers, expected(prompts)) if not row.exact]
    assert not wrong, "\n".join(row.line() for row in wrong)
    assert preemptions > 0
