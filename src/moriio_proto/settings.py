"""What a core is told once, and what it counts."""

from __future__ import annotations

import attrs

from moriio_proto.geometry import CacheGeometry
from moriio_proto.machines._table import State
from moriio_proto.wire.messages import Mode

__all__ = ["CoreConfig", "Role", "Stats", "Timing"]


class Role(State):
    """Which side of a transfer a node is."""

    PREFILL = "P"
    DECODE = "D"


@attrs.frozen
class Timing:
    """Every wait of the protocol, in seconds; specs/ gives the reasons."""

    lease: float = 10.0  # how long a granted lease lasts; renewed at a third
    margin: float = 1.0  # what the owner adds: one copy call that began just before the lease ended
    retry: float = 0.25  # first resend of an unanswered message; doubles up to a third of the lease
    repost: float = 0.005  # a post that the transport refused (queue full) is tried again
    redial: float = 1.0
    handshake_timeout: float = 5.0
    drain: float = 5.0  # draining longer than this ends the session
    transfer_timeout: float = 30.0
    defer_timeout: float = 60.0  # READ: how long P holds blocks that nobody claims
    recv_abort_timeout: float = 120.0
    upstream_hold: float = 55.0  # an upstream P frees held blocks after 60 s; D stops before
    forget: float = 60.0  # how long a tombstone answers late messages


@attrs.frozen
class CoreConfig:
    """Who this core is."""

    role: Role
    mode: Mode
    token: str  # new per process start
    geometry: CacheGeometry
    tp_size: int = 1
    dp_rank: int = 0
    transport: str = ""  # name of the backend, which both sides must share; "" is not compared
    timing: Timing = attrs.field(factory=Timing)
    max_transfers: int = 100_000  # records; beyond it, peers cannot open new ones


@attrs.define
class Stats:
    """Counters since the start."""

    bytes_moved: int = 0
    refused_posts: int = 0
    illegal: int = 0  # messages that a state has no row for
    strangers: int = 0  # messages of a process that the transfer is not bound to
    mixed_up: int = 0  # messages of a decode request that wants another prompt than the transfer has
    dropped: int = 0  # messages for new transfers when the table was full
