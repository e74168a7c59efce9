"""kv_transfer_params: the recorded legs, and everything a client can put there instead."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moriio_proto.errors import ParameterError
from moriio_proto.wire.addresses import ZmqAddress
from moriio_proto.wire.messages import Mode
from moriio_proto.wire.params import TransferParams, parse_decode_params, parse_prefill_params, prefill_answer

LEGS = json.loads((Path(__file__).parents[1] / "testdata/wire/router_legs.json").read_text())
quick = settings(max_examples=80, deadline=None, derandomize=True)
P_ADDRESS, D_ADDRESS = ZmqAddress("127.0.0.1", 7301, 7401), ZmqAddress("127.0.0.1", 7302, 7402)
ROUTED = f"cmpl-___prefill_addr_{P_ADDRESS.format()}___decode_addr_{D_ADDRESS.format()}_{'ab' * 16}-0-1234"


def leg(scenario, side):
    """Parameters, request id and mode of a recorded leg."""
    (found,) = (x for x in LEGS if x["scenario"] == scenario and x["leg"] == side)
    return found["params"], found["request_id"], Mode(found["mode"])


def transfer_id(scenario, side):
    """The id that the router gave to a recorded leg."""
    return leg(scenario, side)[0]["transfer_id"]


def test_recorded_write_legs_lead_to_each_other():
    """WRITE: P learns D's address, D learns P's, both the same transfer id."""
    tx = transfer_id("write_chat", "P")
    at_p = parse_prefill_params(*leg("write_chat", "P"))
    at_d = parse_decode_params(*leg("write_chat", "D"))
    assert at_p == TransferParams(tx, Mode.WRITE, D_ADDRESS, remote_dp_size=1, remote_tp_size=1)
    assert at_d == TransferParams(
        transfer_id("write_chat", "D"), Mode.WRITE, P_ADDRESS, remote_dp_size=1, remote_tp_size=1
    )


def test_recorded_read_leg_of_d_carries_ps_blocks():
    """READ: D's leg has P's answer, with the TP size under its older name."""
    parsed = parse_decode_params(*leg("read_chat", "D"))
    assert parsed == TransferParams(
        transfer_id("read_chat", "D"), Mode.READ, P_ADDRESS, remote_dp_size=1, remote_dp_size_local=1, remote_tp_size=1,
        remote_engine_id="127.0.0.1:7301", remote_blocks=((3, 1, 4),),
    )  # fmt: skip


def test_recorded_read_leg_of_p_has_no_tp_size():
    """The router's READ leg to P tells no TP size: that is 0, unknown, not our own."""
    parsed = parse_prefill_params(*leg("read_chat", "P"))
    assert (parsed.remote_tp_size, parsed.remote_dp_size, parsed.peer) == (0, 1, D_ADDRESS)


def test_recorded_data_parallel_legs_tell_the_peers_sizes():
    """Each leg tells the sizes of the other side."""
    at_p, at_d = parse_prefill_params(*leg("write_dp", "P")), parse_decode_params(*leg("write_dp", "D"))
    assert (at_p.remote_dp_size, at_p.remote_tp_size) == (4, 2)
    assert (at_d.remote_dp_size, at_d.remote_tp_size, at_d.remote_dp_rank) == (2, 2, 0)


@pytest.mark.parametrize("scenario", ["read_prefill_no_kv", "read_prefill_null_kv"])
def test_decode_leg_after_a_failed_prefill_is_a_plain_request(scenario):
    """When P's answer had no parameters, D computes the prompt itself."""
    assert parse_decode_params(*leg(scenario, "D")) is None


def test_malformed_address_of_the_peer_is_refused_only_where_it_is_needed():
    """P's registration was odd: D in WRITE cannot reach it; P itself, and D in READ, do not need that text."""
    with pytest.raises(ParameterError, match=r"127\.0\.0\.1:7301.*expected host:IP"):
        parse_decode_params(*leg("write_odd_zmq_address", "D"))
    assert parse_prefill_params(*leg("write_odd_zmq_address", "P")).peer == D_ADDRESS
    assert parse_decode_params(*leg("read_odd_zmq_address", "D")).peer == P_ADDRESS


