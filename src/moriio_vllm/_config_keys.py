"""The keys of `kv_connector_extra_config`: one table, from which parsing, errors and documentation are made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import attrs

from moriio_proto.errors import ConfigurationError, ParameterError
from moriio_proto.wire.addresses import tcp_endpoint
from moriio_transport.faulty import FaultPlan
from moriio_vllm.allowed_peers import AllowedPeers

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BY_NAME", "KEYS", "MAX_PORT", "PREFIX", "REQUIRED", "Key", "Value", "config_table"]

PREFIX: Final = "kv_connector_extra_config"
Value: TypeAlias = "int | float | bool | str | FaultPlan | AllowedPeers | None"
REQUIRED: Final = "required"  # in place of a default
MAX_PORT: Final = 65535


@attrs.frozen
class Key:
    """One key: its type, what it is without being given, and its range.

    `type` is "int", "float" (finite), "bool", "name" (lower case), "text", "host", "faults" or "peers"; `low` and
    `high` are inclusive, save that a float is above a `low` of 0.  `or_value` is one more value that is allowed.
    """

    name: str
    type: Literal["int", "float", "bool", "name", "text", "host", "faults", "peers"]
    default: Value
    doc: str
    low: float = -math.inf
    high: float = math.inf
    or_value: int | None = None

    @property
    def path(self) -> str:
        """The name as the user writes it on the command line."""
        return f"{PREFIX}.{self.name}"

    @property
    def expectation(self) -> str:
        """What a value must be, for errors and for the documentation."""
        if self.type in _NOUNS:
            return _NOUNS[self.type]
        noun = "an integer" if self.type == "int" else "a number"
        if self.high < math.inf:
            text = f"{noun} within {self.low:g}..{self.high:g}"
        elif self.type == "float" and self.low == 0:
            text = f"{noun} above 0"
        else:
            text = f"{noun} of at least {self.low:g}" if self.low > -math.inf else noun
        return text if self.or_value is None else f"{text} or {self.or_value}"

    def parse(self, value: object) -> Value:
        """The checked value; None stands for "not given".

        Raises:
            ConfigurationError: a value of another type or out of range.
        """
        try:
            parsed = _PARSERS[self.type](value)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            raise ConfigurationError(self.path, value, self.expectation) from None
        if isinstance(parsed, (int, float)) and not isinstance(parsed, bool) and not self._in_range(parsed):
            raise ConfigurationError(self.path, value, self.expectation)
        return parsed

    def _in_range(self, number: float) -> bool:
        if number == self.or_value:
            return True
        above = number > 0 if self.type == "float" and self.low == 0 else number >= self.low
        return above and number <= self.high


_NOUNS: Final = {
    "bool": "true or false (also as text, or 1 or 0)",
    "name": "a name",
    "text": "a text",
    "host": "a host name or an IP address",
    "faults": "a map of delay_ms, fail_every, lose_every, refuse_every and seed",
    "peers": "a list, or a text with commas, of networks such as 10.1.0.0/16, addresses and host names",
}


def _parse_int(value: object) -> int:
    if isinstance(value, str):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise TypeError
    return int(value)


def _parse_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _parse_bool(value: object) -> bool:
    if not isinstance(value, (bool, int, str)):
        raise TypeError
    return {"true": True, "1": True, "false": False, "0": False}[str(value).strip().lower()]


def _parse_text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError
    return value


def _parse_name(value: object) -> str:
    return _parse_text(value).strip().lower()


def _parse_host(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    host = value.strip().removeprefix("[").removesuffix("]")
    try:
        tcp_endpoint(host, 1)
    except ParameterError:
        raise ValueError from None
    return host


def _parse_faults(value: object) -> FaultPlan:
    if not isinstance(value, dict):
        raise TypeError
    numbers: dict[str, Any] = {
        str(name): _parse_float(number) if name == "delay_ms" else _parse_int(number) for name, number in value.items()
    }
    return FaultPlan(**numbers)


_PARSERS: Final[dict[str, Callable[[object], Value]]] = {
    "int": _parse_int,
    "float": _parse_float,
    "bool": _parse_bool,
    "name": _parse_name,
    "text": _parse_text,
    "host": _parse_host,
    "faults": _parse_faults,
    "peers": AllowedPeers.parse,
}

KEYS: Final = (
    Key("proxy_ip", "host", None, "Host of the router. Without it the instance does not register."),
    Key("proxy_ping_port", "int", None, "The router's registration port; required with `proxy_ip`.", 1, MAX_PORT),
    Key("http_port", "int", REQUIRED, "Port of this instance's OpenAI-compatible API (`--port`).", 1, MAX_PORT),
    Key("handshake_port", "int", 6301, "First handshake port; each rank has one, counting up.", 1, MAX_PORT),
    Key("notify_port", "int", 61005, "First notify port; each rank has one, counting up.", 1, MAX_PORT),
    Key("host_ip", "host", None, "Address under which peers and the router reach this instance. Default: vLLM's."),
    Key("read_mode", "bool", False, "Decode reads from prefill (READ) instead of prefill writing (WRITE)."),
    Key("backend", "name", "rdma", "The transport: `rdma`, `xgmi`, `loopback` (one host), or an installed plugin."),
    Key("qp_per_transfer", "int", 1, "RDMA queue pairs of one transfer (`rdma`).", 1),
    Key("post_batch_size", "int", -1, "RDMA work requests of one doorbell; -1: MoRI chooses (`rdma`).", 1, or_value=-1),
    Key("num_workers", "int", 1, "Transport worker threads (`rdma`), copy threads (`loopback`).", 1),
    Key("transfer_timeout", "float", 30.0, "Seconds after which a transfer that does not end has failed.", 0),
    Key("defer_timeout", "float", 60.0, "Seconds that prefill keeps blocks for a peer without leases.", 0),
    Key("recv_abort_timeout", "float", 120.0, "Seconds after which decode gives up waiting for a transfer.", 0),
    Key("ping_interval", "float", 1.5, "Seconds between pings; vllm-router drops an instance after 4.2 s.", 0.05, 3600),
    Key("lease", "float", 10.0, "Seconds that a lease on blocks lasts; renewed at a third of it.", 1, 3600),
    Key("allowed_peers", "peers", None, "Networks and hosts that a request may name as its peer. Default: any."),
    Key("trace_file", "text", None, "File that gets every row a machine takes, as JSON lines; `{pid}` is filled in."),
    Key("fault_injection", "faults", None, "Let transfers fail on purpose; needs `allow_fault_injection`. For tests."),
    Key("allow_fault_injection", "bool", False, "Says that `fault_injection` is meant."),
)  # fmt: skip

BY_NAME: Final = {key.name: key for key in KEYS}


def _shown(value: Value) -> str:
    """A default as the user would write it; nothing when there is none."""
    if value is None or isinstance(value, FaultPlan):
        return ""
    return str(value).lower() if isinstance(value, (bool, str)) else f"{value:g}"


def config_table() -> str:
    """All keys as a Markdown table, for the README (a test compares)."""
    rows = [f"| `{key.name}` | {_shown(key.default)} | {key.expectation} | {key.doc} |" for key in KEYS]
    return "\n".join(["| Key | Default | Expected | Meaning |", "|---|---|---|---|", *rows]) + "\n"
