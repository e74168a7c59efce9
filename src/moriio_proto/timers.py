"""When a core wants to be called next.  No clock: time is an argument.

A record keeps its own timers (`record.timers`: trigger -> when); the heap only orders them.  Arming again or
clearing a record's dict makes an older heap entry void, which is skipped when it comes up.
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
        if record.timers.get(trigger) == at:
            return
        record.timers[trigger] = at
        self._count += 1  # breaks ties in order of arming, so records are never compared
        heapq.heappush(self._heap, (at, self._count, record, trigger))

    def next_deadline(self) -> float | None:
        """The soonest valid deadline."""
        heap = self._heap
        while heap:
            at, _, record, trigger = heap[0]
            if record.timers.get(trigger) == at:
                return at
            heapq.heappop(heap)
        return None

    def due(self, now: float) -> Iterator[tuple[Timed, str]]:
        """What is due at `now`, in order; each is disarmed as it is yielded."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            at, _, record, trigger = heapq.heappop(heap)
            if record.timers.get(trigger) == at:
                del record.timers[trigger]
                yield record, trigger
