"""What vllm-router and the example proxy ask of a node: recorded transcripts, replayed against our halves.

`FakeRouter` has the recorded router's rules; it is held against the transcripts itself, so that what it says of cases
that were not recorded can be believed.  Nothing here needs a model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import attrs
import msgpack
import pytest

pytest.importorskip("vllm")

from tests.vllm.engine import BLOCK, Engine, params

from moriio_proto.errors import ParameterError
from moriio_proto.wire.addresses import ZmqAddress
from moriio_proto.wire.codec import decode_ping, encode_ping
from moriio_proto.wire.messages import Mode, Ping
from moriio_proto.wire.params import parse_decode_params, parse_prefill_params
from moriio_vllm._config_keys import BY_NAME
from moriio_vllm.config import ConnectorConfig, Ranks
from moriio_vllm.endpoints import decode_endpoints, prefill_endpoint

FOLDER = Path(__file__).parents[1] / "testdata" / "router"
TRANSCRIPTS = {t["scenario"]: t for t in json.loads((FOLDER / "transcripts.json").read_text())}
SIX_KEYS = {"type", "http_address", "zmq_address", "dp_size", "tp_size", "transfer_mode"}
LEGS = [pytest.param(name, i, id=f"{name}-{i}") for name, t in TRANSCRIPTS.items() for i, _leg in enumerate(t["legs"])]


@attrs.define
class FakeRouter:
    """vllm-router 0.1.17: drops an instance 5 whole seconds after its last ping, pairs only equal transfer modes."""

    seen: dict[tuple[str, str], tuple[Ping, float]] = attrs.field(factory=dict)

    def ping(self, frame: bytes, now: float) -> None:
        """A registration; the router needs the mode and takes what else is there."""
        ping = decode_ping(frame)
        self.seen[ping.role, ping.http_address] = ping, now

    def pair(self, now: float) -> tuple[Ping, Ping] | None:
        """Any prefill and decode instance of one mode; None is its answer 503."""
        alive = [ping for ping, at in self.seen.values() if int(now) - int(at) < 5]
        pairs = [(p, d) for p in alive for d in alive if (p.role, d.role) == ("P", "D")]
        return next(((p, d) for p, d in pairs if p.transfer_mode is d.transfer_mode), None)

    def legs(self, p: Ping, d: Ping, transfer_id: str, answer: object = None, rank: int = 0) -> tuple[dict, dict]:
        """The parameters of both legs; `answer` is what P said (READ)."""
        nobody = {"remote_engine_id": None, "remote_block_ids": None, "transfer_id": transfer_id}
        first = {"do_remote_decode": True, "do_remote_prefill": False, **nobody, "remote_dp_size": d.dp_size}
        if p.transfer_mode is Mode.READ:
            second = {"remote_dp_size": p.dp_size} if answer is None else {**answer, "remote_dp_size": p.dp_size}
            return first, second
        second = {"do_remote_decode": False, "do_remote_prefill": True, **nobody, "remote_dp_size": p.dp_size}
        first["remote_tp_size"], second["remote_tp_size"] = d.tp_size, p.tp_size
        if p.dp_size > 1:
            first["remote_dp_rank"] = second["remote_dp_rank"] = rank
        return first, second


def frames_of(transcript):
    """Registrations as the node would send them; those of nodes without the mode key are none of ours."""
    return [msgpack.dumps(h) for h in transcript["heartbeats"] if h.keys() >= SIX_KEYS]


# --- registration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, t in TRANSCRIPTS.items() if t["heartbeats"]])
def test_registrations_are_upstreams_bytes(name):
    """A node configured as the recorded one registers with exactly its bytes, all six keys in its order."""
    for heartbeat in TRANSCRIPTS[name]["heartbeats"]:
        if not heartbeat.keys() >= SIX_KEYS or not heartbeat["zmq_address"].startswith("host:"):
            continue
        address = ZmqAddress.parse(heartbeat["zmq_address"])
        extra = {
            "backend": "loopback", "host_ip": address.host, "http_port": heartbeat["http_address"].rpartition(":")[2],
            "handshake_port": address.handshake_port, "notify_port": address.notify_port,
            "read_mode": heartbeat["transfer_mode"] == "READ",
        }  # fmt: skip
        config = ConnectorConfig.from_extra(
            extra, role="kv_producer" if heartbeat["type"] == "P" else "kv_consumer",
            ranks=Ranks(dp_size=heartbeat["dp_size"], tp_size=heartbeat["tp_size"]), default_host=lambda: "unused",
        )  # fmt: skip
        assert encode_ping(config.ping()) == msgpack.dumps(heartbeat)


@pytest.mark.parametrize("name", [n for n, t in TRANSCRIPTS.items() if t["client"]])
def test_the_fake_router_pairs_as_the_recorded_one(name):
    """It answers 503 exactly where the recorded router did."""
    transcript, router = TRANSCRIPTS[name], FakeRouter()
    for frame in frames_of(transcript):
        router.ping(frame, 0.0)
    refused = any(request["error"] == "No eligible P/D pair" for request in transcript["client"])
    assert (router.pair(1.0) is None) is refused


def test_an_instance_is_dropped_between_our_pings_never():
    """The recorded router drops after 4.2 to 5.1 s; pings at our default interval, one of them lost, keep us in."""
    recorded = [entry["seconds_until_refused"] for entry in json.loads((FOLDER / "expiry.json").read_text())]
    default = BY_NAME["ping_interval"].default
    assert 2 * default < min(recorded)
    router = FakeRouter()
    for frame in frames_of(TRANSCRIPTS["write_chat"]):
        router.ping(frame, 10.9)
    assert router.pair(10.9 + 2 * default) is not None
    assert router.pair(10.9 + max(recorded)) is None


def test_a_restarted_router_knows_us_after_one_ping():
    """Registration is a ping like every other, so a router that forgot everything pairs again after the next ones."""
    frames = frames_of(TRANSCRIPTS["read_chat"])
    before, after = FakeRouter(), FakeRouter()
    for router in (before, after):
        assert router.pair(0) is None
        for frame in frames:
            router.ping(frame, 0)
        assert router.pair(1) is not None


def test_the_example_proxy_accepts_our_registration():
    """It requires six keys and one transfer mode; ours has exactly these keys, whatever the mode."""
    for mode in Mode:
        assert msgpack.loads(encode_ping(Ping("P", "h:1", "z", 1, 1, mode))).keys() == SIX_KEYS


# --- both legs ----------------------------------------------------------------------------------------------------


def wrapped(request_id):
    """An id as the engine sees it behind vLLM's API server."""
    return f"chatcmpl-{request_id}-0-1f2e3d4c"


