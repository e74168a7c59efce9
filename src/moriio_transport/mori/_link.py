"""One connection to one peer's engine: a queue of posts, a window of batches under way, and the thread that waits.

Theory of operation
-------------------
The reactor's thread submits straight into the engine while the window has room; nothing blocks there, because the
window never asks for more work requests than the send queue holds.  What does not fit stays queued, and the link's
thread submits it when it has seen room come back.  That thread waits for the oldest batch in the engine's own wait,
without the interpreter lock and without an interval; batches to one peer end in order, so it sees each end in time.

OPENING -> OPEN -> BROKEN or CLOSED.  BROKEN after an engine error or the peer's death: what was queued fails at once,
what is under way when it is quiet.  A failed batch is not quiet by itself where it was spread over several queue pairs:
the others go on.  A fence, an empty write on every queue pair, ends after everything before it; only then it is told.
"""

from __future__ import annotations

import enum
import logging
import queue
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import attrs

from moriio_transport.base import Outcome, TransportError
from moriio_transport.mori import _lifeline
from moriio_transport.mori._posts import Flight, Limits, Post

if TYPE_CHECKING:
    from collections.abc import Callable

    from moriio_transport.mori._batches import Batch, Pair
    from moriio_transport.mori.binding import Engine, Engines, PeerEngine

__all__ = ["Link", "Reports"]

_log = logging.getLogger(__name__)


class _Do(enum.Enum):
    OPEN = "open sessions for the queue's head"
    STOP = "nothing comes any more"


class LinkState(enum.Enum):
    """Where a connection is."""

    OPENING = "opening"
    OPEN = "open"
    BROKEN = "broken"
    CLOSED = "closed"


@attrs.frozen
class Reports:
    """What a link tells its transport; called on any thread, with the link's lock held."""

    opened: Callable[[Link], None]
    ended: Callable[[Post], None]
    lost: Callable[[Link, str, bool], None]  # reason, proven
    finished: Callable[[Link], None]  # everything is given back, save the lifeline


