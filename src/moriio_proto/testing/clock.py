"""Fake time: one queue of what happens next, and clocks of nodes whose rates differ.

Nothing here waits: `run` moves time from one entry to the next.  Times are seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import attrs

__all__ = ["EventQueue", "NodeClock"]

_Action = Callable[[], None]


class EventQueue:
    """What happens when, in global time; entries of one moment run in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, _Action]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, when: float, action: _Action) -> None:
        """Call `action` at `when`, or now if that is past."""
        self._count += 1  # breaks ties, so actions are never compared
        heapq.heappush(self._heap, (max(when, self.now), self._count, action))

    def after(self, delay: float, action: _Action) -> None:
        """Call `action` in `delay` seconds."""
        self.at(self.now + delay, action)

    def run(self, until: float) -> bool:
        """Run entries up to and including the moment `until`, which is now then; True when none is left."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action = heapq.heappop(heap)
            action()
        self.now = max(self.now, until)
        return not heap


@attrs.frozen
class NodeClock:
    """A monotonic clock of one node: `offset + rate * global time`."""

    queue: EventQueue
    rate: float = 1.0
    offset: float = 0.0

    def __call__(self) -> float:
        """The node's time now."""
        return self.offset + self.rate * self.queue.now

    def globally(self, local: float) -> float:
        """When, in global time, this clock shows `local`."""
        return (local - self.offset) / self.rate
