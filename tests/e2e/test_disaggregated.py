"""Prefill and decode server behind the real router, in both modes, against a plain single server."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from moriio_vllm.demo.process import wait_any_ended
from moriio_vllm.demo.prompts import BLOCK, BURST
from moriio_vllm.demo.report import rows
from moriio_vllm.demo.stack import StackOptions, running_stack

pytestmark = pytest.mark.e2e

SETTLE_DEADLINE_S = 120.0
SEED = 20


@pytest.fixture(scope="module", params=["write", "read"])
def mode(request):
    """The transfer mode."""
    return request.param


@pytest.fixture(scope="module")
def stack(mode, model, tmp_path_factory, say):
    """The running servers; one bring-up for all tests of a mode."""
    with running_stack(StackOptions(model, tmp_path_factory.mktemp(mode), mode), say) as running:
        yield running


def assert_exact(mode, prompts, answers, expected):
    """Fail with both answers of every prompt that was not answered as the single server answers it."""
    wrong = [row for row in rows(mode, prompts, answers, expected(prompts)) if not row.exact]
    assert not wrong, "\n".join(row.line() for row in wrong)


def usage(stack):
    """The part of its KV cache that each server uses, prefill first."""
    return [server.metric("vllm:kv_cache_usage_perc") for server in (stack.prefill, stack.decode)]


def wait_for_usage(stack, start):
    """Wait until both caches are used as at the start; return the last values seen."""
    deadline = time.monotonic() + SETTLE_DEADLINE_S
    while (now := usage(stack)) != start and time.monotonic() < deadline:
        wait_any_ended(stack.processes, 0.5)
    return now


def test_every_prompt_is_exact_and_its_cache_was_moved(mode, stack, maker, expected):
    """Each prompt of 1 to 1,500 tokens, chat or completion, gets the right answer out of the moved cache."""
    prompts = maker.demo()
    before = stack.tokens_received()
    answers = [stack.router.ask(prompt) for prompt in prompts]
    assert_exact(mode, prompts, answers, expected)
    total = sum(answer.prompt_tokens for answer in answers)
    # A side may compute the last token, or the last block that is not full, itself.
    assert total - BLOCK * len(prompts) <= stack.tokens_received() - before <= total


def test_streaming_changes_nothing(mode, stack, maker, expected):
    """The same prompts with streaming turned the other way get the same answers, now with D's prefix cache filled."""
    prompts = maker.demo()
    answers = [stack.router.ask(replace(prompt, stream=not prompt.stream)) for prompt in prompts]
    assert_exact(mode, prompts, answers, expected)


def test_many_at_once_are_exact(mode, stack, maker, expected):
    """Thirty-two requests at the same time each get the answer that they get alone."""
    prompts = maker.burst()
    assert_exact(mode, prompts, stack.router.ask_all(prompts), expected)


def test_shared_prefixes_are_exact(mode, stack, maker, expected):
    """Prompts that share whole or part blocks, or are sent again, are exact, in turn and at once."""
    prompts = maker.shared_prefix()
    assert_exact(mode, prompts, [stack.router.ask(prompt) for prompt in prompts], expected)
    assert_exact(mode, prompts, stack.router.ask_all(prompts), expected)


def test_plain_requests_mixed_in_are_exact(mode, stack, maker, expected):
    """Requests sent straight to the prefill and the decode server are answered right among the router's."""
    prompts = maker.burst()
    places = [stack.router, stack.decode, stack.router, stack.prefill]
    with ThreadPoolExecutor(max_workers=BURST) as pool:
        futures = [pool.submit(places[i % len(places)].ask, prompt) for i, prompt in enumerate(prompts)]
    assert_exact(mode, prompts, [future.result() for future in futures], expected)


def test_clients_that_leave_take_nothing_with_them(mode, stack, maker, expected):
    """After 32 clients hung up within two seconds both caches are as before and the next answers right."""
    start = wait_for_usage(stack, [0.0, 0.0])
    assert start == [0.0, 0.0]
    order = random.Random(SEED)
    prompts = [replace(prompt, max_tokens=400, stream=True) for prompt in maker.burst()]
    with ThreadPoolExecutor(max_workers=BURST) as pool:
        left = [pool.submit(stack.router.ask_and_leave, prompt, order.uniform(0, 2)) for prompt in prompts]
    assert sum(future.result() for future in left) >= BURST // 2
    assert wait_for_usage(stack, start) == start
    stack.check()
    after = maker.demo()
    assert_exact(mode, after, [stack.router.ask(prompt) for prompt in after], expected)
