"""Client aborts at every point of a request's life, with every order and repetition of what follows."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("vllm")

from tests.vllm.engine import Engine, params

LENGTH, BLOCKS = 100, range(7)
both_modes = pytest.mark.parametrize("mode", ["WRITE", "READ"])
both_schedulers = pytest.mark.parametrize("async_", [False, True], ids=["sync", "async"])
verdicts = pytest.mark.parametrize("verdict", ["done", "failed"])

# What happens to a request of a decode node, in order; a client may leave before each.
D_LIFE = ["add", "step", "step", "settle", "step", "step", "step", "step", "step"]
P_LIFE = ["add", "step", "step", "step", "settle", "step", "step"]


def live(engine: Engine, role: str, moments: list[str], verdict: str) -> None:
    """Bring a request through some moments of its life."""
    for moment in moments:
        if moment == "add":
            engine.add("a", LENGTH, params(role, "t", BLOCKS))
        elif moment == "settle":
            if "a" in engine.worker.owed:
                engine.settle("a", verdict=verdict)
        else:
            engine.step()


def settle_and_end(engine: Engine, role: str, verdict: str) -> None:
    """Settle what is owed, and show that the engine serves the next request."""
    if "a" in engine.worker.owed and "a" not in engine.worker.settled:
        engine.settle("a", verdict=verdict)
    engine.finish()
    engine.add("next", LENGTH, params(role, "t-next", BLOCKS))
    engine.steps(3)
    engine.finish()
    assert engine.finished["next"] == "length"


@both_schedulers
@both_modes
@verdicts
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("when", range(1, len(D_LIFE) + 1))
def test_d_aborted_at_every_point(tmp_path, when, policy, verdict, mode, async_):
    """D: whenever the client leaves, and however the load ends, vLLM hears of the load once and has its blocks back."""
    engine = Engine(tmp_path, "D", mode, policy=policy, async_=async_)
    live(engine, "D", D_LIFE[:when], verdict)
    engine.abort("a")
    engine.abort("a")
    live(engine, "D", [m for m in D_LIFE[when:] if m != "settle"], verdict)
    settle_and_end(engine, "D", verdict)


@both_schedulers
@both_modes
@verdicts
@pytest.mark.parametrize("when", range(1, len(P_LIFE) + 1))
def test_p_aborted_at_every_point(tmp_path, when, verdict, mode, async_):
    """P: whenever the client leaves, the blocks are handed over once and come back once."""
    engine = Engine(tmp_path, "P", mode, async_=async_)
    live(engine, "P", P_LIFE[:when], verdict)
    engine.abort("a")
    engine.abort("a")
    live(engine, "P", [m for m in P_LIFE[when:] if m != "settle"], verdict)
    settle_and_end(engine, "P", verdict)


@both_modes
@pytest.mark.parametrize("order", list(itertools.permutations(["abort a", "settle a", "settle b", "step"])), ids=str)
def test_two_loads_in_every_order(tmp_path, order, mode):
    """D: an abort of one load, and the ends of both, in every order within and across steps."""
    engine = Engine(tmp_path, "D", mode)
    engine.add("a", LENGTH, params("D", "t1", BLOCKS))
    engine.add("b", LENGTH, params("D", "t2", BLOCKS))
    engine.step()
    for what in order:
        verb, _, who = what.partition(" ")
        if verb == "abort":
            engine.abort(who)
        elif verb == "settle":
            engine.settle(who)
        else:
            engine.step()
    engine.finish()
    assert engine.finished.get("b") == "length"


@both_modes
def test_an_aborted_load_keeps_its_blocks_until_it_is_settled(tmp_path, mode):
    """D: the blocks of an aborted request, which P may still write, stay allocated for any number of steps."""
    engine = Engine(tmp_path, "D", mode, blocks=12)
    engine.add("a", LENGTH, params("D", "t1", BLOCKS))
    engine.step()
    held = engine.worker.owed["a"]
    engine.abort("a")
    engine.add("b", LENGTH, params("D", "t2", BLOCKS))
    plans = engine.steps(50)
    assert next(p for p in plans if p.aborts).aborts == ["t1"]
    assert engine.worker.owed == {"a": held}
    engine.finish()
    assert engine.finished["b"] == "length"


@both_modes
def test_d_aborted_before_admission_releases_p(tmp_path, mode):
    """D: a request that never got blocks releases its transfer once, so that P does not wait for its lease."""
    engine = Engine(tmp_path, "D", mode, blocks=12)
    engine.add("big", LENGTH, params("D", "t1", BLOCKS))
    engine.step()
    engine.add("a", LENGTH, params("D", "t2", BLOCKS))
    engine.add("b", LENGTH, params("D", "t3", BLOCKS))
    engine.abort("b")
    engine.step()
    engine.abort("a")
    engine.steps(2)
    assert engine.worker.skipped == ["t3", "t2"]
    assert engine.worker.expected == {"t2"}
    engine.finish()


def test_p_blocks_stay_until_the_worker_says_so(tmp_path):
    """P: finished requests hold their blocks over any number of steps, and give them back on the worker's word only."""
    engine = Engine(tmp_path, "P", "READ", blocks=20)
    engine.add("a", LENGTH, params("P", "t1"))
    engine.steps(4)
    held = engine.free_blocks
    engine.steps(100)
    assert engine.free_blocks == held
    engine.settle("a")
    engine.step()
    assert engine.free_blocks == held + len(BLOCKS)
    engine.finish()
