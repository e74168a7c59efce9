"""What the explorer's worlds are made of: settings, letters, the state of one node, and what a move does."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import attrs

from moriio_proto.events import Endpoint
from moriio_proto.geometry import CacheGeometry, LayerLayout, Piece
from moriio_proto.testing.explore import Move
from moriio_proto.testing.explore_snapshot import LEASE, NOW, TRANSFER, Snapshot
from moriio_proto.wire.messages import (
    Abort,
    Claim,
    Granted,
    Mode,
    Refused,
    Release,
    Released,
    RemoteBlocks,
    WriteDone,
)

__all__ = [
    "DEAD",
    "ENDPOINTS",
    "IDLE",
    "LENT",
    "OVER",
    "RUNNING",
    "Facts",
    "Letter",
    "Local",
    "Setting",
    "Step",
    "Under",
    "geometry_of",
    "message_of",
]

ENDPOINTS: Final = {"P": Endpoint("p", 6301, 61005), "D": Endpoint("d", 6301, 61005)}
IDLE, RUNNING, LENT, OVER, DEAD = range(5)  # what vLLM has of the request (on D: RUNNING is queued, LENT is loading)


@attrs.frozen
class Setting:
    """What one exploration is about.  Times are ticks: a lease is two, the owner's margin one."""

    name: str
    mode: Mode
    goal: int = 2  # blocks of the prompt
    layers: int = 1
    first: int = 0  # blocks that D has already
    copies: int = 0  # most copies of one message under way; 0: anything ever sent may come any number of times
    faults: int = 0  # messages that may be lost or come twice (with copies)
    deaths: int = 0  # processes that may die (and be started again)
    preempts: bool = False
    aborts: bool = True
    expects: bool = True
    again: bool = False  # a second request with the id of a transfer that is over
    short: bool = False  # READ: P's answer names too few blocks
    breaks: bool = False  # sessions may break, posts may fail or be refused
    plain: bool = False  # peers without leases: only what holds without them is checked
    misfit: tuple[str, ...] = ()  # processes whose caches have another form
    ages: bool = True  # time passes
    unrest: bool = False  # handshakes time out, silent peers are suspected


class Letter(NamedTuple):
    """A message under way; `kind` "Hello" is the answer to a dial."""

    to: str
    only: str  # token of the only process that can get it (an answer on a connection); empty: who is at the address
    kind: str
    token: str
    age: float = -1  # ticks since the stamp that it carries; -1: none
    failed: bool = False
    why: bool = False

    def __str__(self) -> str:
        notes = [
            self.token,
            *(["failed"] if self.failed else []),
            *([f"{self.age:g} ticks old"] if self.age >= 0 else []),
        ]
        return f"{self.kind} ({', '.join(notes)})"


class Under(NamedTuple):
    """A post under way, as nobody but the model sees it."""

    foreign: bool  # it copies what is not the KV
    target: int  # the far process
    adrift: bool = False  # its session is over, so it ends soon


class Local(NamedTuple):
    """The state of one node."""

    core: Snapshot
    number: int  # of the process at this address; 0: the process is dead and none was started
    vllm: tuple[int, int, int, bool]  # phase, chunks computed, generation's parity, aborted
    link: tuple[str, int] | None  # the transport's session: "asked" or "up", and the number of the far process
    posts: tuple[Under, ...]


class Step(NamedTuple):
    """What a move does."""

    to: int
    sent: tuple[Letter, ...] = ()
    dials: bool = False
    filled: int = 0  # cells of D's blocks that hold the KV now
    spoilt: int = 0  # cells that no longer do
    target: int = 0  # the far process to whose memory (or from whose) that is
    done: bool = False  # settled as filled
    forgot: bool = False  # the tombstone is gone
    wrong: str = ""


@attrs.frozen
class Facts:
    """What the pair needs to know of a local state."""

    moves: tuple[tuple[Move, str, int], ...]  # move, what the far process must be ("", "alive" or "gone"), its number
    helpful: frozenset[Move]
    number: int
    token: str
    phase: int
    hot: tuple[int, ...]  # far processes whose blocks our posts may touch now
    finished: bool
    line: str
    ticks: bool  # a tick changes it


def geometry_of(setting: Setting, token: str) -> CacheGeometry:
    """The caches of the process `token`."""
    n = setting.layers + (token in setting.misfit)
    made = tuple(LayerLayout(f"layer.{i}", (Piece(0, i * 64, 64, 64),), "bytes") for i in range(n))
    return CacheGeometry(layers=made, region_bytes=(n * 64 * 300,), num_blocks=300, block_tokens=16)


def message_of(setting: Setting, letter: Letter) -> Any:
    """The protocol's message that a letter stands for."""
    stamp = int((NOW - letter.age) * 1e6)
    why, token = "why" if letter.why else "", letter.token
    if letter.kind == "RemoteBlocks":
        first = setting.first
        if setting.plain:
            first = 0
        blocks = [70 + i for i in range(setting.first, setting.goal)]
        return RemoteBlocks(TRANSFER, "", (blocks,), first_block=first, token=token)
    if letter.kind == "Claim":
        return Claim(TRANSFER, token=token, stamp=stamp)
    if letter.kind == "Granted":
        return Granted(TRANSFER, token=token, lease_ms=LEASE * 1000, stamp=stamp)
    if letter.kind == "WriteDone":
        return WriteDone(TRANSFER, failed=letter.failed, reason=why, token=token)
    if letter.kind == "Refused":
        return Refused(TRANSFER, token=token, reason=why)
    return {"Release": Release, "Abort": Abort, "Released": Released}[letter.kind](TRANSFER, token=token)