@pytest.mark.parametrize(("name", "index"), LEGS)
def test_recorded_legs_lead_to_the_other_side(name, index):
    """Each recorded leg is understood: the peer is where it registered, the rank is that of the header."""
    transcript = TRANSCRIPTS[name]
    leg, is_p = transcript["legs"][index], transcript["legs"][index]["to"] == "P"
    mode, given = Mode(transcript["heartbeats"][0]["transfer_mode"]), leg["body"].get("kv_transfer_params")
    odd = "odd" in name and not is_p and mode is Mode.WRITE  # P registered an address that nobody can read
    parse = parse_prefill_params if is_p else parse_decode_params
    request_id = wrapped(leg["headers"]["x-request-id"])
    if odd:
        with pytest.raises(ParameterError, match="zmq_address"):
            parse(given, request_id, mode)
        return
    parsed = parse(given, request_id, mode)
    if not (given or {}).get("do_remote_decode" if is_p else "do_remote_prefill"):
        assert parsed is None
        return
    others = {ZmqAddress.parse(h["zmq_address"]) for h in transcript["heartbeats"]
              if h["type"] == ("D" if is_p else "P") and h["zmq_address"].startswith("host:")}  # fmt: skip
    others |= {ZmqAddress("127.0.0.1", 7301, 7401)} if "odd" in name else set()
    assert parsed.peer in others
    assert parsed.transfer_id == given["transfer_id"]
    if mode is Mode.WRITE and not is_p:
        assert parsed.remote_dp_rank == int(leg["headers"].get("x-data-parallel-rank", 0))
    found = decode_endpoints(parsed, 0, 2) if is_p else (prefill_endpoint(parsed, 0, 2),)
    assert len(found) == (0 if mode is Mode.READ and is_p else max(1, parsed.remote_dp_size) if is_p else 1)


