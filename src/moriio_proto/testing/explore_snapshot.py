"""A real core whose whole state can be taken out as a hashable value, and put back.

Time is relative: a snapshot holds how far away every instant of the lease is, in whole ticks, and the core always
runs at `NOW`.  Two instants that no rule can tell apart are one (all that is over; all that is farther than the
lease).  Timers other than the lease's are only armed or not: the explorer fires them in any order, which is more than
any clock would do.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import attrs

from moriio_proto.core import Core, CoreConfig, Role, Timing
from moriio_proto.effects import Effect, Post
from moriio_proto.events import Endpoint, HelloReceived
from moriio_proto.geometry import CacheGeometry
from moriio_proto.machines import landing, offer, peer
from moriio_proto.machines._table import Compiled, Row
from moriio_proto.machines._transfer import Transfer
from moriio_proto.machines.peer import Peer
from moriio_proto.progress import Watermark
from moriio_proto.wire.messages import Hello, HelloExtension, LayerDescriptors, Mode, RemoteBlocks

__all__ = [
    "LEASE",
    "MARGIN",
    "NOW",
    "TRANSFER",
    "Recorded",
    "Snapshot",
    "SnapshotCore",
    "default_tables",
    "hello_of",
    "ticks",
]

NOW: Final = 1000.0
FAR: Final = 1e6  # every wait that is no lease
LEASE, MARGIN = 2, 1  # ticks
TRANSFER: Final = "t"
TIMING: Final = Timing(
    lease=LEASE, margin=MARGIN, retry=FAR, repost=FAR, redial=FAR, handshake_timeout=FAR, drain=FAR,
    transfer_timeout=FAR,    defer_timeout=FAR, recv_abort_timeout=FAR, upstream_hold=FAR, forget=FAR,
)  # fmt: skip

_INSTANTS = frozenset({"lease_until", "granted_until"})
_IGNORED = {"id", "peer", "timers", "pending", "parked", "resends", "reason", "route", "known_at", "stale"}
_PEER_IGNORED = {"state", "timers", "dials", "geometry", "hello", "layers", "epoch", "transfers", "reason"}


def ticks(instant: float) -> float:
    """How far away an instant is: -1 for all that is over, infinity for all that is no lease."""
    away = instant - NOW
    return -1 if away < 0 else math.inf if away > LEASE + MARGIN else away


class Snapshot(NamedTuple):
    """The state of one core: hashable, canonical."""

    transfer: tuple[Any, ...] | None  # (class, fields, timers, posts, parked, stale, reason, route, peer, attached)
    peer: tuple[Any, ...] | None  # of the table


@attrs.frozen(eq=False)
class Recorded(Compiled):
    """A table that remembers which rows were taken."""

    taken: set[Row] = attrs.field(factory=set)

    @classmethod
    def of(cls, table: Compiled) -> Recorded:
        """The same table, recording."""
        return cls(table.name, table.initial, table.final, table.table)

    def fire(self, record: Any, trigger: str, *args: Any) -> Row:
        """As `Compiled.fire`."""
        row = super().fire(record, trigger, *args)
        self.taken.add(row)
        return row


class _Armed:
    """Stands in for the core's heap: arming is all that is kept."""

    def arm(self, record: Any, trigger: str, at: float) -> None:
        record.timers[trigger] = at


def hello_of(endpoint: Endpoint, token: str, geometry: CacheGeometry, capabilities: frozenset[str]) -> HelloReceived:
    """The answer of the process `token` to a dial."""
    extension = HelloExtension(
        token=token, global_dp_rank=0, tp_rank=0, dp_size=1, dp_size_local=1, tp_size=1, capabilities=capabilities,
        notify_port=endpoint.notify_port, transport="fake", regions=(b"r",), geometry=geometry,
    )  # fmt: skip
    return HelloReceived(
        endpoint, Hello("engine", token.encode(), (0,), 8, 16, "fake", extension), LayerDescriptors({})
    )


