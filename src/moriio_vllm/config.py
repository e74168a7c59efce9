"""The configuration of the connector: everything under `kv_connector_extra_config`, checked once at start.

`KEYS` is the single list of keys.  What the
connector built into vLLM accepts is accepted here: numbers may be strings, a port that is missing, empty or 0 has its
default, `null` means "not given".  What it ignored silently is an error: an unknown key, a value of another type.
"""

from __future__ import annotations

import difflib
import logging
import os
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

import attrs

from moriio_proto.errors import ConfigurationError
from moriio_proto.wire.addresses import ZmqAddress, handshake_port, local_dp_rank, notify_port, tcp_endpoint
from moriio_proto.wire.messages import Mode, Ping
from moriio_transport.faulty import FaultPlan
from moriio_vllm._config_keys import BY_NAME, KEYS, MAX_PORT, PREFIX, REQUIRED, Key, Value, config_table
from moriio_vllm.allowed_peers import AllowedPeers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

__all__ = ["KEYS", "ROUTER_PATIENCE", "ConnectorConfig", "Key", "Ranks", "Role", "config_table"]

_log = logging.getLogger(__name__)

ROUTER_PATIENCE = 5.0  # seconds without a ping after which vllm-router drops an instance
Role: TypeAlias = Literal["kv_producer", "kv_consumer"]
_PORTS_BY_RANK: Final = ("handshake_port", "notify_port")

# Environment variables of the connector built into vLLM; they have no effect.
_DEAD_VARIABLES: Final = {
    "VLLM_MORIIO_CONNECTOR_READ_MODE": "read_mode",
    "VLLM_MORIIO_QP_PER_TRANSFER": "qp_per_transfer",
    "VLLM_MORIIO_POST_BATCH_SIZE": "post_batch_size",
    "VLLM_MORIIO_NUM_WORKERS": "num_workers",
    "VLLM_MORIIO_TRANSFER_TIMEOUT_S": "recv_abort_timeout",
}


@attrs.frozen
class Ranks:
    """Which rank of its instance this process is; global numbers, `dp_size_local` 0 when a pod's size is unknown."""

    dp_rank: int = 0
    dp_size: int = 1
    dp_size_local: int = 1
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def in_pod(self) -> int:
        """Ranks that listen on this host, hence ports in each range."""
        return (self.dp_size_local or self.dp_size) * self.tp_size


def _no_options(_backend: str) -> Mapping[str, Any]:
    return {}


