"""Addresses, router-shaped request ids, and the one place where ports are computed.

Every rank has a handshake port and a notify port, both an offset above the base port that the router hands out:

    here              base + dp * tp_size + tp    never the same port for two ranks of a pod
    upstream listens  base + dp + tp              collides when both dp and tp are above 1
    upstream sends    notify: base + dp + tp in WRITE, base + dp * tp_size + tp for READ's releases
    upstream dials    handshake: base + dp * tp_size + tp

with dp the rank within its pod.  The two formulas agree when every dp or every tp is 0, or the TP size is 1.
"""

from __future__ import annotations

import re

import attrs

from moriio_proto.wire._check import MAX_PORT, check_host, check_port, refuse

__all__ = [
    "MAX_REQUEST_ID_CHARS",
    "ZmqAddress",
    "addresses_in_request_id",
    "handshake_port",
    "local_dp_rank",
    "notify_port",
    "pod_index",
    "port_offset",
    "rank_ports",
    "tcp_endpoint",
    "upstream_listen_port",
    "upstream_release_port",
]

MAX_REQUEST_ID_CHARS = 2048  # bounds the search in an untrusted id; the router's have about 200

_DIGITS = re.compile(r"[0-9]{1,5}")
_EXPECTED = "host:IP,handshake:PORT,notify:PORT"
_ROUTED = re.compile(r"___prefill_addr_(.{1,512}?)___decode_addr_(.{1,512}?)_[0-9a-f]{32}(?![0-9a-f])")


@attrs.frozen
class ZmqAddress:
    """Where an instance listens: base ports, before any rank's offset."""

    host: str  # IPv6 without brackets
    handshake_port: int
    notify_port: int

    @classmethod
    def parse(cls, text: str) -> ZmqAddress:
        """Read `host:IP,handshake:PORT,notify:PORT`, keys in any order.

        Raises:
            ParameterError: a key missing, given twice or unknown, a port that is none.
        """
        parts: dict[str, str] = {}
        for part in text.split(",", 3):
            key, colon, value = part.partition(":")
            key = key.strip()
            if not colon or key in parts:
                raise refuse("zmq_address", text, _EXPECTED)
            parts[key] = value.strip()
        if parts.keys() != {"host", "handshake", "notify"}:
            raise refuse("zmq_address", text, _EXPECTED)
        host = check_host("zmq_address host", parts["host"].removeprefix("[").removesuffix("]"))
        return cls(host, _port_in("handshake", parts["handshake"]), _port_in("notify", parts["notify"]))

    def format(self) -> str:
        """The text that `parse` reads."""
        return f"host:{self.host},handshake:{self.handshake_port},notify:{self.notify_port}"


def _port_in(key: str, text: str) -> int:
    if not _DIGITS.fullmatch(text):
        raise refuse(f"zmq_address {key}", text, f"a port within 1..{MAX_PORT}")
    return check_port(f"zmq_address {key}", int(text))


def addresses_in_request_id(request_id: str) -> tuple[str, str] | None:
    """P's and D's addresses out of `___prefill_addr_A___decode_addr_B_{32 hex}`, whatever vLLM wrapped around it.

    Returns:
        The texts (prefill, decode) for `ZmqAddress.parse`: one may be malformed when only the other is needed.
        None when the id has not that shape or is longer than `MAX_REQUEST_ID_CHARS`.
    """
    found = _ROUTED.search(request_id) if len(request_id) <= MAX_REQUEST_ID_CHARS else None
    return None if found is None else (found[1], found[2])


def tcp_endpoint(host: str, port: int) -> str:
    """`tcp://host:port` as pyzmq wants it, IPv6 in brackets.

    Raises:
        ParameterError: no host or no port.
    """
    check_host("host", host)
    check_port("port", port)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def port_offset(dp: int, tp: int, tp_size: int) -> int:
    """The collision-free offset of a rank; `dp` is the rank within its pod, `tp_size` that of the listener.

    Raises:
        ParameterError: `tp` not within `tp_size`, or a negative rank.
    """
    if not 0 <= tp < tp_size:
        raise refuse("tp_rank", tp, f"a rank within [0, {tp_size})")
    if dp < 0:
        raise refuse("dp_rank", dp, "a rank of at least 0")
    return dp * tp_size + tp


def local_dp_rank(global_dp_rank: int, dp_size_local: int) -> int:
    """The rank within its pod; `dp_size_local` 0 means unknown and then nothing is folded."""
    return global_dp_rank % dp_size_local if dp_size_local else global_dp_rank


def pod_index(global_dp_rank: int, dp_size_local: int) -> int:
    """Which pod a rank lives in; 0 when the size of a pod is unknown."""
    return global_dp_rank // dp_size_local if dp_size_local else 0


def handshake_port(base: int, global_dp_rank: int, tp: int, tp_size: int, dp_size_local: int = 0) -> int:
    """Where a rank of this project listens for handshakes, and where upstream dials every rank.

    Raises:
        ParameterError: a rank out of range, or a port above 65535.
    """
    return _at("handshake_port", base, port_offset(local_dp_rank(global_dp_rank, dp_size_local), tp, tp_size))


def notify_port(base: int, global_dp_rank: int, tp: int, tp_size: int, dp_size_local: int = 0) -> int:
    """Where a rank of this project listens for notify frames.

    Raises:
        ParameterError: as `handshake_port`.
    """
    return _at("notify_port", base, port_offset(local_dp_rank(global_dp_rank, dp_size_local), tp, tp_size))


def upstream_listen_port(base: int, global_dp_rank: int, tp: int, dp_size_local: int = 0) -> int:
    """Where upstream listens (handshake and notify) and where it sends WRITE's notify frames.

    Raises:
        ParameterError: a port above 65535.
    """
    return _at("port", base, local_dp_rank(global_dp_rank, dp_size_local) + tp)


def upstream_release_port(base: int, global_dp_rank: int, tp: int, tp_size: int, dp_size_local: int = 0) -> int:
    """Where upstream sends READ's releases: a notify port by the collision-free formula.

    Raises:
        ParameterError: as `handshake_port`.
    """
    return notify_port(base, global_dp_rank, tp, tp_size, dp_size_local)


def rank_ports(
    address: ZmqAddress, global_dp_rank: int, tp: int, tp_size: int, dp_size_local: int = 0
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Handshake and notify port of a rank: where this project listens, and where upstream does.

    Raises:
        ParameterError: a rank out of range, or a port above 65535.
    """
    rank, bases = (global_dp_rank, tp, tp_size, dp_size_local), (address.handshake_port, address.notify_port)
    ours = handshake_port(bases[0], *rank), notify_port(bases[1], *rank)
    upstreams = tuple(upstream_listen_port(base, global_dp_rank, tp, dp_size_local) for base in bases)
    return ours, (upstreams[0], upstreams[1])


def _at(key: str, base: int, offset: int) -> int:
    check_port(key, base)
    return check_port(f"{key} {base} + {offset}", base + offset)
