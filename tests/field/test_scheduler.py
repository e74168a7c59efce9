"""Field cases of the scheduler half, in vLLM's own scheduler."""

# ruff: noqa: N802 - tests are named after their cases

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's and torch's own imports deprecate is not ours to fail for
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from moriio_proto.errors import ConfigurationError
    from moriio_vllm.connector import MoRIIOConnector, checked_config, single_group
    from tests.vllm.engine import BLOCK, Engine, params, vllm_config

both_modes = pytest.mark.parametrize("mode", ["WRITE", "READ"])
both_roles = pytest.mark.parametrize("role", ["P", "D"])
ROUTED = (
    "___prefill_addr_host:127.0.0.1,handshake:7301,notify:62005___decode_addr_host:127.0.0.1,handshake:{},notify:62006_"
)


@both_roles
@both_modes
def test_W_SHORT_ID(tmp_path, role, mode):
    """Ids without addresses, or with broken ones, cost their own request at most; the engine goes on."""
    engine = Engine(tmp_path, role, mode)
    leg = {
        "do_remote_decode" if role == "P" else "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_block_ids": [0],
    }
    ids = [ROUTED.format(7302) + "0" * 32, "9f3c0a1b2c3d4e5f", "-", ROUTED.format("99999") + "1" * 32]
    for i, request_id in enumerate(ids):
        engine.add(request_id, 40, {**leg, "transfer_id": f"t{i}"})
    engine.steps(3)
    engine.finish()
    assert engine.finished == dict.fromkeys(ids, "length")


REQUIRED = ["transfer_id", "remote_host", "remote_handshake_port", "remote_notify_port"]


@both_roles
@both_modes
@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [None, [], {}, -1, "x" * 5000, True, 1.5], ids=lambda v: repr(v)[:9])
def test_W_XFER_ID_MISSING(tmp_path, role, mode, key, value):
    """Any required parameter missing or of another type: no hook raises, and nothing is left of the request."""
    engine = Engine(tmp_path, role, mode)
    engine.add("a", 40, params(role, "t", range(3)) | {key: value})
    engine.steps(3)
    engine.finish()
    assert engine.finished == {"a": "length"}


@both_roles
@both_modes
def test_W_N_SIBLINGS(tmp_path, role, mode):
    """n = 4 children with one transfer id, some with a prefix hit: one takes part, all end, all blocks come back."""
    engine = Engine(tmp_path, role, mode)
    prompt = list(range(60))
    engine.add("warm", prompt[:32])
    engine.steps(6)
    for child in range(4):
        engine.add(f"{child}_r", prompt if child else [9] * 60, params(role, "t", range(4)))
    plans = engine.steps(3)
    took_part = [o.request_id for p in plans for o in p.offers] + [x.request_id for p in plans for x in p.loads]
    assert took_part == ["0_r"]
    engine.finish()
    assert len(engine.finished) == 5


@both_roles
@both_modes
def test_W_PARAMS_MUTATED(tmp_path, role, mode):
    """Chunked prompt, the map cleared after admission and filled with another transfer: what was read first counts."""
    engine = Engine(tmp_path, role, mode)
    leg = params(role, "t", range(13))
    engine.add("a", 200, leg)
    leg.clear()
    for _ in range(5):
        plan = engine.step()
        leg.update(params(role, "other"), do_remote_decode=False, do_remote_prefill=False)
        assert not [c for c in plan.chunks if c.transfer_id != "t"]
        assert not [load for load in plan.loads if load.params.transfer_id != "t"]
    engine.finish()
    assert engine.finished == {"a": "length"}


@both_modes
def test_W_SECOND_LOAD(tmp_path, mode):
    """A loaded request that is preempted, or asked about again at any time, is never loaded a second time."""
    engine = Engine(tmp_path, "D", mode, blocks=14)
    requests = [engine.add(n, 90, params("D", f"t{n}", range(6)), max_tokens=60) for n in ("a", "b")]
    assert engine.half.get_num_new_matched_tokens(requests[0], 0) == (89, True)
    assert engine.half.get_num_new_matched_tokens(requests[0], 0) == (89, True)
    engine.step()
    for _ in range(2):
        assert [engine.half.get_num_new_matched_tokens(r, 0) for r in requests] == [(0, False)] * 2
        engine.settle(*engine.worker.owed)
        plans = engine.steps(30)
        assert not any(plan.loads for plan in plans)
    assert sum(r.num_preemptions for r in requests) > 0
    engine.finish()
    assert engine.finished == {"a": "length", "b": "length"}


