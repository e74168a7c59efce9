"""Addresses, router-shaped ids and every port formula."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moriio_proto.errors import ParameterError
from moriio_proto.wire import addresses as a

quick = settings(max_examples=60, deadline=None, derandomize=True)

HOSTS = st.sampled_from(["10.0.0.1", "localhost", "node-7.rack_2.example", "::1", "fe80::1%eth0", "2001:db8::5"])
PORTS = st.integers(1, 65535)


@quick
@given(HOSTS, PORTS, PORTS)
def test_zmq_address_survives_its_text(host, handshake, notify):
    """Parsing a formatted address gives the address, IPv6 included."""
    address = a.ZmqAddress(host, handshake, notify)
    assert a.ZmqAddress.parse(address.format()) == address


def test_zmq_address_is_the_routers_text():
    """The text is the one that is registered with the router."""
    assert a.ZmqAddress("127.0.0.1", 7301, 7401).format() == "host:127.0.0.1,handshake:7301,notify:7401"
    assert a.ZmqAddress.parse("notify:2, host:[::1] ,handshake:1") == a.ZmqAddress("::1", 1, 2)


@pytest.mark.parametrize(
    "text",
    [
        "", "127.0.0.1:7301", "host:h,handshake:1", "host:h,handshake:1,notify:2,more:3", "host:h,handshake:1,host:h",
        "host:,handshake:1,notify:2", "host:a b,handshake:1,notify:2", "host:h,handshake:x,notify:2",
        "host:h,handshake:0,notify:2", "host:h,handshake:65536,notify:2", "host:h,handshake:-1,notify:2",
        "host:h,handshake:1,notify:٣", "host:h,handshake:1,notify:" + "9" * 5000, "host:h/x,handshake:1,notify:2",
    ],
)  # fmt: skip
def test_malformed_zmq_address_is_refused(text):
    """A missing, repeated or unknown key and a port that is none are errors."""
    with pytest.raises(ParameterError, match="zmq_address"):
        a.ZmqAddress.parse(text)


@quick
@given(st.text(max_size=60))
def test_arbitrary_text_is_an_address_or_the_error(text):
    """Whatever stands where an address should: ParameterError or an address that formats and parses again."""
    try:
        address = a.ZmqAddress.parse(text)
    except ParameterError:
        return
    assert a.ZmqAddress.parse(address.format()) == address


P, D = "host:10.0.0.1,handshake:7301,notify:7401", "host:fe80::2,handshake:7302,notify:7402"
ROUTED = f"___prefill_addr_{P}___decode_addr_{D}_{'0123456789abcdef' * 2}"


@pytest.mark.parametrize("wrap", ["{}", "cmpl-{}-0-1f2e3d4c", "chatcmpl-{}", "1_chatcmpl-{}-bb0bf8cd"])
def test_both_addresses_are_found_however_vllm_wraps_the_id(wrap):
    """Prefixes and suffixes of vLLM, and of its n > 1 children, do not hide the addresses."""
    assert a.addresses_in_request_id(wrap.format(ROUTED)) == (P, D)


@pytest.mark.parametrize(
    "request_id",
    [
        "", "cmpl-0123456789abcdef", ROUTED[:-1], ROUTED.replace("___decode", "__decode"), ROUTED + "0",
        f"___prefill_addr____decode_addr__{'0' * 32}", "x" * 3000 + ROUTED, "___prefill_addr_" * 100,
    ],
)  # fmt: skip
def test_id_of_another_shape_has_no_addresses(request_id):
    """An id that is not the router's gives None, not an error."""
    assert a.addresses_in_request_id(request_id) is None


def test_tcp_endpoint_brackets_ipv6():
    """An IPv6 host stands in brackets, as pyzmq wants it, and no other does."""
    assert a.tcp_endpoint("10.0.0.1", 1) == "tcp://10.0.0.1:1"
    assert a.tcp_endpoint("node", 65535) == "tcp://node:65535"
    assert a.tcp_endpoint("fe80::1%eth0", 7) == "tcp://[fe80::1%eth0]:7"


@pytest.mark.parametrize(
    ("host", "port"), [("", 1), ("a/b", 1), ("h", 0), ("h", 65536), ("h", True), ("h", "1"), (None, 1)]
)
def test_tcp_endpoint_refuses_what_cannot_be_dialled(host, port):
    """No endpoint is made of a host or port that is none."""
    with pytest.raises(ParameterError):
        a.tcp_endpoint(host, port)


@pytest.mark.parametrize("dp_local", range(1, 9))
@pytest.mark.parametrize("tp_size", range(1, 9))
def test_ports_of_a_pod_are_dense_and_never_collide(dp_local, tp_size):
    """Up to 8 x 8 ranks in 4 pods: each rank of a pod has its own port, the pods have the same ones."""
    for pod in range(4):
        ranks = list(itertools.product(range(pod * dp_local, (pod + 1) * dp_local), range(tp_size)))
        for formula in (a.handshake_port, a.notify_port, a.upstream_release_port):
            ports = [formula(7000, dp, tp, tp_size, dp_local) for dp, tp in ranks]
            assert ports == list(range(7000, 7000 + dp_local * tp_size))
        assert {a.pod_index(dp, dp_local) for dp, _ in ranks} == {pod}
        assert [a.local_dp_rank(dp, dp_local) for dp, _ in ranks[::tp_size]] == list(range(dp_local))


@pytest.mark.parametrize("dp_size", range(1, 9))
@pytest.mark.parametrize("tp_size", range(1, 9))
def test_upstream_formula_agrees_unless_both_ranks_are_above_zero(dp_size, tp_size):
    """Ours and upstream's listening port are the same exactly when dp is 0 or the TP size is 1."""
    for dp, tp in itertools.product(range(dp_size), range(tp_size)):
        upstream = a.upstream_listen_port(7000, dp, tp)
        assert upstream == 7000 + dp + tp
        assert (upstream == a.handshake_port(7000, dp, tp, tp_size)) == (dp == 0 or tp_size == 1)


def test_unknown_pod_size_folds_nothing():
    """Size 0 means unknown: the global rank is taken as it is and lives in pod 0."""
    assert a.local_dp_rank(5, 0) == 5
    assert a.pod_index(5, 0) == 0
    assert a.notify_port(7000, 5, 1, 2) == 7011


@pytest.mark.parametrize(
    ("base", "dp", "tp", "tp_size"),
    [(65535, 0, 1, 2), (0, 0, 0, 1), (7000, -1, 0, 1), (7000, 0, 2, 2), (7000, 0, -1, 2), (7000, 0, 0, 0)],
)
def test_port_out_of_range_is_refused(base, dp, tp, tp_size):
    """A rank out of range or a sum above 65535 is an error, never a wrapped port."""
    with pytest.raises(ParameterError):
        a.handshake_port(base, dp, tp, tp_size)
