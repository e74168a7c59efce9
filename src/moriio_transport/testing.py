"""Fakes for whole nodes without sockets, threads or real time: a transport with real bytes, and a control channel.

    fabric = MemoryFabric(queue, rng)
    transport = MemoryTransport(fabric, "engine-key", clock)      # keeps the contract of `moriio_transport.base`
    transport.register([Region(array.ctypes.data, array.nbytes)])

A post takes fake time and moves its bytes in units, each when it ends: who reuses memory too early gets wrong bytes.
What becomes of a post is drawn from `TransportFaults`, plain numbers that may be changed at any time.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from moriio_proto.geometry import TransferPlan
from moriio_proto.testing.clock import EventQueue
from moriio_transport.base import (
    Capabilities,
    Completed,
    Connected,
    Description,
    Direction,
    Outcome,
    PeerRefusedError,
    Region,
    Session,
    SessionLost,
    Transport,
    TransportError,
    TransportEvent,
)

__all__ = ["MemoryFabric", "MemoryTransport", "Touch", "TransportFaults"]


@attrs.define
class TransportFaults:
    """Probabilities per post (or connection), from 0 to 1."""

    refuse: float = 0.0  # queue full: nothing moves
    fail: float = 0.0  # some units move, then it fails
    late: float = 0.0  # begins up to `late_seconds` later, or just before its limit, and its units are slow
    hang: float = 0.0  # some units move, then nothing until it is released
    wedge: float = 0.0  # the same, but only the end of the session ends it
    unconnected: float = 0.0  # a connection is not made
    late_seconds: float = 15.0
    unit_seconds: float = 0.3  # the longest time from a unit's start to its last byte


@attrs.frozen
class Touch:
    """A unit of a post moved its bytes now."""

    engine: str  # who posted
    peer: str  # whose memory it is
    direction: Direction
    plan: TransferPlan
    start: int  # runs [start, stop) of the plan
    stop: int


@attrs.define(eq=False)
class _Fate:
    """What becomes of a post, decided when it is made."""

    kind: str  # "" = good, else the name of a fault
    wait: float
    unit: float  # seconds of a unit
    bad_unit: int  # the unit that fails or hangs


@attrs.define(eq=False)
class _Op:
    """A post under way."""

    token: int
    link: _Link
    direction: Direction
    plan: TransferPlan
    not_after: float
    fate: _Fate
    units: int
    next_unit: int = 0
    nbytes: int = 0
    moving: bool = False  # a unit has started and not ended
    hanging: bool = False
    released: bool = False
    ended: bool = False


@attrs.define(eq=False)
class _Link:
    session: Session
    peer_key: str
    connected: bool = False
    over: bool = False
    ops: dict[int, _Op] = attrs.field(factory=dict)


class MemoryFabric:
    """All memory transports of one simulated world."""

    def __init__(self, queue: EventQueue, rng: random.Random) -> None:
        self.queue, self.rng = queue, rng
        self.engines: dict[str, MemoryTransport] = {}
        self.counts: Counter[str] = Counter()  # posts, and faults injected by kind
        self.on_touch: Callable[[Touch], None] = lambda _: None
        self.notice_seconds = 1.0  # the longest time until a death is noticed

    def kill(self, engine: str) -> None:
        """The process of `engine` is gone, and its memory with it; peers notice within `notice_seconds`."""
        dead = self.engines[engine]
        dead.die()
        for transport in list(self.engines.values()):
            transport.lose_sessions(engine, "the peer process is dead", proven=True)

    def break_sessions(self, engine: str, peer: str) -> None:
        """The connections between two live engines break: posts end, and nothing is proven."""
        self.engines[engine].lose_sessions(peer, "the connection broke", proven=False)
        self.engines[peer].lose_sessions(engine, "the connection broke", proven=False)


class MemoryTransport(Transport):
    """Copies within this process, in fake time.

    Args:
        fabric: the world that this engine is part of.
        engine_key: unique within the fabric.
        clock: the time that `not_after` is compared with, seconds.
        on_events: called when `poll` has something; takes the place of `fileno`.
        copies_while_stopped: `stop` does not stop copies, as with hardware that moves bytes by itself.
    """

    def __init__(
        self,
        fabric: MemoryFabric,
        engine_key: str,
        clock: Callable[[], float],
        on_events: Callable[[], None] = lambda: None,
        *,
        copies_while_stopped: bool = False,
    ) -> None:
        self.capabilities = Capabilities("memory", frozenset({"cpu"}), same_host_only=True, max_ops_per_post=8)
        self.faults = TransportFaults()
        self.alive = True
        self.on_events = on_events
        self._fabric, self._key, self._clock = fabric, engine_key, clock
        self._copies_while_stopped = copies_while_stopped
        self._views: list[memoryview] = []
        self._sizes = np.zeros(0, np.uint64)
        self._links: dict[int, _Link] = {}
        self._ops: dict[int, _Op] = {}
        self._events: list[TransportEvent] = []
        self._held: list[_Op] | None = None  # while stopped: posts whose next unit waits
        fabric.engines[engine_key] = self

    # --- the contract ---------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> None:
        """See `Transport.register`; the caller keeps the memory alive as long as this transport."""
        for i, region in enumerate(regions):
            if region.device not in self.capabilities.devices:
                raise TransportError(f"region {i}: device {region.device!r}: expected 'cpu'")
        for region in regions:
            array = (ctypes.c_uint8 * region.nbytes).from_address(region.address)
            self._views.append(memoryview(array).cast("B"))
        self._sizes = np.array([region.nbytes for region in regions], np.uint64)

    def describe(self) -> Description:
        """See `Transport.describe`."""
        return Description(self._key.encode(), tuple(str(len(view)).encode() for view in self._views))

    def connect(self, peer: Description) -> Session:
        """See `Transport.connect`."""
        try:
            key = peer.engine.decode()
        except UnicodeDecodeError:
            raise PeerRefusedError(f"engine {peer.engine[:32]!r}: expected the key of a memory transport") from None
        link = _Link(Session(self._fabric.rng.getrandbits(62)), key)
        self._links[link.session.id] = link
        self._fabric.queue.after(0.002, lambda: self._connected(link))
        return link.session

    def post(self, token: int, session: Session, direction: Direction, plan: TransferPlan, not_after: float) -> None:
        """See `Transport.post`."""
        if token in self._ops:
            raise TransportError(f"token {token} is in use")
        self._fabric.counts["posts"] += 1
        link = self._links.get(session.id)
        if link is None or not link.connected or not self._inside(link, plan):
            self._tell(Completed(token, Outcome.FAILED, reason="no such session, or a run outside its region"))
            return
        units = min(len(plan), 1 + self._fabric.rng.randrange(3))
        fate = self._draw(units, not_after - self._clock())
        if fate.kind == "refuse":
            self._tell(Completed(token, Outcome.REFUSED, reason="the queue is full"))
            return
        op = _Op(token, link, direction, plan, not_after, fate, units)
        self._ops[token] = link.ops[token] = op
        self._fabric.queue.after(fate.wait, lambda: self._start_unit(op))

    def release(self, token: int) -> None:
        """See `Transport.release`."""
        op = self._ops.get(token)
        if op is not None:
            op.released = True
            if not op.moving and not (op.hanging and op.fate.kind == "wedge"):
                self._end(op, Outcome.CANCELLED, "released")

    def disconnect(self, session: Session) -> None:
        """See `Transport.disconnect`."""
        link = self._links.pop(session.id, None)
        if link is not None:
            self._close(link, Outcome.CANCELLED, "disconnected")

    def fileno(self) -> int:
        """-1: there is nothing to wait for in fake time; `on_events` is called instead."""
        return -1

    def poll(self) -> list[TransportEvent]:
        """See `Transport.poll`."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """See `Transport.close`; units that have started do not end."""
        for link in list(self._links.values()):
            self.disconnect(link.session)
        for op in list(self._ops.values()):
            self._end(op, Outcome.CANCELLED, "closed")
        self.alive = False

    # --- the world ------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """How many posts have not ended."""
        return len(self._ops)

    def stop(self) -> None:
        """The process is stopped (SIGSTOP): no unit starts; those that have started end."""
        if not self._copies_while_stopped:
            self._held = []

    def resume(self) -> None:
        """The process goes on."""
        held, self._held = self._held, None
        for op in held or ():
            self._start_unit(op)

    def die(self) -> None:
        """The process is killed: nothing of it moves or speaks any more."""
        self.alive = False
        self._ops.clear()
        self._links.clear()

    def lose_sessions(self, peer_key: str, reason: str, *, proven: bool) -> None:
        """Sessions with a peer end soon."""
        for link in self._links.values():
            if link.peer_key == peer_key:
                delay = self._fabric.rng.uniform(0, self._fabric.notice_seconds)
                self._fabric.queue.after(delay, lambda link=link: self._lost(link, reason, proven))  # type: ignore[misc]

    # --- connections ----------------------------------------------------------------------------------------------

    def _connected(self, link: _Link) -> None:
        if not self.alive or link.over:
            return
        peer = self._fabric.engines.get(link.peer_key)
        if peer is None or not peer.alive:
            self._lost(link, "no such engine", proven=peer is not None)
        elif self._hit(self.faults.unconnected, "unconnected"):
            self._lost(link, "the connection was not made", proven=False)
        else:
            link.connected = True
            self._tell(Connected(link.session))

    def _lost(self, link: _Link, reason: str, proven: bool) -> None:
        if self.alive and not link.over:
            self._links.pop(link.session.id, None)
            self._close(link, Outcome.FAILED, reason)
            self._tell(SessionLost(link.session, reason, proven))

    def _close(self, link: _Link, outcome: Outcome, reason: str) -> None:
        link.over, link.connected = True, False
        for op in list(link.ops.values()):
            op.released = True
            if not op.moving:
                self._end(op, outcome, reason)

    # --- copies ---------------------------------------------------------------------------------------------------

    def _draw(self, units: int, time_left: float) -> _Fate:
        rng, faults = self._fabric.rng, self.faults
        kind = next((k for k in ("refuse", "fail", "late", "hang", "wedge") if self._hit(getattr(faults, k), k)), "")
        if kind == "late":
            unit = rng.uniform(0, faults.unit_seconds)
            last_moment = time_left - rng.uniform(0, 2) * unit
            just_in_time = rng.random() < 0.5 and 0 < last_moment < 2 * faults.late_seconds
            return _Fate(kind, last_moment if just_in_time else rng.uniform(0, faults.late_seconds), unit, -1)
        return _Fate(kind, 0.0002, rng.uniform(0, 0.002), rng.randrange(units + 1))

    def _hit(self, chance: float, kind: str) -> bool:
        hit = chance > 0 and self._fabric.rng.random() < chance
        if hit:
            self._fabric.counts[kind] += 1
        return hit

    def _inside(self, link: _Link, plan: TransferPlan) -> bool:
        peer = self._fabric.engines.get(link.peer_key)
        if peer is None or not len(plan):
            return False
        sides = ((plan.local_region, plan.local_offset, self), (plan.remote_region, plan.remote_offset, peer))
        return all(
            bool((region < len(it._sizes)).all()) and bool((offset + plan.nbytes <= it._sizes[region]).all())  # noqa: SLF001
            for region, offset, it in sides
        )

    def _start_unit(self, op: _Op) -> None:
        if op.ended or not self.alive:
            return
        if self._held is not None:
            self._held.append(op)
        elif op.released:
            self._end(op, Outcome.CANCELLED, "released")
        elif op.fate.kind in {"hang", "wedge"} and op.next_unit == op.fate.bad_unit:
            op.hanging = True
        elif op.fate.kind == "fail" and op.next_unit == op.fate.bad_unit:
            self._end(op, Outcome.FAILED, "injected")
        elif op.next_unit == op.units:
            self._end(op, Outcome.DONE)
        elif self._clock() >= op.not_after:
            self._end(op, Outcome.EXPIRED, "the time limit has passed")
        else:
            op.moving = True
            self._fabric.queue.after(op.fate.unit, lambda: self._end_unit(op))

    def _end_unit(self, op: _Op) -> None:
        op.moving = False
        if op.ended or not self.alive:
            return
        peer = self._fabric.engines[op.link.peer_key]
        if not peer.alive:
            self._end(op, Outcome.FAILED, "the peer process is dead")
            return
        start, stop = (len(op.plan) * n // op.units for n in (op.next_unit, op.next_unit + 1))
        self._move(op, peer, start, stop)
        op.next_unit += 1
        self._start_unit(op)

    def _move(self, op: _Op, peer: MemoryTransport, start: int, stop: int) -> None:
        plan, write = op.plan, op.direction is Direction.WRITE
        columns = (plan.local_region, plan.local_offset, plan.remote_region, plan.remote_offset, plan.nbytes)
        for lr, lo, rr, ro, nbytes in zip(*(c[start:stop].tolist() for c in columns), strict=True):
            ours, theirs = self._views[lr][lo : lo + nbytes], peer._views[rr][ro : ro + nbytes]
            if write:
                theirs[:] = ours
            else:
                ours[:] = theirs
            op.nbytes += nbytes
        self._fabric.on_touch(Touch(self._key, op.link.peer_key, op.direction, plan, start, stop))

    def _end(self, op: _Op, outcome: Outcome, reason: str = "") -> None:
        op.ended = True
        self._ops.pop(op.token, None)
        op.link.ops.pop(op.token, None)
        self._tell(Completed(op.token, outcome, op.nbytes, reason))

    def _tell(self, event: TransportEvent) -> None:
        self._events.append(event)
        self.on_events()