@pytest.mark.parametrize("name", ["read_chat", "read_dp", "read_n2", "read_prefill_null_kv", "write_chat", "write_dp"])
def test_the_fake_routers_legs_are_the_recorded_ones(name):
    """Its parameters for both legs equal the recorded ones, key by key."""
    transcript, router = TRANSCRIPTS[name], FakeRouter()
    for frame in frames_of(transcript):
        router.ping(frame, 0.0)
    pair = router.pair(0.0)
    assert pair is not None
    recorded = {leg["to"]: leg for leg in reversed(transcript["legs"])}
    rank = int(recorded["P"]["headers"].get("x-data-parallel-rank", 0))
    transfer_id = recorded["P"]["body"]["kv_transfer_params"]["transfer_id"]
    first, second = router.legs(*pair, transfer_id, recorded["P"].get("answer"), rank)
    assert first == recorded["P"]["body"]["kv_transfer_params"]
    assert second == recorded["D"]["body"]["kv_transfer_params"]


def test_our_answer_has_the_keys_of_the_recorded_one(tmp_path):
    """READ: what our P answers is what upstream's P answers, key by key and type by type."""
    leg = TRANSCRIPTS["read_chat"]["legs"][0]
    engine = Engine(tmp_path, "P", "READ")
    request_id = wrapped(leg["headers"]["x-request-id"])
    engine.add(request_id, 3 * BLOCK, leg["body"]["kv_transfer_params"])
    engine.finish()
    ours, recorded = engine.answers[request_id], leg["answer"]
    ours.pop("remote_prefill_cached_tokens")  # of vLLM's scheduler, whatever the connector
    assert list(ours) == list(recorded)
    assert {k: type(v) for k, v in ours.items()} == {k: type(v) for k, v in recorded.items()}
    assert re.fullmatch(r"127\.0\.0\.1:\d+", ours["remote_engine_id"])


def test_a_whole_read_goes_through_both_halves(tmp_path):
    """P's answer, copied by the router into D's leg, makes D load exactly P's blocks."""
    router = FakeRouter()
    for frame in frames_of(TRANSCRIPTS["read_chat"]):
        router.ping(frame, 0.0)
    pair = router.pair(0.0)
    (tmp_path / "p").mkdir()
    (tmp_path / "d").mkdir()
    p, d = Engine(tmp_path / "p", "P", "READ"), Engine(tmp_path / "d", "D", "READ")
    p.add("p", 3 * BLOCK + 1, router.legs(*pair, "t")[0])
    p.steps(3)
    answer = p.answers["p"]
    d.add("d", 3 * BLOCK + 1, router.legs(*pair, "t", answer)[1])
    (load,) = [load for plan in d.steps(2) for load in plan.loads]
    assert load.params.remote_blocks == (tuple(answer["remote_block_ids"][0]),)
    assert len(load.blocks) == 3
    for engine in (p, d):
        engine.finish()


@pytest.mark.parametrize("last", ["first child", "second child"])
def test_n2_read_answers_whichever_child_ends_last(tmp_path, last):
    """vLLM hands the router what the child that ends last returned; both of ours name the blocks of the one offer."""
    engine = Engine(tmp_path, "P", "READ")
    prompt = list(range(40))
    leg = params("P", "t")
    engine.add("0_r", prompt, leg, max_tokens=1 if last == "second child" else 3)
    engine.add("1_r", prompt, leg, max_tokens=3 if last == "second child" else 1)
    plans = engine.steps(8)
    assert [o.request_id for plan in plans for o in plan.offers] == ["0_r"]
    end = {"first child": "0_r", "second child": "1_r"}[last]
    assert engine.answers[end]["remote_block_ids"] == engine.answers["0_r"]["remote_block_ids"]
    engine.finish()