@attrs.frozen
class ConnectorConfig:
    """The checked configuration of one rank; times in seconds, ports before any rank's offset."""

    role: Role
    ranks: Ranks
    host: str
    proxy_ip: str | None
    proxy_ping_port: int | None
    http_port: int
    handshake_port: int
    notify_port: int
    read_mode: bool
    backend: str
    qp_per_transfer: int
    post_batch_size: int
    num_workers: int
    transfer_timeout: float
    defer_timeout: float
    recv_abort_timeout: float
    ping_interval: float
    lease: float
    trace_file: str | None
    allowed_peers: AllowedPeers | None
    fault_injection: FaultPlan | None
    allow_fault_injection: bool
    transport_options: Mapping[str, Any]

    @classmethod
    def from_extra(
        cls,
        extra: Mapping[str, object],
        *,
        role: str,
        ranks: Ranks,
        default_host: Callable[[], str],
        backends: Collection[str] = ("loopback", "rdma", "xgmi"),
        options_of: Callable[[str], Mapping[str, Any]] = _no_options,
        environment: Mapping[str, str] = os.environ,
    ) -> ConnectorConfig:
        """Check `kv_connector_extra_config`.

        Args:
            extra: the user's keys.
            role: vLLM's `kv_role`.
            ranks: this process's place in its instance.
            default_host: asked for the address when `host_ip` is not given.
            backends: names of all transports that exist.
            options_of: the keys that a backend's plugin reads, with its defaults.
            environment: searched for variables that have no effect any more.

        Raises:
            ConfigurationError: names the key, the value and what was expected.
        """
        if role not in ("kv_producer", "kv_consumer"):
            why = "kv_producer or kv_consumer; one instance has one role, so start two instances instead of kv_both"
            raise ConfigurationError("kv_role", role, why)
        _warn_of_dead_variables(environment)
        given = {name: value for name, value in extra.items() if value is not None}
        values = {key.name: _value(key, given) for key in KEYS}
        backend = str(values["backend"])
        if backend not in backends:
            raise ConfigurationError(BY_NAME["backend"].path, backend, f"one of {', '.join(sorted(backends))}")
        defaults = options_of(backend)
        _refuse_unknown(given, defaults)
        values["transport_options"] = cast("Value", _transport_options(given, defaults))
        host = str(values.pop("host_ip") or default_host())
        return cls(role=cast("Role", role), ranks=ranks, host=host, **cast("dict[str, Any]", values))

    def __attrs_post_init__(self) -> None:  # what no key can say for itself
        if self.proxy_ip is not None and self.proxy_ping_port is None:
            raise _missing("proxy_ping_port")
        if self.fault_injection is not None and not self.allow_fault_injection:
            why = "no such key, or allow_fault_injection true with it: transfers would fail on purpose"
            raise ConfigurationError(BY_NAME["fault_injection"].path, self.fault_injection, why)
        count = self.ranks.in_pod
        for name in _PORTS_BY_RANK:
            base = getattr(self, name)
            if base + count - 1 > MAX_PORT:
                top = f"at most {MAX_PORT - count + 1}, as {count} ranks count up from it"
                raise ConfigurationError(BY_NAME[name].path, base, top)
        if abs(self.handshake_port - self.notify_port) < count:
            taken = f"{self.handshake_port}..{self.handshake_port + count - 1}"
            apart = f"a port whose {count} ranks do not meet those of handshake_port ({taken})"
            raise ConfigurationError(BY_NAME["notify_port"].path, self.notify_port, apart)
        if self.ping_interval > ROUTER_PATIENCE / 3:
            _log.warning(
                "%s=%g: above a third of the router's %g s, so two lost pings unregister this instance",
                BY_NAME["ping_interval"].path, self.ping_interval, ROUTER_PATIENCE,
            )  # fmt: skip

    @property
    def is_producer(self) -> bool:
        """Whether this instance prefills."""
        return self.role == "kv_producer"

    @property
    def mode(self) -> Mode:
        """Who moves the bytes."""
        return Mode.READ if self.read_mode else Mode.WRITE

    @property
    def zmq_address(self) -> ZmqAddress:
        """What the router hands to peers."""
        return ZmqAddress(self.host, self.handshake_port, self.notify_port)

    @property
    def http_address(self) -> str:
        """Where the router sends requests, without the scheme."""
        return tcp_endpoint(self.host, self.http_port).removeprefix("tcp://")

    @property
    def own_handshake_port(self) -> int:
        """Where this rank listens for handshakes."""
        r = self.ranks
        return handshake_port(self.handshake_port, r.dp_rank, r.tp_rank, r.tp_size, r.dp_size_local)

    @property
    def own_notify_port(self) -> int:
        """Where this rank listens for notify frames."""
        r = self.ranks
        return notify_port(self.notify_port, r.dp_rank, r.tp_rank, r.tp_size, r.dp_size_local)

    @property
    def registers(self) -> bool:
        """Whether this rank registers the instance: rank 0 of all, and only with a router."""
        return self.proxy_ip is not None and self.ranks.dp_rank == 0 and self.ranks.tp_rank == 0

    @property
    def pod_endpoints(self) -> tuple[tuple[str, int], ...]:
        """Host and handshake port of every rank of this pod, in order of rank."""
        r = self.ranks
        first = r.dp_rank - local_dp_rank(r.dp_rank, r.dp_size_local) if r.dp_size_local else 0
        return tuple(
            (self.host, handshake_port(self.handshake_port, dp, tp, r.tp_size, r.dp_size_local))
            for dp in range(first, first + (r.dp_size_local or r.dp_size))
            for tp in range(r.tp_size)
        )

    def ping(self) -> Ping:
        """What this instance tells the router."""
        return Ping(
            role="P" if self.is_producer else "D",
            http_address=self.http_address,
            zmq_address=self.zmq_address.format(),
            dp_size=self.ranks.dp_size,
            tp_size=self.ranks.tp_size,
            transfer_mode=self.mode,
        )


def _missing(name: str) -> ConfigurationError:
    return ConfigurationError(BY_NAME[name].path, None, f"{BY_NAME[name].expectation} (the key is missing)")


def _value(key: Key, given: Mapping[str, object]) -> Value:
    """The checked value of a key, or its default.  As upstream has it, an empty text and port 0 are "not given"."""
    value = given.get(key.name)
    optional = key.default is not REQUIRED and (key.type == "host" or key.name.endswith("_port"))
    if optional and value in ("", 0, "0") and not isinstance(value, bool):
        value = None
    if value is not None:
        return key.parse(value)
    if key.default is REQUIRED:
        raise _missing(key.name)
    return key.default


def _refuse_unknown(given: Mapping[str, object], defaults: Mapping[str, Any]) -> None:
    known = [*BY_NAME, *(name for name in defaults if name not in BY_NAME)]
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(str(name).lower(), known, 1)
            hint = f"a known key; did you mean {near[0]}?" if near else f"a known key: {', '.join(known)}"
            raise ConfigurationError(f"{PREFIX}.{name}", value, hint)


def _transport_options(given: Mapping[str, object], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What the plugin reads: the user's value where given, else the plugin's own default."""
    options = dict(defaults)
    for name in defaults.keys() & given.keys():
        key = BY_NAME.get(name) or Key(name, _option_type(defaults[name]), None, "")
        options[name] = key.parse(given[name])
    return options


def _option_type(default: object) -> Literal["int", "float", "bool", "text"]:
    """A plugin's option has the type of its default."""
    if isinstance(default, bool):
        return "bool"
    if isinstance(default, int):
        return "int"
    return "float" if isinstance(default, float) else "text"


def _warn_of_dead_variables(environment: Mapping[str, str]) -> None:
    for variable, key in _DEAD_VARIABLES.items():
        if variable in environment:
            _log.warning("environment variable %s has no effect: set %s instead", variable, BY_NAME[key].path)