class Link:
    """A connection to the engine of one peer.

    Args:
        peer: decoded description.
        lifeline: where it listens; None for a peer without one.
        engines: ours.
        limits: of the window.
        clock: what `not_after` is compared with.
        reports: to the transport.
    """

    def __init__(
        self,
        peer: PeerEngine,
        lifeline: _lifeline.Address | None,
        engines: Engines,
        limits: Limits,
        clock: Callable[[], float],
        reports: Reports,
    ) -> None:
        self.peer, self.state = peer, LinkState.OPENING
        self.line: socket.socket | None = None  # readable when the peer has ended
        self.sessions: set[int] = set()  # ids of the transport's sessions on this link
        self._lifeline, self._engines, self._limits = lifeline, engines, limits
        self._clock, self._reports = clock, reports
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._opened: dict[Pair, Any] = {}  # the engine's sessions
        self._queue: deque[Post] = deque()
        self._ops = self._bytes = 0  # under way
        self._fencing = False
        self._work: queue.SimpleQueue[Flight | _Do] = queue.SimpleQueue()
        self._unquiet: list[Flight] = []
        self._thread = threading.Thread(target=self._run, name=f"moriio-link-{peer.key[-12:]}", daemon=True)

    # --- the reactor's thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to open; ends in `opened` or `lost`."""
        self._thread.start()

    def join_session(self, session: int) -> bool:
        """One more session on this link; False where it has ended."""
        with self._lock:
            if self.state in (LinkState.OPENING, LinkState.OPEN):
                self.sessions.add(session)
                return True
            return False

    def submit(self, post: Post) -> None:
        """Start a post, or queue it."""
        with self._lock:
            if self.state is not LinkState.OPEN:
                post.stop(Outcome.FAILED, "the session is not connected")
                self._end_if_over(post)
                return
            self._queue.append(post)
            self._pump()

    def stop(self, post: Post, outcome: Outcome, reason: str) -> None:
        """Take back what was not submitted of a post."""
        with self._lock:
            if post.batches:
                post.stop(outcome, reason)
                self._queue.remove(post)
                self._end_if_over(post)

    def leave(self, session: int) -> None:
        """A session is not used any more; its posts were stopped.  The last one closes the link when it is quiet."""
        with self._lock:
            self.sessions.discard(session)
            self._close_if_idle()

    def look(self) -> bool:
        """The lifeline is readable: whether the peer has ended, or the way to it is broken."""
        ended = None if self.line is None else _lifeline.ended(self.line)
        if ended is not None:
            with self._lock:
                self._break(ended, proven=ended == _lifeline.ENDED)
        return ended is not None

    def supersede(self) -> None:
        """Another process has come under the peer's engine key."""
        with self._lock:
            self._break("another process has this engine key now", proven=False)

    @property
    def is_open(self) -> bool:
        """It takes posts."""
        return self.state is LinkState.OPEN

    @property
    def alive(self) -> bool:
        """Its thread has not ended."""
        return self._thread.is_alive()

    def join(self, timeout: float) -> bool:
        """Wait until everything is quiet and given back; False after `timeout` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # --- under the lock, on either thread -------------------------------------------------------------------------

    def _pump(self) -> None:
        """Submit from the head of the queue while the window has room."""
        while self._queue and self.state is LinkState.OPEN and not self._fencing:
            post = self._queue[0]
            if post.batches and self._clock() >= post.not_after:
                post.stop(Outcome.EXPIRED, "not submitted in time")
            if not post.batches:
                self._queue.popleft()
                self._end_if_over(post)
                continue
            batch = post.batches[0]
            if batch.pair not in self._opened:
                self._work.put(_Do.OPEN)
                return
            if not self._fits(batch):
                return
            post.batches.popleft()
            self._fly(post, batch)

    def _fits(self, batch: Batch) -> bool:
        if not self._ops:
            return True
        limits = self._limits
        return self._ops + limits.cost(batch) <= limits.queue_ops and self._bytes + batch.nbytes <= limits.window_bytes

    def _fly(self, post: Post, batch: Batch) -> None:
        session, cost = self._opened[batch.pair], self._limits.cost(batch)
        copy = session.batch_write if post.write else session.batch_read
        uid = session.allocate_transfer_uid()
        status = copy(batch.local.tolist(), batch.remote.tolist(), batch.sizes.tolist(), uid)
        post.under_way += 1
        self._ops += cost
        self._bytes += batch.nbytes
        self._work.put(Flight(post, batch, status, session, cost))

    def _end_if_over(self, post: Post) -> None:
        if post.over:
            self._reports.ended(post)

    def _break(self, reason: str, *, proven: bool) -> None:
        """No further post of this link can work."""
        if self.state in (LinkState.BROKEN, LinkState.CLOSED):
            return
        self.state = LinkState.BROKEN
        if self._engine is not None:
            self._engine.dead_peers.add(self.peer.key)  # also a restarted process may come under this key
        self._reports.lost(self, reason, proven)  # first: who hears of a failed post may connect again at once
        while self._queue:
            post = self._queue.popleft()
            post.stop(Outcome.FAILED, reason)
            self._end_if_over(post)
        self._work.put(_Do.STOP)

    def _close_if_idle(self) -> None:
        if self.state is LinkState.OPEN and not self.sessions and not self._queue and not self._ops:
            self.state = LinkState.CLOSED
            self._work.put(_Do.STOP)

    # --- the link's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._open()
        except TransportError as error:
            with self._lock:
                self._break(str(error), proven=isinstance(error, _lifeline.PeerGoneError))
            self._reports.finished(self)
            return
        while (item := self._work.get()) is not _Do.STOP:
            if isinstance(item, Flight):
                self._settle(item)
            else:
                self._open_head(engine)
        self._finish(engine)

    def _open(self) -> Engine:
        """Prove that the peer lives, then make one session for each of its regions.

        Raises:
            TransportError: the peer cannot be reached or is not who it said it is.
        """
        if self._lifeline is not None:
            self.line = _lifeline.dial(self._lifeline, self.peer.key)
        engine = self._engines.take(self.peer.key)
        try:
            engine.meet(self.peer)
            ours = len(engine.memory)
            for region in range(len(self.peer.memory) if ours == len(self.peer.memory) else 0):
                self._opened[region, region] = engine.open_session(region, self.peer, region)
        except TransportError:
            self._opened.clear()
            self._engines.give(engine)
            raise
        with self._lock:
            self._engine = engine
            if self.state is LinkState.OPENING:
                self.state = LinkState.OPEN
                self._reports.opened(self)
                self._close_if_idle()  # everybody has left meanwhile
        return engine

    def _open_head(self, engine: Engine) -> None:
        """Make the session that the queue's head waits for.  Rare: regions are paired in order by `_open`."""
        with self._lock:
            pair = next((post.batches[0].pair for post in self._queue if post.batches), None)
            if pair is None or pair in self._opened:
                return
        try:
            if self._lifeline is not None:  # still running?  The engine would hold the interpreter for 5 s
                _lifeline.dial(self._lifeline, self.peer.key).close()
            session = engine.open_session(pair[0], self.peer, pair[1])
        except TransportError as error:
            with self._lock:
                self._break(str(error), proven=isinstance(error, _lifeline.PeerGoneError))
            return
        with self._lock:
            self._opened[pair] = session
            self._pump()

    def _settle(self, flight: Flight) -> None:
        """Wait for the oldest batch and say what became of it."""
        flight.status.WaitFor(-1)
        if flight.status.Succeeded():
            with self._lock:
                flight.post.moved += flight.batch.nbytes
                self._land(flight)
            return
        reason = str(flight.status.Message()) or str(flight.status.Code())
        if _queue_was_full(reason):
            self._refused(flight, reason)
            return
        gone = self.state is LinkState.OPEN and self._has_gone()
        with self._lock:
            flight.post.stop(Outcome.FAILED, reason)
            self._unquiet.append(flight)
            self._break(reason, proven=gone)

    def _has_gone(self) -> bool:
        """Whether an error comes from the peer's end."""
        if self._lifeline is not None:
            return _lifeline.has_gone(self._lifeline, self.peer.key)
        host, port = str(self.peer.engine.host), int(self.peer.engine.port)
        return port > 0 and _lifeline.refuses(_lifeline.Address(host, port))

    def _land(self, flight: Flight) -> None:
        """A batch is quiet (lock held)."""
        flight.post.under_way -= 1
        self._ops -= flight.cost
        self._bytes -= flight.batch.nbytes
        self._end_if_over(flight.post)
        self._pump()
        self._close_if_idle()

    def _refused(self, flight: Flight, reason: str) -> None:
        """The engine's queue was full: some of the batch may be under way, so it is fenced before it is told."""
        with self._lock:
            self._fencing = True
            self.stop(flight.post, Outcome.REFUSED, reason)
            flight.post.stop(Outcome.REFUSED, reason)
        self._fence(flight.session)
        with self._lock:
            self._fencing = False
            self._land(flight)

    def _fence(self, session: Any) -> None:
        """Wait until everything submitted before on every queue pair of a session has ended, well or not.

        Single writes go round the queue pairs of their session in turn.
        """
        for _ in range(self._limits.queue_pairs):
            while True:
                status = session.batch_write([0], [0], [0], session.allocate_transfer_uid())
                status.WaitFor(-1)
                if status.Succeeded() or not _queue_was_full(str(status.Message())):
                    break  # while the queue is full the engine itself waits for room, seconds each time

    def _finish(self, engine: Engine) -> None:
        """Everything has ended: fence what failed, tell it, and give sessions and engine back in this order."""
        if self._unquiet and self._limits.queue_pairs > 1:
            for session in list(self._opened.values()):
                self._fence(session)
        with self._lock:
            unquiet, self._unquiet = self._unquiet, []
            for flight in unquiet:
                self._land(flight)
        unquiet.clear()
        if self.state is LinkState.BROKEN and (noticed := engine.failure()):
            _log.warning("engine %s: %s", engine.key, noticed)
        self._opened.clear()
        self._engines.give(engine)
        self._reports.finished(self)


def _queue_was_full(message: str) -> bool:
    """The engine's only words for back-pressure; the code alone does not tell."""
    return message.startswith("SQ full") or "ibv_post_send" in message
