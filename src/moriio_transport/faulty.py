"""A transport that misbehaves on purpose, around any other: for tests, ours and other people's.

What it does is what real ones do: late completions, failures, queues that are full, completions that never come.  It
keeps the contract all the same: each post has one end, a lost one has it when it is released or its session ends.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from moriio_proto.geometry import TransferPlan
from moriio_transport.base import (
    Completed,
    Description,
    Direction,
    Outcome,
    Region,
    Session,
    SessionLost,
    Transport,
    TransportEvent,
)

__all__ = ["FaultPlan", "FaultyTransport"]

log = logging.getLogger(__name__)


def _count(_plan: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if value < 0:
        raise ValueError(f"{attribute.name}={value}: expected 0 (never) or a positive number")


@attrs.frozen
class FaultPlan:
    """What goes wrong, and how often: `n` means every n-th post, 0 never.  `seed` decides which one is the first."""

    delay_ms: float = attrs.field(default=0.0, validator=_count)
    fail_every: int = attrs.field(default=0, validator=_count)
    lose_every: int = attrs.field(default=0, validator=_count)
    refuse_every: int = attrs.field(default=0, validator=_count)
    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.delay_ms or self.fail_every or self.lose_every or self.refuse_every)


class _Every:
    """True for every n-th call, from a random first one on."""

    def __init__(self, n: int, rng: random.Random) -> None:
        self._n, self._left = n, rng.randrange(n) if n else 0

    def __call__(self) -> bool:
        if not self._n:
            return False
        hit = self._left == 0
        self._left = self._n - 1 if hit else self._left - 1
        return hit


class _Delay:
    """Calls back after a while, from a thread of its own: the transport's owner never waits."""

    def __init__(self, due: Callable[[int], None]) -> None:
        self._due, self._heap, self._closed = due, list[tuple[float, int]](), False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="moriio-faults", daemon=True)
        self._thread.start()

    def add(self, token: int, seconds: float) -> None:
        with self._changed:
            heapq.heappush(self._heap, (time.monotonic() + seconds, token))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                wait = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                else:
                    self._due(heapq.heappop(self._heap)[1])


@attrs.frozen
class _Held:
    """A post that the inner transport has not got (yet)."""

    session: Session
    direction: Direction
    plan: TransferPlan
    not_after: float


class FaultyTransport(Transport):
    """Wraps `inner`; all faults are counted in `injected`."""

    def __init__(self, inner: Transport, faults: FaultPlan) -> None:
        self._inner, self._faults = inner, faults
        self.capabilities = inner.capabilities
        self.injected = {"delay": 0, "fail": 0, "lose": 0, "refuse": 0}
        rng = random.Random(faults.seed)  # noqa: S311 - reproducible, not secret
        self._fail, self._lose, self._refuse = (
            _Every(n, rng) for n in (faults.fail_every, faults.lose_every, faults.refuse_every)
        )
        self._held: dict[int, _Held] = {}
        self._ended: deque[TransportEvent] = deque()
        self._due: deque[int] = deque()
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._delay = _Delay(self._on_due) if faults.delay_ms else None
        self._epoll = select.epoll()
        self._epoll.register(inner.fileno(), select.EPOLLIN)
        self._epoll.register(self._wake[0], select.EPOLLIN)
        log.critical("FAULT INJECTION IS ON, transfers of this process will fail on purpose: %s", faults)

    def register(self, regions: Sequence[Region]) -> None:
        """As the inner transport."""
        self._inner.register(regions)

    def describe(self) -> Description:
        """As the inner transport."""
        return self._inner.describe()

    def connect(self, peer: Description) -> Session:
        """As the inner transport."""
        return self._inner.connect(peer)

    def post(self, token: int, session: Session, direction: Direction, plan: TransferPlan, not_after: float) -> None:
        """Post, or let it go wrong."""
        if self._refuse():
            self._end(token, "refuse", Completed(token, Outcome.REFUSED, reason="injected: queue full"))
        elif self._fail():
            self._end(token, "fail", Completed(token, Outcome.FAILED, reason="injected failure"))
        elif self._lose():
            self.injected["lose"] += 1
            self._held[token] = _Held(session, direction, plan, not_after)
        elif self._delay is not None:
            self.injected["delay"] += 1
            self._held[token] = _Held(session, direction, plan, not_after)
            self._delay.add(token, self._faults.delay_ms / 1000)
        else:
            self._inner.post(token, session, direction, plan, not_after)

    def release(self, token: int) -> None:
        """End what is held here, or ask the inner transport."""
        if self._held.pop(token, None) is not None:
            self._say(Completed(token, Outcome.CANCELLED, reason="released"))
        else:
            self._inner.release(token)

    def disconnect(self, session: Session) -> None:
        """End what is held for the session, then the session."""
        self._end_held(session, Outcome.CANCELLED)
        self._inner.disconnect(session)

    def fileno(self) -> int:
        """Readable while either has events."""
        return self._epoll.fileno()

    def poll(self) -> list[TransportEvent]:
        """Events of both."""
        with contextlib.suppress(BlockingIOError):  # nobody woke us: the inner transport did
            os.read(self._wake[0], 4096)
        while self._due:
            token = self._due.popleft()
            held = self._held.pop(token, None)
            if held is not None:
                self._inner.post(token, held.session, held.direction, held.plan, held.not_after)
        inner = self._inner.poll()
        for event in inner:
            if isinstance(event, SessionLost):
                self._end_held(event.session, Outcome.FAILED)
        out: list[TransportEvent] = []
        while self._ended:
            out.append(self._ended.popleft())
        return out + inner

    def close(self) -> None:
        """End all, then the inner transport.  Idempotent."""
        if self._delay is not None:
            self._delay.close()
            self._delay = None
        self._held.clear()
        self._inner.close()
        if not self._epoll.closed:
            self._epoll.close()
            for fd in self._wake:
                os.close(fd)

    def _on_due(self, token: int) -> None:
        self._due.append(token)
        self._signal()

    def _end(self, token: int, kind: str, event: Completed) -> None:
        self.injected[kind] += 1
        self._say(event)

    def _end_held(self, session: Session, outcome: Outcome) -> None:
        for token in [t for t, held in self._held.items() if held.session == session]:
            del self._held[token]
            self._say(Completed(token, outcome, reason="the session ended"))

    def _say(self, event: TransportEvent) -> None:
        self._ended.append(event)
        self._signal()

    def _signal(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of wake-ups already
            os.write(self._wake[1], b"\0")
