"""The scheduler half in vLLM's own scheduler: what is planned, in which order, and that every block comes back."""

from __future__ import annotations

import pickle
import random

import pytest

pytest.importorskip("vllm")

from tests.vllm.engine import BLOCK, Engine, params

MODES = ["WRITE", "READ"]
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 200]
both_modes = pytest.mark.parametrize("mode", MODES)
both_schedulers = pytest.mark.parametrize("async_", [False, True], ids=["sync", "async"])


def blocks_for(tokens: int) -> int:
    """Blocks that so many tokens fill."""
    return -(-tokens // BLOCK)


# --- prefill ------------------------------------------------------------------------------------------------------


@both_schedulers
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_cover_the_prompt_once(tmp_path, length, async_):
    """WRITE: the chunks of all steps cover every block of the prompt, in order, with the blocks vLLM gave it."""
    engine = Engine(tmp_path, "P", "WRITE", async_=async_)
    engine.add("a", length, params("P", "t"))
    plans = engine.steps(8)
    (offer,) = [o for plan in plans for o in plan.offers]
    chunks = [c for plan in plans for c in plan.chunks]
    assert offer.goal_blocks == chunks[-1].end == blocks_for(length)
    assert len(chunks) == -(-length // 64), "one per step of 64 tokens"
    engine.finish()
    assert engine.answers["a"]["remote_block_ids"] == [chunks[-1].blocks]


def test_read_has_no_chunks(tmp_path):
    """READ: P plans an offer and, when the prompt is computed, its end; D reads later."""
    engine = Engine(tmp_path, "P", "READ")
    engine.add("a", 200, params("P", "t"))
    plans = engine.steps(8)
    assert not any(plan.chunks for plan in plans)
    assert [p.finishes for p in plans if p.finishes] == [["t"]]
    engine.finish()
    assert len(engine.answers["a"]["remote_block_ids"][0]) == blocks_for(200)


def test_a_prefix_hit_on_p_is_part_of_the_first_chunk(tmp_path):
    """Blocks found in P's prefix cache are sent, too: D knows nothing of them."""
    engine = Engine(tmp_path, "P", "WRITE")
    prompt = list(range(60))
    engine.add("a", prompt, params("P", "t1"))
    engine.steps(2)
    engine.add("b", [*prompt[:48], *range(60, 90)], params("P", "t2"))
    chunk = engine.step().chunks[0]
    assert (chunk.transfer_id, chunk.start) == ("t2", 0)
    first = engine.worker.chunks["t1"][0][2]
    assert chunk.blocks[:3] == first[:3]
    engine.finish()


@both_schedulers
@both_modes
def test_p_aborted_before_it_was_scheduled_settles_once(tmp_path, mode, async_):
    """A request that leaves P's queue unscheduled has no block, is handed over, and is over when that is reported."""
    engine = Engine(tmp_path, "P", mode, async_=async_)
    engine.add("a", 20, params("P", "t"))
    engine.abort("a")
    plan = engine.step()
    assert [o.request_id for o in plan.offers] == ["a"]
    assert plan.aborts == ["t"]
    assert engine.worker.owed == {"a": []}
    engine.finish()


@both_schedulers
def test_preempted_prefill_starts_over(tmp_path, async_):
    """WRITE: a preempted request's transfer is told so before its new blocks come, which begin at block 0 again."""
    engine = Engine(tmp_path, "P", "WRITE", blocks=12, async_=async_)
    engine.add("old", 100, params("P", "t-old"), max_tokens=60)
    engine.add("new", 60, params("P", "t-new"), max_tokens=40)
    plans = engine.steps(60)
    preempted = next(i for i, plan in enumerate(plans) if "t-new" in plan.preempts)
    assert not any(c.transfer_id == "t-new" for c in plans[preempted].chunks)
    for _ in range(200):
        if "new" in engine.finished:
            break
        engine.settle(*engine.worker.owed)
        plans.append(engine.step())
    again = [c for plan in plans[preempted:] for c in plan.chunks if c.transfer_id == "t-new"]
    assert [again[0].start, again[-1].end] == [0, blocks_for(60)]
    engine.finish()


def test_same_transfer_id_twice_is_one_offer(tmp_path):
    """Siblings (n > 1) share an id: one is offered, the others are plain; then the id may come again."""
    engine = Engine(tmp_path, "P", "READ")
    for i in range(4):
        engine.add(f"{i}_a", 40, params("P", "t"))
    plans = engine.steps(6)
    assert [o.request_id for plan in plans for o in plan.offers] == ["0_a"]
    assert set(engine.answers) == {"0_a"}
    engine.finish()
    engine.add("later", 40, params("P", "t"))
    assert [o.request_id for o in engine.step().offers] == ["later"]
    engine.finish()


# --- decode -------------------------------------------------------------------------------------------------------


@both_schedulers
@both_modes
@pytest.mark.parametrize("length", LENGTHS)
def test_a_load_covers_all_but_the_last_token(tmp_path, length, mode, async_):
    """D loads the blocks of all tokens but the last, or, when there is no other token, releases the transfer."""
    engine = Engine(tmp_path, "D", mode, async_=async_)
    engine.add("a", length, params("D", "t", range(blocks_for(length))))
    plan = engine.step()
    if length == 1:
        assert not plan.loads
        assert [p.transfer_id for p in plan.skips] == ["t"]
    else:
        (load,) = plan.loads
        assert load.first_block == 0
        assert len(load.blocks) == blocks_for(length - 1)
        assert not plan.skips
        assert engine.status("a") == "WAITING_FOR_REMOTE_KVS"
    engine.finish()
    assert engine.finished == {"a": "length"}


@both_modes
def test_a_prefix_hit_on_d_is_not_loaded(tmp_path, mode):
    """Blocks that D has are skipped by position; when it has all, the transfer is released, once."""
    engine = Engine(tmp_path, "D", mode)
    prompt = list(range(70))
    engine.add("a", prompt, params("D", "t1", range(5)))
    engine.step()
    engine.settle("a")
    engine.steps(3)
    engine.add("b", [*prompt[:48], *range(70, 100)], params("D", "t2", range(5)))
    (load,) = engine.step().loads
    assert (load.first_block, len(load.blocks)) == (3, 2)
    engine.settle("b")
    engine.add("c", prompt[:65], params("D", "t3", range(5)))
    plans = engine.steps(2)
    assert not any(plan.loads for plan in plans)
    assert [p.transfer_id for plan in plans for p in plan.skips] == ["t3"]
    engine.finish()


def test_expected_while_it_waits_for_blocks(tmp_path):
    """A request that vLLM cannot admit yet is announced to the worker once, so that P's lease can be kept."""
    engine = Engine(tmp_path, "D", "READ", blocks=12)
    engine.add("a", 100, params("D", "t1", range(7)))
    engine.add("b", 100, params("D", "t2", range(7)))
    plans = engine.steps(4)
    assert [p.transfer_id for plan in plans for p in plan.expects] == ["t2"]
    assert [load.request_id for plan in plans for load in plan.loads] == ["a"]
    engine.finish()
    assert engine.finished == {"a": "length", "b": "length"}


@both_modes
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@both_schedulers
def test_a_failed_load_follows_the_policy(tmp_path, mode, policy, async_):
    """After a failed load the request is computed here, or ends with an error; it is never loaded again."""
    engine = Engine(tmp_path, "D", mode, policy=policy, async_=async_)
    engine.add("a", 100, params("D", "t", range(7)))
    engine.step()
    engine.settle("a", verdict="failed")
    plans = engine.steps(4)
    assert not any(plan.loads or plan.skips for plan in plans)
    engine.finish()
    assert engine.finished == {"a": "length" if policy == "recompute" else "error"}


@both_modes
def test_a_preempted_loaded_request_is_computed_here(tmp_path, mode):
    """A consumed transfer brings nothing, for ever: the preempted request is computed from its own prompt."""
    engine = Engine(tmp_path, "D", mode, blocks=14)
    request = engine.add("a", 90, params("D", "t1", range(6)), max_tokens=60)
    other = engine.add("b", 90, params("D", "t2", range(6)), max_tokens=60)
    engine.step()
    engine.settle("a", "b")
    plans = engine.steps(30)
    assert request.num_preemptions + other.num_preemptions > 0, "the pool is too large for this test"
    assert not any(plan.loads or plan.skips for plan in plans)
    for one in (request, other):
        assert engine.half.get_num_new_matched_tokens(one, 0) == (0, False)
        assert engine.half.get_num_new_matched_tokens(one, 16) == (0, False)
    engine.finish()
    assert engine.finished == {"a": "length", "b": "length"}


def test_queries_are_pure(tmp_path):
    """Asking any number of times before blocks are allocated changes nothing that is planned."""
    engine = Engine(tmp_path, "D", "WRITE")
    request = engine.add("a", 100, params("D", "t"))
    assert [engine.half.get_num_new_matched_tokens(request, n) for n in (0, 48, 0, 0)] == [
        (99, True), (51, True), (99, True), (99, True),
    ]  # fmt: skip
    (load,) = engine.step().loads
    assert load.first_block == 0
    assert engine.half.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.finish()


def test_siblings_on_d_are_computed_here(tmp_path):
    """Of requests that share a transfer id one loads; the others are plain, and all end."""
    engine = Engine(tmp_path, "D", "WRITE", seqs=8)
    for i in range(4):
        engine.add(f"{i}_a", [i * 7 + j for j in range(40)], params("D", "t"))
    plans = engine.steps(3)
    assert [load.request_id for plan in plans for load in plan.loads] == ["0_a"]
    assert not any(plan.skips for plan in plans)
    engine.finish()
    assert set(engine.finished.values()) == {"length"}
    assert len(engine.finished) == 4


# --- both ---------------------------------------------------------------------------------------------------------

BAD = [
    {"transfer_id": None}, {"transfer_id": 7}, {"remote_host": None}, {"remote_handshake_port": "x"},
    {"remote_handshake_port": -1}, {"remote_notify_port": 65536}, {"remote_dp_size": -2}, {"tp_size": "many"},
    {"remote_notify_port": 65535, "remote_dp_size": 9, "remote_dp_rank": 8}, {"remote_hosts": 5},
    {"remote_hosts": ["a"], "remote_dp_size_local": 1, "remote_dp_size": 9, "remote_dp_rank": 8},
]  # fmt: skip


@both_modes
@pytest.mark.parametrize("role", ["P", "D"])
@pytest.mark.parametrize("wrong", [*BAD, [], {"do_remote_prefill": 1, "do_remote_decode": "yes"}], ids=repr)
def test_bad_parameters_cost_their_request_only(tmp_path, role, mode, wrong):
    """Parameters that lead nowhere never raise in a hook: P computes a plain request, D's load fails by policy."""
    engine = Engine(tmp_path, role, mode)
    leg = params(role, "t", range(3)) | wrong if isinstance(wrong, dict) else wrong
    engine.add("bad", 40, leg)
    engine.add("good", 41, params(role, "t2", range(3)))
    engine.add("plain", 42)
    engine.steps(3)
    engine.finish()
    assert engine.finished == dict.fromkeys(("bad", "good", "plain"), "length")


@both_modes
@pytest.mark.parametrize("role", ["P", "D"])
def test_parameters_are_read_once(tmp_path, role, mode):
    """Whoever clears or changes a request's map after its admission changes nothing."""
    engine = Engine(tmp_path, role, mode)
    leg = params(role, "t", range(13))
    engine.add("a", 200, leg)
    leg.clear()
    plan = engine.step()
    leg |= {"do_remote_decode": True, "do_remote_prefill": True, "transfer_id": "other"}
    plans = [plan, *engine.steps(6)]
    named = [o.params.transfer_id for p in plans for o in p.offers]
    named += [load.params.transfer_id for p in plans for load in p.loads]
    assert named == ["t"]
    engine.finish()


def test_a_plan_survives_pickling(tmp_path):
    """vLLM sends the plan to the workers by pickle; what arrives is what was planned."""
    engine = Engine(tmp_path, "D", "READ")
    engine.add("a", 40, params("D", "t", range(3)))
    plan = engine.step()
    assert plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    engine.finish()
    assert not engine.step()


@both_schedulers
@both_modes
@pytest.mark.parametrize("role", ["P", "D"])
@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_requests_ends_with_all_blocks_back(tmp_path, role, mode, seed, async_):
    """Random arrivals, prefixes, siblings, aborts, failures, a small pool: no assertion, and every block comes back."""
    rng = random.Random(seed)
    engine = Engine(tmp_path, role, mode, blocks=24, async_=async_, seqs=6, policy=rng.choice(["recompute", "fail"]))
    live: list[str] = []
    for i in range(150):
        if rng.random() < 0.4:
            name = f"r{i}"
            length = rng.choice([1, 2, 15, 16, 17, 33, 64, 65, 120])
            leg = params(role, f"t{rng.randrange(40)}", range(blocks_for(length))) if rng.random() < 0.8 else None
            start = rng.randrange(3)
            prompt = [start + j // rng.choice([1, 50]) for j in range(length)]
            engine.add(name, prompt, leg, max_tokens=rng.choice([1, 3, 30]))
            live.append(name)
        if live and rng.random() < 0.25:
            engine.abort(live.pop(rng.randrange(len(live))))
        owed = [r for r in engine.worker.owed if r not in engine.worker.settled]
        for request_id in owed:
            if rng.random() < 0.4:
                engine.settle(request_id, verdict=rng.choice(["done", "done", "failed"]))
        engine.step()
    engine.finish(limit=600)
