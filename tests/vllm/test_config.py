"""The configuration: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moriio_proto.errors import ConfigurationError
from moriio_proto.wire.codec import encode_ping
from moriio_proto.wire.messages import Mode
from moriio_vllm.config import KEYS, ConnectorConfig, Ranks, config_table

GUIDE = {  # the producer of the user's guide, word for word
    "proxy_ip": "127.0.0.1",
    "proxy_ping_port": "36367",
    "http_port": "20005",
    "handshake_port": "6301",
    "notify_port": "6105",
}
REQUIRED = {"http_port": 8000}


def parse(extra, role="kv_producer", ranks=None, **more):
    """A configuration as the worker of one rank makes it."""
    more = {"default_host": lambda: "10.0.0.7", "environment": {}, **more}
    return ConnectorConfig.from_extra(extra, role=role, ranks=ranks or Ranks(), **more)


def refusal(extra, **more):
    """The error that a configuration ends in."""
    with pytest.raises(ConfigurationError) as caught:
        parse(extra, **more)
    return caught.value


def test_users_guide_is_accepted():
    """The guide's numbers given as strings become numbers, and what it leaves out has upstream's defaults."""
    config = parse(GUIDE)
    assert (config.proxy_ip, config.proxy_ping_port) == ("127.0.0.1", 36367)
    assert (config.http_port, config.handshake_port, config.notify_port) == (20005, 6301, 6105)
    assert (config.mode, config.backend, config.host) == (Mode.WRITE, "rdma", "10.0.0.7")
    assert (config.qp_per_transfer, config.post_batch_size, config.num_workers) == (1, -1, 1)
    assert (config.transfer_timeout, config.defer_timeout, config.recv_abort_timeout) == (30.0, 60.0, 120.0)
    assert config.is_producer
    assert config.registers


def test_what_upstream_accepts_is_accepted():
    """Only http_port is needed; missing, empty, zero and null ports and hosts are "not given"."""
    config = parse({"http_port": 8000.0, "handshake_port": 0, "notify_port": "", "proxy_ip": "", "host_ip": None})
    assert (config.http_port, config.handshake_port, config.notify_port) == (8000, 6301, 61005)
    assert config.proxy_ip is None
    assert not config.registers
    assert parse({**REQUIRED, "proxy_ping_port": 0}).proxy_ping_port is None


def test_ping_is_what_upstream_sends():
    """A node with upstream's configuration registers with upstream's recorded bytes."""
    extra = {"http_port": 21005, "handshake_port": "7301", "notify_port": "7401", "host_ip": "127.0.0.1"}
    assert encode_ping(parse(extra).ping()) == bytes.fromhex(
        "86a474797065a150ac687474705f61646472657373af3132372e302e302e313a3231303035ab7a6d715f61646472657373d929"
        "686f73743a3132372e302e302e312c68616e647368616b653a373330312c6e6f746966793a37343031a764705f73697a6501"
        "a774705f73697a6501ad7472616e736665725f6d6f6465a55752495445"
    )


def test_ping_of_a_decode_instance_says_so():
    """Role, mode, global sizes, and an IPv6 host in brackets where a URL is made of it."""
    extra = {**REQUIRED, "host_ip": "[fd00::1]", "read_mode": "true"}
    ping = parse(extra, role="kv_consumer", ranks=Ranks(dp_size=4, dp_size_local=2, tp_size=8)).ping()
    assert (ping.role, ping.transfer_mode, ping.dp_size, ping.tp_size) == ("D", Mode.READ, 4, 8)
    assert ping.http_address == "[fd00::1]:8000"
    assert ping.zmq_address == "host:fd00::1,handshake:6301,notify:61005"


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("true", True),
        ("True", True),
        (" 1 ", True),
        (1, True),
        (True, True),
        ("false", False),
        ("0", False),
        (0, False),
    ],
)
def test_booleans(text, meaning):
    """A boolean may be a boolean, 1 or 0, or the text of either."""
    assert parse({**REQUIRED, "read_mode": text}).read_mode is meaning


BAD = [
    ("http_port", "eighty"), ("http_port", 0), ("http_port", 65536), ("http_port", -1), ("http_port", True),
    ("http_port", 80.5), ("http_port", float("inf")), ("http_port", [80]), ("http_port", ""),
    ("handshake_port", 70000), ("handshake_port", False), ("notify_port", "1e3"), ("notify_port", {}),
    ("proxy_ping_port", 99999), ("proxy_ip", 5), ("proxy_ip", "no host"), ("proxy_ip", "tcp://a"), ("host_ip", []),
    ("read_mode", "yes"), ("read_mode", 2), ("read_mode", 1.0), ("read_mode", ""), ("backend", 1), ("backend", ""),
    ("backend", "carrier-pigeon"), ("qp_per_transfer", 0), ("post_batch_size", 0), ("post_batch_size", -2),
    ("num_workers", "many"), ("num_workers", 0), ("transfer_timeout", 0), ("transfer_timeout", "nan"),
    ("transfer_timeout", True), ("defer_timeout", -1), ("defer_timeout", "inf"), ("recv_abort_timeout", "soon"),
    ("ping_interval", 0), ("ping_interval", 1e9), ("lease", 0.5), ("lease", None.__class__),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD)
def test_bad_value_is_refused_by_key_value_and_expectation(key, value):
    """The error names the full path of the key, the value as given, and what it should have been."""
    error = refusal({**REQUIRED, key: value})
    assert error.key == f"kv_connector_extra_config.{key}"
    assert error.value == value
    assert str(error) == f"{error.key}={value!r}: expected {error.expected}"
    assert len(error.expected) > 5


def test_missing_key_is_refused():
    """http_port always, proxy_ping_port with proxy_ip."""
    assert refusal({}).key == "kv_connector_extra_config.http_port"
    error = refusal({**REQUIRED, "proxy_ip": "router"})
    assert error.key == "kv_connector_extra_config.proxy_ping_port"
    assert "missing" in error.expected


@pytest.mark.parametrize(
    ("typo", "meant"), [("handshake_prot", "handshake_port"), ("Read_Mode", "read_mode"), ("num_worker", "num_workers")]
)
def test_unknown_key_is_refused_with_the_nearest(typo, meant):
    """A misspelt key is not ignored, and the error knows what was meant."""
    error = refusal({**REQUIRED, typo: "1"})
    assert error.key == f"kv_connector_extra_config.{typo}"
    assert f"did you mean {meant}?" in error.expected


def test_unknown_key_that_resembles_nothing_gets_the_list():
    """Without a near key, the error lists all."""
    assert all(key.name in refusal({**REQUIRED, "zzz": 1}).expected for key in KEYS)


@pytest.mark.parametrize("role", ["kv_both", "", "prefill"])
def test_role_that_is_not_one_of_two_is_refused(role):
    """kv_both is refused with what to do instead."""
    error = refusal(REQUIRED, role=role)
    assert (error.key, error.value) == ("kv_role", role)
    assert "start two instances" in error.expected


def test_last_rank_must_have_ports():
    """The whole range of the pod is checked, not only this rank's port."""
    ranks = Ranks(dp_size=4, dp_size_local=2, tp_size=4)
    assert parse({**REQUIRED, "handshake_port": 65528}, ranks=ranks).handshake_port == 65528
    error = refusal({**REQUIRED, "handshake_port": 65529}, ranks=ranks)
    assert error.key.endswith("handshake_port")
    assert "65528" in error.expected


