"""Our node with vLLM's own connector on the other side, through the real router and with a real model.

vLLM's connector runs unchanged over the stand-in for its transfer library in tests/upstream. Both sides' answers are
compared with a plain single server's; what the connector itself leaks is not ours to check.
"""

from __future__ import annotations

import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from moriio_vllm.demo.process import wait_any_ended
from moriio_vllm.demo.prompts import BURST
from moriio_vllm.demo.report import rows
from moriio_vllm.demo.stack import HOST, Connector, StackOptions, running_stack

pytestmark = [pytest.mark.e2e, pytest.mark.interop]

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT / "tests" / "upstream" / "path"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
UPSTREAM = Connector(module_path=None, extra={}, env={"PYTHONPATH": os.pathsep.join(filter(None, PATHS))})
# Blocks held for a peer without leases come back after 20 s, so that the test need not wait for the default's 60 s.
OURS = Connector(extra={"backend": "loopback", "mori_compat": True, "defer_timeout": 20})
NAMES = {"ours": OURS, "upstream": UPSTREAM}
SETTLE_DEADLINE_S = 60.0
SEED = 4
MIXED = [("ours", "upstream"), ("upstream", "ours")]
SAME = [("ours", "ours"), ("upstream", "upstream")]
both_modes = pytest.mark.parametrize("mode", ["write", "read"])


@pytest.fixture
def options(mode, prefill, decode, model, tmp_path):
    """What the stack of this test runs."""
    return StackOptions(model, tmp_path, mode, connector=NAMES[prefill], decode_connector=NAMES[decode])


@pytest.fixture(scope="module")
def timings(say):
    """Seconds of the burst by who prefills, who decodes and how; shown when all are done."""
    taken: dict[tuple[str, str, str], float] = {}
    yield taken
    for (mode, prefill, decode), seconds in sorted(taken.items()):
        say(f"{BURST} requests at once, {mode.upper():5} {prefill:>8} -> {decode:8} {seconds:6.1f} s")


def assert_exact(mode, prompts, answers, expected):
    """Fail with both answers of every prompt that was not answered as the single server answers it."""
    wrong = [row for row in rows(mode, prompts, answers, expected(prompts)) if not row.exact]
    assert not wrong, "\n".join(row.line() for row in wrong)


def timed_burst(stack, mode, maker, expected):
    """Thirty-two exact answers at once; how many seconds they took."""
    prompts = maker.burst()
    started = time.monotonic()
    answers = stack.router.ask_all(prompts)
    taken = time.monotonic() - started
    assert_exact(mode, prompts, answers, expected)
    return taken


def abort_wave(stack, maker):
    """Thirty-two clients that hang up within two seconds."""
    order = random.Random(SEED)
    prompts = [replace(prompt, max_tokens=400, stream=True) for prompt in maker.burst()]
    with ThreadPoolExecutor(max_workers=BURST) as pool:
        left = [pool.submit(stack.router.ask_and_leave, prompt, order.uniform(0, 2)) for prompt in prompts]
    assert sum(future.result() for future in left) >= BURST // 2


def wait_for_empty_cache(server, stack):
    """The part of a server's cache that is in use, once that is none or the deadline has passed."""
    deadline = time.monotonic() + SETTLE_DEADLINE_S
    while (now := server.metric("vllm:kv_cache_usage_perc")) and time.monotonic() < deadline:
        wait_any_ended(stack.processes, 0.5)
    return now


def assert_listeners_alive(process):
    """Both listener threads of an upstream node run: none died with a traceback, and the handshake port answers."""
    log = process.log.read_text()
    assert "Exception in thread" not in log
    command = (Path("/proc") / str(process.pid) / "cmdline").read_text().split("\0")
    config = next(arg for arg in command if arg.startswith("--kv-transfer-config=")).partition("=")[2]
    port = json.loads(config)["kv_connector_extra_config"]["handshake_port"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(f"tcp://{HOST}:{port}")
        socket.send(b"get_meta_msg")
        assert len(socket.recv_multipart()) == 2


@both_modes
@pytest.mark.parametrize(("prefill", "decode"), MIXED)
def test_one_side_is_vllms_own(mode, prefill, decode, options, maker, expected, say, timings):
    """Every prompt, 32 at once, and what follows an abort wave are exact; our side leaks nothing, theirs lives."""
    demo = maker.demo()
    with running_stack(options, say) as stack:
        sides = {"prefill": prefill, "decode": decode}
        ours = stack.prefill if prefill == "ours" else stack.decode
        theirs = next(p for p in stack.processes if sides.get(p.name) == "upstream")
        assert_exact(mode, demo, [stack.router.ask(prompt) for prompt in demo], expected)
        timings[mode, prefill, decode] = timed_burst(stack, mode, maker, expected)
        assert wait_for_empty_cache(ours, stack) == 0
        abort_wave(stack, maker)
        assert wait_for_empty_cache(ours, stack) == 0
        stack.check()
        assert_exact(mode, demo[-3:], [stack.router.ask(prompt) for prompt in demo[-3:]], expected)
        assert wait_for_empty_cache(ours, stack) == 0
        assert_listeners_alive(theirs)


@both_modes
@pytest.mark.parametrize(("prefill", "decode"), SAME)
def test_both_sides_are_the_same(mode, prefill, decode, options, maker, expected, say, timings):
    """The same burst with one connector on both sides, for its time next to the mixed ones."""
    with running_stack(options, say) as stack:
        timings[mode, prefill, decode] = timed_burst(stack, mode, maker, expected)