class SnapshotCore(Core):
    """One core of the explorer; the tables can be replaced by mutants."""

    def __init__(self, role: Role, mode: Mode, token: str, far: Endpoint, geometry: CacheGeometry) -> None:
        super().__init__(CoreConfig(role, mode, token, geometry, timing=TIMING))
        self.far = far
        self.now = NOW
        self._timers = _Armed()  # type: ignore[assignment]  # a Timers without time
        self._announcements: dict[tuple[Any, ...], RemoteBlocks] = {}
        self._hellos: dict[str, HelloReceived] = {}  # what each process at the far address says, by token

    def use(self, table: Compiled, peer_table: Compiled) -> None:
        """Run these tables from now on."""
        self._table, self._peer_table = table, peer_table

    def learn(self, hello: HelloReceived) -> None:
        """What a process at the far address says when it is dialled."""
        self._hellos[hello.hello.agent_metadata.decode()] = hello

    @property
    def transfer(self) -> Transfer | None:
        """The transfer, where its record exists."""
        return self.transfers.get(TRANSFER)

    # --- moves that no event stands for ---------------------------------------------------------------------------

    def fire_timer(self, record: Transfer | Peer, trigger: str) -> list[Effect]:
        """As `tick` does for one timer."""
        del record.timers[trigger]
        self._fire(record, trigger, None)
        return self._finish()

    def fall_silent(self) -> list[Effect]:
        """A transfer has resent too often."""
        self.unanswered(self.peers[self.far], 5)
        return self._finish()

    def let_pass(self) -> None:
        """One tick."""
        record = self.transfer
        if record is None:
            return
        for name in _INSTANTS & set(attrs.fields_dict(type(record))):
            setattr(record, name, getattr(record, name) - 1)
        for trigger, at in record.timers.items():
            if trigger == "due_lease" and ticks(at) < math.inf:
                record.timers[trigger] = max(at - 1, NOW)
        for token, post in record.pending.items():
            record.pending[token] = attrs.evolve(post, not_after=post.not_after - 1)
        if getattr(record, "claim_stamp", None) is not None:
            record.claim_stamp -= 1_000_000  # type: ignore[attr-defined]  # an Offer here

    # --- taking out -------------------------------------------------------------------------------------------------

    def freeze(self) -> Snapshot:
        """The state as a value; posts are renumbered from 1 by age."""
        record = self.transfer
        known = self.peers.get(self.far)
        return Snapshot(
            None if record is None else self._freeze_transfer(record, known),
            None if known is None else self._freeze_peer(known),
        )

    def _freeze_transfer(self, record: Transfer, known: Peer | None) -> tuple[Any, ...]:
        fields = {
            f.name: _value(f.name, getattr(record, f.name))
            for f in attrs.fields(type(record))
            if f.name not in _IGNORED
        }
        announced = getattr(record, "announced", None)
        if isinstance(announced, RemoteBlocks):
            key = (announced.token, announced.first_block, *announced.blocks[0])
            self._announcements[key] = announced
            fields["announced"] = key
        stale = getattr(record, "stale", 0)
        tokens = sorted(record.pending)
        own = record.peer
        return (
            type(record),
            tuple(fields.items()),
            tuple(sorted((name, ticks(at) if name == "due_lease" else math.inf) for name, at in record.timers.items())),
            tuple(_post(record.pending[token]) for token in tokens),
            tuple(_post(post) for post in record.parked),
            sum(token < stale for token in tokens),
            bool(record.reason),
            record.route,
            None if own is None else "listed" if own is known else self._freeze_peer(own),
            own is not None and own.transfers.get(TRANSFER) is record,
        )

    def _freeze_peer(self, known: Peer) -> tuple[Any, ...]:
        kept = tuple((f.name, getattr(known, f.name)) for f in attrs.fields(Peer) if f.name not in _PEER_IGNORED)
        geometry = known.geometry is not None
        return known.state, tuple(sorted(known.timers)), kept, known.agent.decode(), geometry, bool(known.reason)

    # --- putting back -----------------------------------------------------------------------------------------------

    def thaw(self, snapshot: Snapshot) -> None:
        """Be in this state."""
        self.transfers.clear()
        self.peers.clear()
        self._ops.clear()
        self._fed.clear()
        self._out.clear()
        known = None
        if snapshot.peer is not None:
            known = self.peers[self.far] = self._thaw_peer(snapshot.peer)
        if snapshot.transfer is not None:
            self._thaw_transfer(snapshot.transfer, known)

    def _thaw_peer(self, frozen: tuple[Any, ...]) -> Peer:
        state, timers, kept, said, geometry, reason = frozen
        made = Peer(self.far, state=state, timers=dict.fromkeys(timers, NOW + FAR), reason="why" if reason else "")
        for name, value in kept:
            setattr(made, name, value)
        if said:
            made.hello, made.layers = self._hellos[said].hello, self._hellos[said].layers
        made.geometry = self.config.geometry if geometry else None
        return made

    def _thaw_transfer(self, frozen: tuple[Any, ...], known: Peer | None) -> None:
        cls, fields, timers, posts, parked, stale, reason, route, own, attached = frozen
        values = dict(fields)
        record: Any = cls(TRANSFER, state=values.pop("state"))
        for name, value in values.items():
            setattr(record, name, _thawed(name, value))
        if isinstance(values.get("announced"), tuple):
            record.announced = self._announcements[values["announced"]]
        if "known_at" in attrs.fields_dict(cls):
            record.known_at = NOW
        record.timers = {name: NOW + (FAR if away == math.inf else away) for name, away in timers}
        record.pending = {i + 1: self._thaw_post(i + 1, post) for i, post in enumerate(posts)}
        record.parked = [self._thaw_post(0, post) for post in parked]
        record.reason, record.route = "why" if reason else "", route
        self.next_token = len(posts) + 1
        if stale:
            record.stale = stale + 1
        for token in record.pending:
            self._ops[token] = record
        record.peer = known if own == "listed" else None if own is None else self._thaw_peer(own)
        if attached:
            record.peer.transfers[TRANSFER] = record
        self.transfers[TRANSFER] = record

    def _thaw_post(self, token: int, post: tuple[Any, ...]) -> Post:
        start, end, local, remote, away = post
        return Post(token, self.far, self.writes, start, end, local, remote, NOW + (FAR if away == math.inf else away))