@pytest.mark.parametrize(("distance", "fine"), [(7, False), (-7, False), (0, False), (8, True), (-8, True)])
def test_port_ranges_of_one_instance_do_not_meet(distance, fine):
    """Handshake and notify ports of 8 ranks are 16 different ports."""
    extra = {**REQUIRED, "handshake_port": 7000, "notify_port": 7000 + distance}
    ranks = Ranks(tp_size=8)
    if fine:
        assert parse(extra, ranks=ranks).notify_port == 7000 + distance
    else:
        assert refusal(extra, ranks=ranks).key == "kv_connector_extra_config.notify_port"


def test_ports_of_all_ranks_of_a_pod_differ():
    """Every rank of the second pod listens on its own ports, and the pod's endpoints list them all."""
    listening = []
    for dp in (2, 3):
        for tp in range(4):
            config = parse(REQUIRED, ranks=Ranks(dp, 4, 2, tp, 4))
            listening.append(config.own_handshake_port)
            assert config.own_notify_port - config.own_handshake_port == 61005 - 6301
            assert not config.registers
    assert listening == list(range(6301, 6309))
    assert parse(REQUIRED, ranks=Ranks(2, 4, 2, 0, 4)).pod_endpoints == tuple(("10.0.0.7", port) for port in listening)


