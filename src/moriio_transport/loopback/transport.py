"""The transport of one worker: sessions, posts and events over the peers and threads of this package."""

from __future__ import annotations

import collections
import itertools
import logging
import os
import select
import time
from typing import TYPE_CHECKING

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
from moriio_transport.loopback import _identity, _libc
from moriio_transport.loopback._mori import MoriName
from moriio_transport.loopback._peers import Peer, open_peer
from moriio_transport.loopback._post import CopyThreads, PeerGoneError, Post
from moriio_transport.loopback._runs import SLICE_BYTES, RegionTable, resolve
from moriio_transport.loopback._warm import Warmer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moriio_proto.geometry import TransferPlan

__all__ = ["INLINE_BYTES", "LoopbackTransport"]

_log = logging.getLogger(__name__)

# Handing a post to a thread and back costs 40 to 100 us, which is what copying half a megabyte takes.
INLINE_BYTES = 1 << 20

_session_ids = itertools.count(1)


class LoopbackTransport(Transport):
    """Copies between processes of one host, and within one process.

    Everything but the copying of slices happens on the caller's thread; `fileno()` is an epoll set of an eventfd,
    which the copy threads write to, and of the pidfd of every peer.

    Args:
        num_workers: threads that copy posts larger than `INLINE_BYTES`.
        clock: what `not_after` is compared with, monotonic seconds.
        warm: prefault registered memory and ask for huge pages.
        mori: describe this side in the compatibility form, under this name.  Both forms are always understood.
    """

    capabilities = Capabilities(
        name="loopback",
        devices=frozenset({"cpu"}),
        same_host_only=True,
        max_op_bytes=SLICE_BYTES,
        inline_bytes=INLINE_BYTES,
        can_cancel=True,
    )

    def __init__(
        self,
        *,
        num_workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
        warm: bool = True,
        mori: MoriName | None = None,
    ) -> None:
        self._mori = mori
        self._clock, self._warm = clock, warm
        self._identity: _identity.Identity | None = None
        self._regions = RegionTable("local", ())
        self._warmer: Warmer | None = None
        self._peers: dict[int, Peer] = {}  # of connected sessions
        self._posts: dict[int, Post] = {}  # by token, until their Completed is in _events
        self._events: list[TransportEvent] = []
        self._quiet: collections.deque[Post] = collections.deque()  # written by every thread
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._threads = CopyThreads(num_workers)
        self._closed = False

    def register(self, regions: Sequence[Region]) -> None:
        """See `Transport.register`.  Prefaulting goes on in the background."""
        if self._identity is not None:
            raise TransportError("register: called twice, expected once with all regions")
        for index, region in enumerate(regions):
            _check_region(index, region)
        try:
            _libc.allow_every_tracer()
        except OSError as error:  # a peer that needs it is told so when it connects
            _log.warning("loopback: %s", error)
        self._identity = _identity.Identity(regions, self._mori)
        self._regions = RegionTable("local", [(region.address, region.nbytes) for region in regions])
        if self._warm:
            self._warmer = Warmer(regions)

    def wait_warm(self) -> None:
        """Block until registered memory is prefaulted and collapsed: for benchmarks."""
        if self._warmer is not None:
            self._warmer.wait()

    def describe(self) -> Description:
        """See `Transport.describe`."""
        if self._identity is None:
            raise TransportError("describe: nothing is registered, expected register() before")
        return self._identity.description

    def connect(self, peer: Description) -> Session:
        """See `Transport.connect`.  The proof takes some system calls and is done at once."""
        engine, regions = _identity.decode(peer)
        session = Session(next(_session_ids))
        try:
            opened = open_peer(peer, engine, RegionTable("remote", regions))
        except PeerGoneError as error:
            self._tell(SessionLost(session, str(error), proven=True))
        except PeerRefusedError as error:
            self._tell(SessionLost(session, str(error)))
        else:
            self._peers[session.id] = opened
            if opened.death_fd is not None:
                self._epoll.register(opened.death_fd, select.EPOLLIN)
            self._tell(Connected(session))
        return session

    def post(self, token: int, session: Session, direction: Direction, plan: TransferPlan, not_after: float) -> None:
        """See `Transport.post`.

        A plan that leaves a region, or a session that is not connected (any more), ends as FAILED; nothing moved.

        Raises:
            TransportError: the token is in use.
        """
        if token in self._posts:
            raise TransportError(f"post: token {token} is in use, expected one whose post has ended")
        peer = self._peers.get(session.id)
        if peer is None:
            self._tell(Completed(token, Outcome.FAILED, reason=f"session {session.id} is not connected"))
            return
        try:
            runs = resolve(plan, self._regions, peer.regions)
        except TransportError as error:
            self._tell(Completed(token, Outcome.FAILED, reason=str(error)))
            return
        post = Post(
            peer,
            runs,
            token=token,
            session=session.id,
            direction=direction,
            not_after=not_after,
            clock=self._clock,
            on_end=self._ended,
        )
        self._posts[token] = post
        if runs.nbytes <= INLINE_BYTES:
            post.run()
        else:
            self._threads.submit(post)

    def release(self, token: int) -> None:
        """See `Transport.release`.  At most one slice per copy thread is still under way."""
        post = self._posts.get(token)
        if post is not None:
            post.stop(Outcome.CANCELLED, "released")

    def disconnect(self, session: Session) -> None:
        """See `Transport.disconnect`."""
        self._drop(session.id, Outcome.CANCELLED, "disconnected")

    def fileno(self) -> int:
        """See `Transport.fileno`."""
        return self._epoll.fileno()

    def poll(self) -> list[TransportEvent]:
        """See `Transport.poll`.  After `close` it returns, once, what had not been fetched."""
        if not self._closed:
            for fd, _ in self._epoll.poll(0):
                if fd == self._wake:
                    os.eventfd_read(self._wake)  # before the queue is read: a later end wakes us again
                else:
                    self._peer_died(fd)
        self._collect()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """See `Transport.close`.  Peers that look at our seal do not copy any more."""
        if self._closed:
            return
        for session in list(self._peers):
            self._drop(session, Outcome.CANCELLED, "closed")
        self._threads.close()
        if self._identity is not None:
            self._identity.close()
        if self._warmer is not None:
            self._warmer.close()
        self._closed = True
        self._epoll.close()
        os.close(self._wake)

    def _tell(self, event: TransportEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._wake, 1)

    def _ended(self, post: Post) -> None:
        """A post is quiet; called on any thread."""
        self._quiet.append(post)
        os.eventfd_write(self._wake, 1)

    def _collect(self) -> None:
        while self._quiet:
            post = self._quiet.popleft()
            del self._posts[post.token]
            self._events.append(Completed(post.token, post.outcome, post.moved, post.reason))
            if post.peer_gone:
                self._lose(post.session, post.reason)

    def _peer_died(self, fd: int) -> None:
        for session, peer in list(self._peers.items()):
            if peer.death_fd == fd:
                self._lose(session, "the peer's process has ended")

    def _lose(self, session: int, reason: str) -> None:
        """The peer is proven to be gone: say so once."""
        if session in self._peers:
            _log.info("loopback: session %d is lost: %s", session, reason)
            self._events.append(SessionLost(Session(session), reason, proven=True))
            self._drop(session, Outcome.FAILED, reason)

    def _drop(self, session: int, outcome: Outcome, reason: str) -> None:
        peer = self._peers.pop(session, None)
        if peer is None:
            return
        if peer.death_fd is not None:
            self._epoll.unregister(peer.death_fd)
        peer.close()
        for post in list(self._posts.values()):
            if post.session == session:
                post.stop(outcome, reason)


def _check_region(index: int, region: Region) -> None:
    def refuse(what: str) -> TransportError:
        return TransportError(f"register: region {index} ({region.nbytes} bytes at {region.address:#x}): {what}")

    if region.device not in LoopbackTransport.capabilities.devices:
        raise refuse(f"device {region.device!r}, expected 'cpu'")
    if region.address <= 0 or region.nbytes <= 0:
        raise refuse("expected a positive address and size")
    if not _libc.is_mapped(region.address, region.nbytes):
        raise refuse("expected memory that is mapped in this process")