def test_every_recorded_leg_was_looked_at():
    """All recorded legs parse, save the one whose peer registered nonsense."""
    refused = []
    for x in LEGS:
        parse = parse_prefill_params if x["leg"] == "P" else parse_decode_params
        try:
            parse(x["params"], x["request_id"], Mode(x["mode"]))
        except ParameterError:
            refused.append((x["scenario"], x["leg"]))
    assert refused == [("write_odd_zmq_address", "D")]


def test_prefill_answer_is_the_recorded_map_in_its_order():
    """P's answer is what the router copied into D's leg, key for key."""
    params, _, _ = leg("read_chat", "D")
    answer = prefill_answer(
        transfer_id=params["transfer_id"], block_ids=((3, 1, 4),), address=P_ADDRESS,
        dp_rank=0, dp_size=1, dp_size_local=1, tp_size=1,
    )  # fmt: skip
    assert list(answer.items()) == list(params.items())


ADDRESS = ("remote_host", "remote_handshake_port", "remote_notify_port")


def decode_params(**changes):
    """A complete READ leg of D with some keys changed ("absent" deletes)."""
    full = {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "tx-1", "remote_block_ids": [[1, 2]],
        "remote_host": "10.0.0.9", "remote_handshake_port": 1, "remote_notify_port": 2, "remote_dp_rank": 1,
        "remote_dp_size": 2, "remote_tp_size": 1,
    }  # fmt: skip
    return {k: v for k, v in {**full, **changes}.items() if v != "absent"}


def test_structured_address_wins_over_the_text_in_the_id():
    """Sidecars pass the address explicitly; it counts even when the id has another."""
    assert parse_decode_params(decode_params(), ROUTED, Mode.READ).peer == ZmqAddress("10.0.0.9", 1, 2)


def test_incomplete_structured_address_falls_back_to_the_id():
    """Only three complete parameters are an address."""
    assert parse_decode_params(decode_params(remote_notify_port=None), ROUTED, Mode.READ).peer == P_ADDRESS


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": None}])
def test_request_that_nobody_disaggregated_is_plain(params):
    """No parameters, or a flag that is not set: None for both roles and modes."""
    for mode in Mode:
        assert parse_decode_params(params, "x", mode) is None
        assert parse_prefill_params(params, "x", mode) is None


@pytest.mark.parametrize(
    ("parse", "flag", "mode", "required"),
    [
        (parse_prefill_params, "do_remote_decode", Mode.WRITE, {"transfer_id", *ADDRESS}),
        (parse_prefill_params, "do_remote_decode", Mode.READ, {"transfer_id"}),
        (parse_decode_params, "do_remote_prefill", Mode.WRITE, {"transfer_id", *ADDRESS}),
        (parse_decode_params, "do_remote_prefill", Mode.READ, {"transfer_id", *ADDRESS, "remote_block_ids"}),
    ],
)
def test_missing_required_key_is_named(parse, flag, mode, required):
    """The table of required keys: without one of them the error names it, without any other the leg parses."""
    optional = decode_params().keys() - required - {"do_remote_prefill", "do_remote_decode"}
    for key in (*required, *optional):
        named = refused_key(parse, decode_params(**{flag: True, key: "absent"}), "cmpl-1", mode)
        assert named == (key if key in required else None)


def refused_key(parse, *args):
    """The key that a refusal names, or None when the leg parses (as a disaggregated one or not)."""
    try:
        parse(*args)
    except ParameterError as error:
        return error.key
    return None


