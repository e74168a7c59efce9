"""Fake network: carries frames as bytes, and loses, delays, repeats, reorders and cuts them as it is told.

Without faults it keeps the order between two nodes, as the real channel does.  Faults are plain numbers that may be
changed at any time; who decides when is a schedule (`moriio_proto.testing.schedule`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import attrs

from moriio_proto.testing.clock import EventQueue

__all__ = ["FakeNetwork", "NetworkFaults"]

Frames = tuple[bytes, ...]


@attrs.define
class NetworkFaults:
    """Probabilities per message, from 0 to 1, and how long a delayed one may take."""

    loss: float = 0.0
    duplicate: float = 0.0
    truncate: float = 0.0  # a random tail is cut off
    delay: float = 0.0  # the message overtakes and is overtaken
    delay_seconds: float = 3.0  # upper end of a delay


class FakeNetwork:
    """All links between all nodes; nodes are named by strings."""

    def __init__(self, queue: EventQueue, rng: random.Random, latency: float = 0.0005) -> None:
        self.faults = NetworkFaults()
        self.counts: Counter[str] = Counter()  # messages carried, and faults injected by kind
        self._queue, self._rng, self._latency = queue, rng, latency
        self._cuts: Counter[tuple[str, str]] = Counter()

    def cut(self, source: str, target: str) -> None:
        """From now on nothing arrives in this direction; cuts are counted."""
        self._cuts[source, target] += 1

    def mend(self, source: str, target: str) -> None:
        """Undo one `cut`."""
        self._cuts[source, target] -= 1

    def carry(self, source: str, target: str, frames: Frames, deliver: Callable[[Frames], None]) -> None:
        """Bring a message of one or more frames to `target`: `deliver` is called never, once or several times."""
        self.counts["carried"] += 1
        if self._cuts[source, target] > 0:
            self.counts["partitioned"] += 1
            return
        self._copy(frames, deliver)
        if self._hit("duplicate"):
            self._copy(frames, deliver)

    def _copy(self, frames: Frames, deliver: Callable[[Frames], None]) -> None:
        if self._hit("loss"):
            return
        if self._hit("truncate"):
            cut = self._rng.randrange(len(frames))
            keep = self._rng.randrange(len(frames[cut]) or 1)
            frames = (*frames[:cut], frames[cut][:keep], *frames[cut + 1 :])
        late = self._rng.uniform(0, self.faults.delay_seconds) if self._hit("delay") else 0.0
        self._queue.after(self._latency + late, lambda: deliver(frames))

    def _hit(self, kind: str) -> bool:
        chance = getattr(self.faults, kind)
        hit = chance > 0 and self._rng.random() < chance
        if hit:
            self.counts[kind] += 1
        return bool(hit)
