"""What a link works on: posts, their batches under way, and the limits of the window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from moriio_transport.base import Outcome

if TYPE_CHECKING:
    from collections import deque

    from moriio_transport.mori._batches import Batch

__all__ = ["WINDOW_BYTES", "Flight", "Limits", "Post"]

# Twice what a 400 Gbit/s card moves in the time that our thread needs to see an end and submit again.
WINDOW_BYTES: Final = 64 << 20


@attrs.frozen
class Limits:
    """How much is handed to the engine."""

    queue_ops: int  # work requests under way to one peer, as deep as a send queue
    queue_pairs: int = 1
    chunk_bytes: int = 0  # longer operations take several work requests; 0: never
    window_bytes: int = WINDOW_BYTES

    def cost(self, batch: Batch) -> int:
        """Work requests of a batch at most."""
        return batch.ops + (batch.nbytes // self.chunk_bytes if self.chunk_bytes else 0)


@attrs.define(eq=False)
class Post:
    """One post of the transport, until its `Completed` is told."""

    token: int
    session: int
    write: bool
    not_after: float
    batches: deque[Batch]  # not submitted yet
    under_way: int = 0  # batches
    moved: int = 0  # bytes
    outcome: Outcome = Outcome.DONE
    reason: str = ""

    def stop(self, outcome: Outcome, reason: str) -> None:
        """Submit nothing more of it; the first reason stays."""
        if self.outcome is Outcome.DONE:
            self.outcome, self.reason = outcome, reason
        self.batches.clear()

    @property
    def over(self) -> bool:
        """Quiet."""
        return not self.batches and not self.under_way


@attrs.frozen(eq=False)
class Flight:
    """A batch under way.  Holds the status for as long as the engine writes to it."""

    post: Post
    batch: Batch
    status: Any
    session: Any
    cost: int