@both_modes
def test_W_FAIL_RELOAD_LIVELOCK(tmp_path, mode):
    """Loads that always fail: one attempt per request, then it is computed here and ends."""
    engine = Engine(tmp_path, "D", mode, policy="recompute")
    for i in range(5):
        engine.add(f"r{i}", 70 + i, params("D", f"t{i}", range(5)))
    attempts = []
    for _ in range(40):
        attempts += [load.request_id for load in engine.step().loads]
        engine.settle(*engine.worker.owed, verdict="failed")
    assert sorted(attempts) == [f"r{i}" for i in range(5)]
    engine.finish()
    assert set(engine.finished.values()) == {"length"}


@both_modes
def test_W_READ_BARRIER(tmp_path, mode):
    """No request is in a forward pass before its load is done; only WRITE, which posts from Python, asks for pieces."""
    engine = Engine(tmp_path, "D", mode)
    engine.add("a", 100, params("D", "t", range(7)))
    engine.add("plain", 20, max_tokens=40)
    for _ in range(10):
        output = engine.scheduler.schedule()
        assert "a" not in output.num_scheduled_tokens
        engine.worker.run(output.kv_connector_metadata, engine._blocks_of)
        engine._running.append((output, engine.worker.report()))
        engine._deliver()
    assert MoRIIOConnector.requires_piecewise_for_cudagraph({"read_mode": mode == "READ"}) is (mode == "WRITE")
    assert MoRIIOConnector.requires_piecewise_for_cudagraph({}) is True
    engine.finish()


@both_modes
def test_W_SYNC_READ_RUNNING(tmp_path, mode):
    """Every load is announced as asynchronous, and exactly the announced ones are reported as received."""
    engine = Engine(tmp_path, "D", mode)
    requests = [engine.add(f"r{i}", n, params("D", f"t{i}", range(9))) for i, n in enumerate((1, 2, 16, 17, 100))]
    announced = {r.request_id for r in requests if engine.half.get_num_new_matched_tokens(r, 0)[1]}
    assert all(engine.half.get_num_new_matched_tokens(r, 0)[0] == r.num_tokens - 1 for r in requests)
    engine.step()
    assert set(engine.worker.owed) == announced == {"r1", "r2", "r3", "r4"}
    engine.finish()


def test_W_HANDSHAKE_DIVERGE():
    """Ranks agree before a request is scheduled: vLLM hears of a load when every rank has; one failure is all's."""
    ranks = KVOutputAggregator(2)

    def both(*outputs):
        made = [ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(**o)) for o in outputs]
        return ranks.aggregate(made).kv_connector_output

    first = both({"finished_recving": {"a"}}, {})
    assert not first.finished_recving
    second = both({}, {"finished_recving": {"a"}, "failed_recving": {"a"}})
    assert (second.finished_recving, second.failed_recving) == ({"a"}, {"a"})


@both_modes
def test_W_ASYNC_STEP_REUSE(tmp_path, mode):
    """Async scheduling on D: a load gets no block that a step still under way may write."""
    engine = Engine(tmp_path, "D", mode, blocks=13, async_=True)
    engine.add("a", 100, max_tokens=50)
    engine.steps(4)
    mine = set(engine._blocks_of("a"))
    assert "a" in engine._running[-1][0].num_scheduled_tokens
    engine.add("b", 150, params("D", "t", range(10)))
    engine.abort("a")
    output = engine.scheduler.schedule()
    loads = output.kv_connector_metadata.loads
    assert not any(mine & set(load.blocks) for load in loads)
    engine.worker.run(output.kv_connector_metadata, engine._blocks_of)
    engine._running.append((output, engine.worker.report()))
    engine.finish()
    assert engine.finished["b"] == "length"


@both_modes
def test_W_SHORT_PROMPT(tmp_path, mode):
    """Every length up to two blocks: one load or one release per transfer, and nothing is left on either side."""
    prefill, decode = Engine(tmp_path, "P", mode), Engine(tmp_path, "D", mode, blocks=128, seqs=64)
    lengths = range(1, 2 * BLOCK + 2)
    for n in lengths:
        prefill.add(f"r{n}", n, params("P", f"t{n}"))
        decode.add(f"r{n}", n, params("D", f"t{n}", range(3)))
    prefill.finish()
    plans = decode.steps(4)
    loaded = {load.request_id for plan in plans for load in plan.loads}
    assert loaded == {f"r{n}" for n in lengths if n > 1}
    assert decode.worker.skipped == ["t1"]
    decode.finish()
    assert len(prefill.answers) == len(lengths)