def _post(post: Post) -> tuple[Any, ...]:
    away = ticks(post.not_after)
    return (post.layer_start, post.layer_end, tuple(post.local_blocks), tuple(post.remote_blocks), away)


def _value(name: str, value: Any) -> Any:
    if name in _INSTANTS:
        return ticks(value)
    if name == "claim_stamp":
        return None if value is None else min(NOW - value / 1e6, LEASE)
    if isinstance(value, Watermark):
        return attrs.astuple(value)
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if name == "releases":  # one rank reads: from the second anonymous release on, more change nothing
        return frozenset(value - {f"#{n}" for n in range(2, len(value))})
    return frozenset(value) if isinstance(value, set) else value


def _thawed(name: str, value: Any) -> Any:
    if name in _INSTANTS:
        return NOW + value
    if name == "claim_stamp":
        return None if value is None else int((NOW - value) * 1e6)
    if name in {"computed", "posted"}:
        return Watermark(*value)
    if name == "blocks":
        return list(value)
    return set(value) if isinstance(value, frozenset) else value


def default_tables(role: Role) -> tuple[Recorded, Recorded]:
    """Recording tables of a role, of its transfers and of its peers."""
    return Recorded.of(offer.TABLE if role is Role.PREFILL else landing.TABLE), Recorded.of(peer.TABLE)
