"""One post: a cursor over slices that any number of threads take turns on.

Each slice is one system call.  `stop` moves the cursor to the end, so what was not taken never starts, and the
post is over, once, as soon as the last slice that was taken comes back.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Protocol

from moriio_transport.base import Direction, Outcome, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from moriio_transport.loopback._runs import Runs

__all__ = ["CopyThreads", "Mover", "PeerGoneError", "Post"]


class PeerGoneError(TransportError):
    """The peer's engine does not exist any more (process ended or transport closed)."""


class Mover(Protocol):
    """What copies one slice."""

    def move(self, runs: Runs, start: int, stop: int, *, write: bool) -> int:
        """Copy the runs `[start, stop)`; returns how many bytes moved, at least one.

        Raises:
            PeerGoneError: the peer is proven to be gone.
            TransportError: nothing moved; says why and what to do.
        """


class Post:
    """The copies of one token.

    Args:
        mover: copies a slice.
        runs: what to copy.
        token: the caller's.
        session: id of the session.
        direction: as in `Transport.post`.
        not_after: second of `clock` from which no slice starts.
        clock: monotonic seconds.
        on_end: called once, from whichever thread ends the post, when it is quiet.
    """

    def __init__(
        self,
        mover: Mover,
        runs: Runs,
        *,
        token: int,
        session: int,
        direction: Direction,
        not_after: float,
        clock: Callable[[], float],
        on_end: Callable[[Post], None],
    ) -> None:
        self.token, self.session = token, session
        self.outcome, self.reason, self.moved, self.peer_gone = Outcome.DONE, "", 0, False
        self._mover, self._runs, self._write = mover, runs, direction is Direction.WRITE
        self._not_after, self._clock, self._on_end = not_after, clock, on_end
        self._lock = threading.Lock()
        self._next = self._running = 0
        self._ended = False

    def run(self) -> None:
        """Copy slices until none is left."""
        while (taken := self._take()) is not None:
            moved = 0
            try:
                moved = self._copy(*taken)
            except PeerGoneError as error:
                self.peer_gone = True
                self.stop(Outcome.FAILED, str(error))
            except TransportError as error:
                self.stop(Outcome.FAILED, str(error))
            with self._lock:
                self._running -= 1
                self.moved += moved
        self._end_if_quiet()

    def stop(self, outcome: Outcome, reason: str) -> None:
        """End early; the first reason counts, and an ended post stays as it is."""
        with self._lock:
            self._stop(outcome, reason)
        self._end_if_quiet()

    def _stop(self, outcome: Outcome, reason: str) -> None:
        if self.outcome is Outcome.DONE and not self._ended:
            self.outcome, self.reason = outcome, reason
            self._next = len(self._runs)

    def _take(self) -> tuple[int, int] | None:
        """The next slice; None where all are taken, the post was stopped, or its time is over."""
        late = self._late()
        with self._lock:
            start = self._next
            if start == len(self._runs):
                return None
            if late:
                self._stop(Outcome.EXPIRED, "not_after has come")
                return None
            self._next = self._runs.slice_end(start)
            self._running += 1
            return start, self._next

    def _late(self) -> bool:
        return self._clock() >= self._not_after

    def _copy(self, start: int, stop: int) -> int:
        """Copy one slice; more than one call only where the kernel stopped half-way."""
        runs, want, moved = self._runs, self._runs.size(start, stop), 0
        while moved < want:
            if moved and self._late():
                self.stop(Outcome.EXPIRED, "not_after has come")
            if self.outcome is not Outcome.DONE:
                break
            step = self._mover.move(runs, start, stop, write=self._write)
            moved += step
            if moved < want:
                runs = runs.rest(start, stop, step)
                start, stop = 0, len(runs)
        return moved

    def _end_if_quiet(self) -> None:
        with self._lock:
            if self._ended or self._running or self._next < len(self._runs):
                return
            self._ended = True
        self._on_end(self)


class CopyThreads:
    """Threads that copy posts, in order of posting.

    Args:
        count: how many; all of them work on one post.
    """

    def __init__(self, count: int) -> None:
        self._queue: queue.SimpleQueue[Post | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"moriio-loopback-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, post: Post) -> None:
        """Copy a post with all threads that become free before it is over."""
        for _ in self._threads:
            self._queue.put(post)

    def close(self) -> None:
        """Wait for what is queued (stop the posts first), then end the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (post := self._queue.get()) is not None:
            post.run()