def test_n2_read_on_d_loads_once(tmp_path):
    """D's two children share one transfer: one loads it, the other computes, both are answered."""
    engine = Engine(tmp_path, "D", "READ")
    for child in ("0_r", "1_r"):
        engine.add(child, list(range(40)), params("D", "t", [1, 2, 3]))
    assert len([load for plan in engine.steps(3) for load in plan.loads]) == 1
    engine.finish()
    assert set(engine.finished) == {"0_r", "1_r"}


def test_an_answer_never_goes_to_another_prompt(tmp_path):
    """A request with another's transfer id, but not its prompt, learns nothing of its blocks."""
    engine = Engine(tmp_path, "P", "READ")
    engine.add("a", list(range(40)), params("P", "t"))
    engine.add("thief", list(range(1, 41)), params("P", "t"))
    engine.steps(4)
    assert "thief" not in engine.answers
    engine.finish()


@pytest.mark.parametrize("name", ["read_prefill_no_kv", "read_prefill_null_kv", "write_prefill_no_kv"])
def test_without_an_answer_d_computes_or_loads_as_its_leg_says(tmp_path, name):
    """READ without P's answer is a plain request for D; WRITE does not need one."""
    transcript = TRANSCRIPTS[name]
    leg = next(leg for leg in transcript["legs"] if leg["to"] == "D")
    engine = Engine(tmp_path, "D", "READ" if name.startswith("read") else "WRITE")
    engine.add(wrapped(leg["headers"]["x-request-id"]), 40, leg["body"].get("kv_transfer_params"))
    loads = [load for plan in engine.steps(3) for load in plan.loads]
    assert bool(loads) is name.startswith("write")
    engine.finish()


@pytest.mark.parametrize("name", ["write_prefill_500", "write_prefill_refused", "write_client_timeout_in_prefill"])
def test_d_survives_a_missing_prefill(tmp_path, name):
    """The router got no answer from P and drops D's leg: D gives its blocks back once the transfer is settled."""
    leg = next(leg for leg in TRANSCRIPTS[name]["legs"] if leg["to"] == "D")
    engine = Engine(tmp_path, "D", "WRITE")
    request_id = wrapped(leg["headers"]["x-request-id"])
    engine.add(request_id, 40, leg["body"]["kv_transfer_params"])
    engine.steps(2)
    engine.abort(request_id)
    (plan,) = engine.steps(1)
    assert plan.aborts == [leg["body"]["kv_transfer_params"]["transfer_id"]]
    engine.finish()


@pytest.mark.parametrize("name", ["read_decode_refused", "write_decode_refused", "write_decode_500"])
def test_p_survives_a_missing_decode(tmp_path, name):
    """P served its leg and nobody comes: its blocks are held until the transfer is settled, then they are free."""
    leg = next(leg for leg in TRANSCRIPTS[name]["legs"] if leg["to"] == "P")
    engine = Engine(tmp_path, "P", "READ" if name.startswith("read") else "WRITE")
    engine.add(wrapped(leg["headers"]["x-request-id"]), 40, leg["body"]["kv_transfer_params"])
    engine.steps(3)
    assert engine.worker.owed
    engine.finish(verdict="failed")


@pytest.mark.parametrize("mode", ["READ", "WRITE"])
def test_explicit_parameters_win_over_the_request_id(mode):
    """A sidecar's `remote_host` and ports are used even when the id names another address."""
    request_id = wrapped(TRANSCRIPTS["read_chat"]["legs"][0]["headers"]["x-request-id"])
    parsed = parse_decode_params(params("D", "t", [1], remote_host="10.9.8.7"), request_id, Mode(mode))
    assert parsed.peer == ZmqAddress("10.9.8.7", 7301, 62005)
    hosts = parse_decode_params(params("D", "t", [1], remote_hosts="fd00::1"), request_id, Mode(mode))
    assert prefill_endpoint(hosts, 0, 1).host == "fd00::1"
