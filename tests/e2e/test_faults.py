"""Faults end to end: real servers, the real router, a real model; every request ends, right or as the policy says.

One stack for each mode with a short lease, whose servers are aborted on, stopped, killed and restarted; and stacks
whose transport fails on purpose.  After each fault: no server has died that was not killed, both caches are empty
again, and the next request is right.
"""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest
from tests.e2e.chaos import LEASE_S, Servers, ask_all, long_answers, signal_tree

from moriio_transport.trace import check_trace
from moriio_vllm.demo.stack import Connector, StackOptions, running_stack

pytestmark = pytest.mark.e2e

REQUEST_BOUND_S = 150.0  # what a client of ours waits at most under any fault
SEED = 7


def options(model, folder, mode, *, policy="recompute", **extra):
    """A stack with a short lease, and traces."""
    keys = {"backend": "loopback", "lease": LEASE_S, "transfer_timeout": 2 * LEASE_S, "defer_timeout": 4 * LEASE_S}
    keys["trace_file"] = str(folder / "trace-{pid}.jsonl")
    connector = Connector(extra={**keys, **extra}, transfer={"kv_load_failure_policy": policy})
    return StackOptions(model, folder, mode, connector=connector)


@pytest.fixture(scope="module", params=["write", "read"])
def mode(request):
    """The transfer mode."""
    return request.param


@pytest.fixture(scope="module")
def servers(mode, model, tmp_path_factory, say):
    """One stack for all process faults of a mode; its traces are checked at the end."""
    folder = tmp_path_factory.mktemp(f"faults-{mode}")
    with running_stack(options(model, folder, mode), say) as stack:
        servers = Servers(stack)
        try:
            yield servers
            servers.check()
        finally:
            servers.end()
    assert_traces(folder)


def assert_traces(folder):
    """Every row that was taken is a row of the tables."""
    files = list(folder.glob("trace-*.jsonl"))
    assert len(files) >= 2
    findings = [f"{file.name}: {finding}" for file in files for finding in check_trace(file.read_text().splitlines())]
    # A killed process may leave its last line half-written.
    assert not [f for f in findings if "expected an object" not in f]


def assert_right(outcomes, expected):
    """Every answer that was given is the single server's."""
    given = [o for o in outcomes if o.answer is not None]
    wrong = [
        o.prompt.name
        for o, want in zip(given, expected([o.prompt for o in given]), strict=True)
        if not o.answer.same_as(want)
    ]
    assert not wrong
    slow = [f"{o.prompt.name}: {o.seconds:.0f} s" for o in outcomes if o.seconds > REQUEST_BOUND_S]
    assert not slow


def assert_all_right(outcomes, expected):
    """Every request was answered, and right."""
    assert not [f"{o.prompt.name}: {o.error}" for o in outcomes if o.error]
    assert_right(outcomes, expected)


def assert_recovered(servers, maker, expected):
    """Nothing is left behind, and the next requests are right."""
    servers.check()
    assert servers.wait_empty() == [0.0, 0.0]
    # A router starved by our clients on two cores may have dropped an instance whose pings it had not read yet.
    servers.wait_ready(lambda line: None)
    assert_all_right(ask_all(servers.stack.router, maker.demo()[:4]), expected)


def test_waves_of_clients_that_leave(servers, maker, expected):
    """Three waves of 64 requests whose clients leave after 0 to 8 s take nothing of either cache with them."""
    rng = random.Random(SEED)
    prompts = [p for p in maker.burst() for _ in range(2)]
    for _ in range(3):
        threads = [
            threading.Thread(target=servers.stack.router.ask_and_leave, args=(prompt, rng.uniform(0, 8)))
            for prompt in long_answers(prompts, 300)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(REQUEST_BOUND_S)
        assert not any(thread.is_alive() for thread in threads)
    assert_recovered(servers, maker, expected)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_stopped_side(name, servers, maker, expected):
    """One side stands still for longer than the lease in the middle of a burst: all answers given are right."""
    prompts = maker.burst()
    timer = threading.Timer(1.0, signal_tree, (servers[name], signal.SIGSTOP))
    again = threading.Timer(1.0 + 2.5 * LEASE_S, signal_tree, (servers[name], signal.SIGCONT))
    timer.start()
    again.start()
    outcomes = ask_all(servers.stack.router, prompts)
    again.join()
    assert_right(outcomes, expected)
    servers.wait_ready(lambda line: None)
    assert_recovered(servers, maker, expected)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_killed_side_that_comes_back(name, servers, maker, expected, say):
    """kill -9 in the middle of 16 transfers, then a restart at the same ports: the other side needs no restart."""
    prompts = maker.burst()[:16]
    killer = threading.Timer(0.7, servers.kill, (name,))
    killer.start()
    outcomes = ask_all(servers.stack.router, list(long_answers(prompts, 64)))
    killer.join()
    slow = [f"{o.prompt.name}: {o.seconds:.0f} s" for o in outcomes if o.seconds > REQUEST_BOUND_S]
    assert not slow
    servers.start_again(name)
    servers.wait_ready(say)
    assert_recovered(servers, maker, expected)


def test_a_router_that_is_replaced(servers, maker, expected, say):
    """The router is killed and started again: both instances register again by themselves."""
    servers.kill("router")
    servers.start_again("router")
    servers.wait_ready(say)
    assert_recovered(servers, maker, expected)


@pytest.fixture(scope="module", params=["recompute", "fail"])
def faulty(request, mode, model, tmp_path_factory, say):
    """A stack whose transport refuses, fails and loses transfers on purpose."""
    folder = tmp_path_factory.mktemp(f"injected-{mode}-{request.param}")
    faults = {"fail_every": 9, "lose_every": 31, "refuse_every": 4, "delay_ms": 2, "seed": SEED}
    more = {"fault_injection": faults, "allow_fault_injection": True}
    with running_stack(options(model, folder, mode, policy=request.param, **more), say) as stack:
        yield request.param, Servers(stack)
    assert_traces(folder)


def test_injected_transport_faults(faulty, maker, expected):
    """Transfers fail, are lost and refused all the time: all end in time, right or with the policy's error."""
    policy, servers = faulty
    outcomes = ask_all(servers.stack.router, [*maker.burst(), *maker.demo()])
    if policy == "recompute":
        assert_all_right(outcomes, expected)
    else:
        assert_right(outcomes, expected)
        assert any(o.error for o in outcomes), "no fault was injected"
        assert any(o.answer is not None for o in outcomes)
    servers.check()
    assert servers.wait_empty() == [0.0, 0.0]


def test_a_decode_node_busier_than_the_lease(servers, maker, expected):
    """Decode computes long prompts of its own for longer than the lease while transfers wait: all are right."""
    busy = [p for p in maker.demo() if "1500" in p.name or "1024" in p.name] * 6
    started = time.monotonic()
    worker = threading.Thread(target=ask_all, args=(servers.stack.decode, busy))
    worker.start()
    outcomes = ask_all(servers.stack.router, maker.burst())
    worker.join()
    assert time.monotonic() - started > LEASE_S
    assert_all_right(outcomes, expected)
    assert_recovered(servers, maker, expected)