def deep(levels):
    """Lists in lists."""
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("do_remote_prefill", "true"), ("do_remote_prefill", 1), ("transfer_id", 7), ("transfer_id", ""),
        ("transfer_id", "x" * 513), ("transfer_id", "a\x00b"), ("transfer_id", "\ud800"), ("transfer_id", ["tx"]),
        ("remote_host", 5), ("remote_host", ""), ("remote_host", "a b"), ("remote_host", "tcp://x"),
        ("remote_handshake_port", "7301x"), ("remote_handshake_port", "0"),
        ("remote_handshake_port", 0), ("remote_handshake_port", -1),
        ("remote_handshake_port", 65536), ("remote_notify_port", True), ("remote_notify_port", 1.0),
        ("remote_dp_rank", -1), ("remote_dp_rank", "0"), ("remote_dp_rank", 2),
        pytest.param("remote_dp_rank", 10**5000, id="digits"),
        ("remote_dp_size", -1), ("remote_dp_size", 2**40), ("remote_dp_size_local", -1), ("remote_tp_size", [1]),
        ("remote_hosts", 5), ("remote_hosts", [1]), ("remote_hosts", ["a", ""]), ("remote_hosts", {"a": 1}),
        ("remote_engine_id", 5), ("remote_block_ids", "12"), ("remote_block_ids", 5), ("remote_block_ids", {"a": 1}),
        ("remote_block_ids", [1, [2]]), ("remote_block_ids", [-1]), ("remote_block_ids", [[2**31]]),
        ("remote_block_ids", [[True]]), ("remote_block_ids", ["1"]), ("remote_block_ids", [[1]] * 65),
        ("remote_block_ids", [0] * (2**17 + 1)), ("remote_block_ids", deep(5000)), ("transfer_id", deep(5000)),
    ],
)  # fmt: skip
def test_wrong_value_is_refused_by_its_key(key, bad):
    """Wrong types, negative and huge numbers: one ParameterError that names the key and what was expected."""
    with pytest.raises(ParameterError, match="expected") as caught:
        parse_decode_params(decode_params(**{key: bad}), "cmpl-1", Mode.READ)
    assert caught.value.key == key
    assert len(str(caught.value)) < 600


def test_ports_may_be_texts():
    """Upstream's P answers with its ports as its user wrote them, which the guide does as texts."""
    given = decode_params(remote_handshake_port="7301", remote_notify_port="7401")
    parsed = parse_decode_params(given, "plain", Mode.READ)
    assert parsed.peer == ZmqAddress("10.0.0.9", 7301, 7401)


@pytest.mark.parametrize("params", [[], "x", 5, True])
def test_parameters_that_are_no_map_are_refused(params):
    """Non-map content is an error for that request."""
    with pytest.raises(ParameterError, match="kv_transfer_params"):
        parse_decode_params(params, "x", Mode.WRITE)


def test_remote_hosts_give_each_pod_its_host():
    """A rank lives on remote_hosts[rank // dp_size_local]; one host may stand as a string."""
    params = decode_params(remote_hosts=["a", "b"], remote_dp_size=4, remote_dp_size_local=2)
    parsed = parse_decode_params(params, "x", Mode.READ)
    assert [parsed.host_of(rank) for rank in range(4)] == ["a", "a", "b", "b"]
    assert parse_decode_params(decode_params(remote_hosts="a"), "x", Mode.READ).host_of(1) == "a"
    assert parse_decode_params(decode_params(), "x", Mode.READ).host_of(1) == "10.0.0.9"


def test_rank_without_a_pod_is_refused_at_admission():
    """A list of hosts that is too short for the rank is found before anything is dialled."""
    with pytest.raises(ParameterError, match="pod 1 of rank 1"):
        parse_decode_params(decode_params(remote_hosts=["a"], remote_dp_size_local=1), "x", Mode.READ)


def test_flat_and_empty_block_lists():
    """A flat list is one group; an empty list is zero blocks, which is a case and no error."""
    assert parse_decode_params(decode_params(remote_block_ids=[5, 6]), "x", Mode.READ).remote_blocks == ((5, 6),)
    assert parse_decode_params(decode_params(remote_block_ids=[]), "x", Mode.READ).remote_blocks == ((),)
    assert parse_decode_params(decode_params(remote_block_ids=[[], [1]]), "x", Mode.READ).remote_blocks == ((), (1,))


def test_record_does_not_follow_later_changes_of_the_map():
    """W-PARAMS-MUTATED: the record is a snapshot; what happens to the map afterwards does not reach it."""
    params = decode_params()
    parsed = parse_decode_params(params, "x", Mode.READ)
    params["remote_block_ids"][0].append(9)
    params.clear()
    assert parsed.remote_blocks == ((1, 2),)


KEYS = [*decode_params(), "remote_hosts", "tp_size", "remote_engine_id", "remote_dp_size_local"]
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@quick
@given(st.dictionaries(st.sampled_from(KEYS), junk), st.text(max_size=20))
def test_arbitrary_parameters_end_in_a_record_none_or_the_error(changes, request_id):
    """Whatever a client sends: never another exception."""
    for mode in Mode:
        for parse in (parse_prefill_params, parse_decode_params):
            params = {**decode_params(do_remote_decode=True), **changes}
            key = refused_key(parse, params, request_id, mode)
            assert key is None or key.split()[0] in {*params, "zmq_address"}
