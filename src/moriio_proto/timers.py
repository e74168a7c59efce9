"""When a core wants to be called next.  No clock: time is an argument.

A record keeps its own timers (`record.timers`: trigger -> when); the heap only orders them.  Clearing a record's dict
makes its heap entries void; they are skipped when they come up.  Putting a timer off, which every completion does,
costs nothing: its old entry comes up too early, and is then put where it belongs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

__all__ = ["Timed", "Timers"]


class Timed(Protocol):
    """A record with timers."""

    timers: dict[str, float]


class Timers:
    """Deadlines of all records, soonest first; a few hundred nanoseconds each."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timed, str]] = []
        self._count = 0

    def arm(self, record: Timed, trigger: str, at: float) -> None:
        """Fire `trigger` on `record` at `at`, instead of when it was armed for before."""
        before = record.timers.get(trigger)
        record.timers[trigger] = at
        if before is None or at < before:
            self._push(at, record, trigger)

    def _push(self, at: float, record: Timed, trigger: str) -> None:
        self._count += 1  # breaks ties in order of arming, so records are never compared
        heapq.heappush(self._heap, (at, self._count, record, trigger))

    def next_deadline(self) -> float | None:
        """The soonest valid deadline."""
        heap = self._heap
        while heap:
            at, _, record, trigger = heap[0]
            armed = record.timers.get(trigger)
            if armed == at:
                return at
            heapq.heappop(heap)
            if armed is not None and armed > at:
                self._push(armed, record, trigger)
        return None

    def due(self, now: float) -> Iterator[tuple[Timed, str]]:
        """What is due at `now`, in order; each is disarmed as it is yielded."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            at, _, record, trigger = heapq.heappop(heap)
            armed = record.timers.get(trigger)
            if armed == at:
                del record.timers[trigger]
                yield record, trigger
            elif armed is not None and armed > at:
                self._push(armed, record, trigger)