def test_pod_of_unknown_size_is_the_whole_instance():
    """With dp_size_local 0 nothing is folded."""
    config = parse(REQUIRED, ranks=Ranks(dp_rank=1, dp_size=2, dp_size_local=0))
    assert config.own_handshake_port == 6302
    assert [port for _, port in config.pod_endpoints] == [6301, 6302]


def test_only_rank_zero_of_an_instance_registers():
    """One ping per instance, whatever its ranks."""
    registering = [
        (dp, tp) for dp in range(2) for tp in range(2) if parse(GUIDE, ranks=Ranks(dp, 2, 2, tp, 2)).registers
    ]
    assert registering == [(0, 0)]


def test_w_qp_limits_plugin_options():
    """W-QP-LIMITS: a plugin gets exactly its options: checked as their defaults' types, the user's before its own."""
    defaults = {"num_workers": 3, "depth": 16, "ratio": 0.5, "label": "a", "pin": False}
    extra = {**REQUIRED, "backend": "Mine", "num_workers": "2", "depth": "32", "label": "B", "pin": "1"}
    more = {"backends": ["mine"], "options_of": {"mine": defaults}.__getitem__}
    options = parse(extra, **more).transport_options
    assert options == {"num_workers": 2, "depth": 32, "ratio": 0.5, "label": "B", "pin": True}
    assert parse({**REQUIRED, "backend": "mine"}, **more).transport_options == defaults
    assert refusal({**extra, "depth": "deep"}, **more).key == "kv_connector_extra_config.depth"
    assert "did you mean depth?" in refusal({**extra, "dept": 1}, **more).expected
    assert refusal({**REQUIRED, "depth": 1}).key == "kv_connector_extra_config.depth"


def test_backend_that_is_not_installed_is_refused_with_those_that_are():
    """The error lists the names."""
    assert "loopback, tcp" in refusal({**REQUIRED, "backend": "rdma"}, backends=["tcp", "loopback"]).expected


def test_dead_variables_are_named(caplog):
    """An environment variable that upstream once read is ignored with a warning that names the key to use."""
    config = parse(REQUIRED, environment={"VLLM_MORIIO_NUM_WORKERS": "8"})
    assert config.num_workers == 1
    assert "VLLM_MORIIO_NUM_WORKERS" in caplog.text
    assert "kv_connector_extra_config.num_workers" in caplog.text


@pytest.mark.parametrize(("interval", "warned"), [(1.5, False), (1.6, False), (1.7, True)])
def test_slow_pings_are_warned_of(caplog, interval, warned):
    """Above a third of the router's patience two lost pings are too many, so the log says it; the default is below."""
    parse({**REQUIRED, "ping_interval": interval})
    assert ("lost pings" in caplog.text) is warned


def test_table_lists_every_key_once_and_escapes_nothing():
    """The documentation's table has one row per key with its default, and four columns in each."""
    lines = config_table().splitlines()
    assert [re.match(r"\| `(\w+)` ", line)[1] for line in lines[2:]] == [key.name for key in KEYS]
    assert {line.count("|") for line in lines} == {5}
    assert "| `http_port` | required |" in config_table()
    assert "| `post_batch_size` | -1 | an integer of at least 1 or -1 |" in config_table()
    assert "| `read_mode` | false |" in config_table()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@given(st.dictionaries(st.sampled_from([key.name for key in KEYS]) | st.text(max_size=10), JSON, max_size=4))
def test_any_json_is_a_configuration_or_a_refusal(extra):
    """Whatever stands there, the outcome is a checked configuration or a ConfigurationError, nothing else."""
    try:
        config = parse({**REQUIRED, **extra})
    except ConfigurationError:
        return
    assert 1 <= config.http_port <= 65535
    assert config.lease >= 1
