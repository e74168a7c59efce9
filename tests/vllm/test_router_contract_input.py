"""Whatever a client puts into `kv_transfer_params` or a request id ends with that request; others go on."""

from __future__ import annotations

import itertools
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from tests.vllm.engine import BLOCK, Engine, params

from moriio_proto.errors import ConfigurationError, ParameterError
from moriio_proto.wire.messages import Mode
from moriio_proto.wire.params import TransferParams, parse_decode_params, parse_prefill_params
from moriio_vllm._config_keys import BY_NAME
from moriio_vllm.allowed_peers import AllowedPeers

KEYS = [
    "do_remote_decode", "do_remote_prefill", "transfer_id", "remote_engine_id", "remote_block_ids", "remote_host",
    "remote_handshake_port", "remote_notify_port", "remote_dp_rank", "remote_dp_size", "remote_dp_size_local",
    "remote_tp_size", "tp_size", "remote_hosts", "remote_dp_rank_override", "is_request_leader", "unknown",
]  # fmt: skip
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=9), st.binary(max_size=8),
    st.sampled_from([-1, 0, 65535, 65536, 2**31, "t-good", "7301", "::1", "0x7f.1", "a" * 3000]),
)  # fmt: skip
maps = st.dictionaries(st.text(), leaves, max_size=3)
junk = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | maps, max_leaves=8)
ids = st.text(max_size=30) | st.builds(
    "___prefill_addr_{}___decode_addr_{}_{}".format, st.text(max_size=40), st.text(max_size=40),
    st.sampled_from(["0" * 32, "f" * 31, "0123456789abcdef" * 2]),
)  # fmt: skip
numbers = itertools.count()


@st.composite
def legs(draw, role):
    """Mostly a sound leg with some keys replaced by junk; sometimes a map of junk (vLLM's API takes only maps)."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.dictionaries(st.sampled_from(KEYS), junk))
    leg = params(role, f"t-{draw(st.integers(0, 3))}", [1, 2, 3])
    return leg | draw(st.dictionaries(st.sampled_from(KEYS), junk, max_size=4))


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(leg=st.one_of(legs("P"), legs("D"), junk), request_id=ids, mode=st.sampled_from(list(Mode)))
def test_parsing_ends_in_a_record_nothing_or_the_one_error(leg, request_id, mode):
    """No parameter and no id makes the parsers do anything else, and what they accept is in range."""
    for parse in (parse_prefill_params, parse_decode_params):
        try:
            parsed = parse(leg, request_id, mode)
        except ParameterError:
            continue
        assert parsed is None or isinstance(parsed, TransferParams)
        if parsed is not None and parsed.peer is not None:
            assert 1 <= parsed.peer.handshake_port <= 65535
            assert all(0 <= block < 2**31 for group in parsed.remote_blocks for block in group)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """One engine for each role and mode: they are worn by every example, and must stay whole."""
    logging.disable(logging.WARNING)
    yield {
        (role, mode): Engine(tmp_path_factory.mktemp(f"{role}{mode}"), role, mode, blocks=128)
        for role in "PD" for mode in ("READ", "WRITE")
    }  # fmt: skip
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("mode", ["READ", "WRITE"])
@pytest.mark.parametrize("role", ["P", "D"])
@settings(
    max_examples=150, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_a_bad_request_harms_only_itself(engines, role, mode, data):
    """With any junk among them, the good requests of the same steps are answered and every block comes back."""
    engine = engines[role, mode]
    number = next(numbers)
    good = [f"good-{number}", f"plain-{number}"]
    bad = f"{data.draw(ids)}-{number}"
    engine.add(good[0], 2 * BLOCK + 1, params(role, f"good-{number}", [4, 5, 6]))
    engine.add(bad, data.draw(st.integers(1, 70)), data.draw(legs(role)))
    engine.add(good[1], BLOCK)
    if data.draw(st.booleans()):
        engine.steps(2)
        engine.abort(bad)
    engine.finish()
    assert all(name in engine.finished for name in good)


# --- allowed_peers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [["10.0.0.0/8", "fd00::/8", "d0.example"], "10.0.0.0/8, fd00::/8,d0.example"])
@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("10.2.3.4", True), ("11.0.0.1", False), ("fd00::7", True), ("fe80::1%eth0", False), ("d0.example", True),
        ("D0.Example", True), ("d1.example", False), ("localhost", False), ("::ffff:10.2.3.4", True), ("0xa.1", False),
        ("010.2.3.4", False),
    ],
)  # fmt: skip
def test_allowed_hosts(value, host, allowed):
    """Addresses by network, also where IPv6 wraps IPv4; names only as they are listed, never resolved."""
    peers = BY_NAME["allowed_peers"].parse(value)
    assert isinstance(peers, AllowedPeers)
    if allowed:
        peers.check(host)
    else:
        with pytest.raises(ParameterError, match="allowed_peers"):
            peers.check(host)


@pytest.mark.parametrize("value", [[], "", "10.0.0.1/8", "10.0.0.0/33", [1], {"a": 1}, "a,,b", 7, ["10.0.0.0/8", ""]])
def test_a_list_that_means_nothing_is_refused(value):
    """An empty entry, a network with host bits, or something else than text is an error at start."""
    with pytest.raises(ConfigurationError, match="allowed_peers"):
        BY_NAME["allowed_peers"].parse(value)


@pytest.mark.parametrize(
    "leg", [{"remote_host": "10.0.0.1"}, {"remote_hosts": ["10.0.0.1", "127.0.0.1"], "remote_dp_size": 2}]
)
def test_a_foreign_host_fails_that_load_alone(tmp_path, leg):
    """D does not plan to meet a host outside the list; the load fails, with a reason, and its neighbour is served."""
    engine = Engine(tmp_path, "D", "WRITE", allowed_peers="127.0.0.0/8")
    engine.add("bad", 40, params("D", "bad", **leg))
    engine.add("good", 40, params("D", "good"))
    plans = engine.steps(2)
    by_request = {load.request_id: load for plan in plans for load in plan.loads}
    assert by_request["bad"].params is None
    assert "allowed_peers" in by_request["bad"].error
    assert by_request["good"].params is not None
    assert {p.transfer_id for plan in plans for p in plan.expects} <= {"good"}
    engine.finish()


def test_a_foreign_host_is_not_offered_blocks(tmp_path):
    """P serves a request that names a foreign decode node as a plain one."""
    engine = Engine(tmp_path, "P", "WRITE", allowed_peers=["127.0.0.0/8"])
    engine.add("bad", 40, params("P", "bad", remote_host="10.0.0.1"))
    assert not any(plan.offers for plan in engine.steps(2))
    engine.finish()
    assert "bad" in engine.finished


def test_another_tp_size_is_refused_by_name(tmp_path):
    """A peer whose TP size the parameters give as another one than ours is refused before anything is planned."""
    engine = Engine(tmp_path, "D", "WRITE")
    engine.add("bad", 40, params("D", "bad", remote_tp_size=2))
    (load,) = [load for plan in engine.steps(2) for load in plan.loads]
    assert "remote_tp_size=2: expected 1" in load.error
    engine.finish()