@both_modes
def test_W_READ_PARTIAL_PREFIX_positions(tmp_path, mode):
    """W-READ-PARTIAL-PREFIX: for every prefix that D has, the load is the rest by position, or a release."""
    engine = Engine(tmp_path, "D", mode, blocks=200)
    for have in range(7):
        prompt = [1000 * have + i for i in range(6 * BLOCK + 1)]
        engine.add(f"warm{have}", [*prompt[: have * BLOCK], 7])
        engine.finish()
        engine.add(f"r{have}", prompt, params("D", f"t{have}", range(7)))
        plan = engine.step()
        engine.settle(*engine.worker.owed)
        if have == 6:
            assert [p.transfer_id for p in plan.skips] == ["t6"]
        else:
            assert [(load.first_block, len(load.blocks)) for load in plan.loads] == [(have, 6 - have)]
        engine.finish()


def test_W_CHUNK_NONXFER_KEYERROR(tmp_path):
    """P: plain requests, aborted ones and ones past their prompt in one batch with transfers: only transfers plan."""
    engine = Engine(tmp_path, "P", "WRITE", batch=128)
    engine.add("plain", 50, max_tokens=30)
    engine.add("past", 20, params("P", "t-past"), max_tokens=30)
    engine.add("gone", 90, params("P", "t-gone"))
    engine.step()
    engine.abort("gone")
    engine.add("late", 150, params("P", "t-late"))
    plans = engine.steps(10)
    assert {c.transfer_id for plan in plans for c in plan.chunks} == {"t-late"}
    engine.finish()
    assert {"plain", "past", "late"} <= set(engine.finished)


@pytest.mark.parametrize("extra", [1, 3])
def test_W_MTP_LOOKAHEAD(tmp_path, extra):
    """Blocks beyond the prompt, reserved for drafts on either side, take no part."""
    prefill = Engine(tmp_path, "P", "WRITE")
    prefill.add("a", 2 * BLOCK, params("P", "t"))
    blocks = list(range(1, 3 + extra))
    cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    output = SimpleNamespace(
        preempted_req_ids=set(), num_scheduled_tokens={"a": 2 * BLOCK},
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=0, block_ids=(blocks,))],
        scheduled_cached_reqs=cached,
    )  # fmt: skip
    (chunk,) = prefill.half.build_connector_meta(output).chunks
    assert (chunk.end, chunk.blocks) == (2, [1, 2])
    decode = Engine(tmp_path, "D", "WRITE")
    request = decode.add("a", 2 * BLOCK, params("D", "t"))
    count, _ = decode.half.get_num_new_matched_tokens(request, 0)
    held = SimpleNamespace(get_block_ids=lambda: (blocks,))
    decode.half.update_state_after_alloc(request, held, count)
    (load,) = decode.half._plan.loads
    assert load.blocks == [1, 2]


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "pipeline_parallel_size"])
def test_W_DCP_SPAN(tmp_path, name):
    """Parallelism in which a scheduler block is not one page of one rank is refused at start, by name."""
    config = vllm_config(tmp_path, "D", "READ")
    setattr(config.parallel_config, name, 2)
    with pytest.raises(ConfigurationError, match=f"{name}=2"):
        checked_config(config, KVConnectorRole.SCHEDULER)


def test_W_HMA_GROUPS():
    """Several kinds of attention are refused at start with what to do, never served from one of them."""
    spec = SimpleNamespace(kv_cache_spec=object())
    for groups in ((), (0, 1), (0, 1, 2)):
        caches = SimpleNamespace(transfer_group_ids=groups, kv_cache_groups=[spec] * 3)
        with pytest.raises(NotImplementedError, match="--disable-hybrid-kv-cache-manager"):
            single_group(caches)


@both_roles
@both_modes
@pytest.mark.parametrize(
    "given",
    [
        {"remote_notify_port": 65535, "remote_dp_size": 2, "remote_dp_rank": 1}, {"remote_handshake_port": -7},
        {"remote_block_ids": [[2**63]]}, {"remote_block_ids": [[-1]]}, {"remote_block_ids": "abc"},
        {"remote_dp_size": 10**9}, {"remote_hosts": ["x"], "remote_dp_size_local": 1, "remote_dp_rank": 3},
        {"transfer_id": "t-of-another-tenant"}, {"tp_size": 10**6}, {"remote_block_ids": [[0], [1]]},
    ],
    ids=repr,
)  # fmt: skip
def test_W_CLIENT_PARAMS(tmp_path, role, mode, given):
    """Whatever a client writes into its parameters ends in its own request; the others, and the engine, go on."""
    engine = Engine(tmp_path, role, mode)
    engine.add("tenant", 40, params(role, "t-of-another-tenant", range(3)))
    engine.add("client", 40, params(role, "t", range(3)) | given)
    engine.add("plain", 40)
    engine.steps(3)
    engine.finish()
    assert set(engine.finished) == {"tenant", "client", "plain"}
    assert engine.finished["tenant"] == engine.finished["plain"] == "length"
