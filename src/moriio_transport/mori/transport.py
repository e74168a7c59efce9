"""The transport of one worker over MoRI-IO: sessions, posts and events over links to peers' engines."""

from __future__ import annotations

import ctypes
import ipaddress
import itertools
import logging
import os
import select
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import attrs

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
    TransportUnavailableError,
)
from moriio_transport.mori import _batches, _lifeline, _options, preflight, verbs
from moriio_transport.mori._link import Link, Reports
from moriio_transport.mori._posts import WINDOW_BYTES, Limits, Post
from moriio_transport.mori.binding import Engine, Engines, PeerEngine, load_library

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moriio_proto.geometry import TransferPlan
    from moriio_transport.mori.binding import Library

__all__ = ["MoriTransport", "Setup", "open_rdma", "open_xgmi"]

_log = logging.getLogger(__name__)

_MAX_BATCH_OPS: Final = 2048  # one call of the engine: about 0.3 ms of the reactor's thread
_QUIET_S: Final = 10.0  # `close` waits so long for batches under way; a card gives a silent peer up sooner
_MAX_RUN: Final = 2**32 - 1  # of the engine

_session_ids = itertools.count(1)


@attrs.frozen
class Setup:
    """What tells the two backends apart."""

    library: Library
    backend: Any  # the library's BackendType
    config: Any  # of the backend
    capabilities: Capabilities
    limits: Limits
    check_memory: Callable[[Sequence[Region]], None]
    one_node: bool = False  # peers have our engine's node_id


def open_rdma(engine_key: str, host: str, options: Mapping[str, Any]) -> MoriTransport:
    """A transport over the RDMA devices of this host; see `RdmaPlugin.create`."""
    checked = _options.check(_options.RDMA, options)
    _options.log_environment()
    ports = verbs.active_ports()
    preflight.check_rocm_smi()
    library = load_library()
    seen = _options.effective(_options.RDMA, checked)
    longest = _MAX_RUN if seen["transfer_chunking"] else min(_MAX_RUN, *(port.max_message for port in ports))
    depth = seen["max_send_wr"] or _options.SEND_QUEUE_DEPTH
    setup = Setup(
        library=library,
        backend=library.io.BackendType.RDMA,
        config=library.rdma_config(checked),
        capabilities=Capabilities("rdma", frozenset({"cpu", "cuda"}), same_host_only=False, max_op_bytes=longest,
                                  can_cancel=True),
        limits=Limits(depth, seen["qp_per_transfer"] * seen["nics_per_transfer"],
                      seen["chunk_bytes"] if seen["transfer_chunking"] else 0, min(WINDOW_BYTES, 4 * longest)),
        check_memory=_check_pinnable,
    )  # fmt: skip
    _log.info(
        "rdma: amd_mori %s, %s", library.version, ", ".join(f"{port.device} port {port.number}" for port in ports)
    )
    return MoriTransport(setup, engine_key, preflight.ipv4_of(host))


def open_xgmi(engine_key: str, host: str, options: Mapping[str, Any]) -> MoriTransport:
    """A transport over the GPU fabric of this host; see `XgmiPlugin.create`."""
    checked = _options.check(_options.XGMI, options)
    _options.log_environment()
    preflight.check_rocm_smi()
    library = load_library()
    setup = Setup(
        library=library,
        backend=library.io.BackendType.XGMI,
        config=library.xgmi_config(checked),
        capabilities=Capabilities("xgmi", frozenset({"cuda"}), same_host_only=True, max_op_bytes=_MAX_RUN,
                                  can_cancel=True),
        limits=Limits(_options.SEND_QUEUE_DEPTH),
        check_memory=lambda _: None,  # a GPU's memory is not pinned
        one_node=True,
    )  # fmt: skip
    _log.info("xgmi: amd_mori %s", library.version)
    return MoriTransport(setup, engine_key, preflight.ipv4_of(host))


def _check_pinnable(regions: Sequence[Region]) -> None:
    preflight.check_memlock(regions)
    verbs.try_pin(regions)


class MoriTransport(Transport):
    """Links to peers' engines; `fileno()` is an epoll set of an eventfd and of the peers' lifelines.

    Args:
        setup: of the backend.
        engine_key: unique to this process start and rank.
        host: dotted IPv4 address of this host under which peers reach it.
        clock: what `not_after` is compared with, monotonic seconds.

    Raises:
        TransportUnavailableError: the engine, or the address.
    """

    def __init__(
        self, setup: Setup, engine_key: str, host: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.capabilities = setup.capabilities
        self._setup, self._key, self._host, self._clock = setup, engine_key, host, clock
        self._regions: Sequence[Region] = ()
        self._sizes: tuple[int, ...] = ()
        self._engines = Engines(self._make_engine, engine_key)
        try:
            self._lifeline = _lifeline.Lifeline(host, engine_key)
        except OSError as error:
            self._engines.close()
            raise TransportUnavailableError(f"{host} cannot be bound: {error}") from error
        self._links: dict[str, Link] = {}  # the newest to each peer's engine
        self._by_session: dict[int, Link] = {}
        self._opening: set[int] = set()  # sessions that wait for `Connected`
        self._by_line: dict[int, Link] = {}
        self._all: list[Link] = []  # also those that are ending
        self._posts: dict[int, tuple[Post, Link | None]] = {}  # by token, until their Completed is told
        self._news: deque[Callable[[], None]] = deque()  # what links told, to be taken in by `poll`
        self._events: list[TransportEvent] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closed = False

    def _make_engine(self, key: str) -> Engine:
        setup = self._setup
        engine = Engine(setup.library, setup.backend, setup.config, key, self._host)
        engine.register(self._regions)
        return engine

    # --- memory ---------------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> None:
        """See `Transport.register`.  Host memory is pinned once for trial, as the engine would abort where it fails."""
        if self._regions:
            raise TransportError("register: called twice, expected once with all regions")
        for index, region in enumerate(regions):
            if region.device not in self.capabilities.devices:
                known = " or ".join(sorted(self.capabilities.devices))
                raise TransportError(f"register: region {index}: device {region.device!r}, expected {known}")
            if region.address <= 0 or region.nbytes <= 0:
                raise TransportError(f"register: region {index}, {region}: expected a positive address and size")
        preflight.check_overlap(regions)
        self._setup.check_memory(regions)
        self._engines.first.register(regions)
        self._regions, self._sizes = tuple(regions), tuple(region.nbytes for region in regions)

    def describe(self) -> Description:
        """See `Transport.describe`.  A peer that knows only MoRI-IO reads the engine's descriptor in it."""
        if not self._regions:
            raise TransportError("describe: nothing is registered, expected register() before")
        engine = self._engines.first
        return Description(_lifeline.append(engine.descriptor.pack(), self._lifeline.port), tuple(engine.memory))

    # --- sessions -------------------------------------------------------------------------------------------------

    def connect(self, peer: Description) -> Session:
        """See `Transport.connect`.  Sessions to one engine share one link, as they share queue pairs."""
        packed, port = _lifeline.separate(peer.engine)
        decoded = PeerEngine.decode(self._setup.library, packed, peer.regions)
        self._check_peer(decoded)
        session = Session(next(_session_ids))
        link = self._links.get(decoded.key)
        if link is not None and link.peer != decoded:  # a peer whose keys do not tell its processes apart (upstream's)
            link.supersede()
        if link is None or not link.join_session(session.id):
            address = None if port is None else _lifeline.Address(str(decoded.engine.host), port)
            reports = Reports(self._report_opened, self._report_ended, self._report_lost, self._report_finished)
            link = Link(decoded, address, self._engines, self._setup.limits, self._clock, reports)
            link.join_session(session.id)
            self._links[decoded.key] = link
            self._all = [one for one in self._all if one.alive] + [link]
            link.start()
        if link.is_open:
            self._tell(Connected(session))
        else:
            self._opening.add(session.id)
        self._by_session[session.id] = link
        return session

    def _check_peer(self, peer: PeerEngine) -> None:
        try:
            ipaddress.IPv4Address(str(peer.engine.host))
        except ValueError:
            raise PeerRefusedError(f"engine {peer.key!r}: host {peer.engine.host!r}, expected dotted IPv4") from None
        if not self._setup.one_node:
            if not 0 < peer.engine.port < 65536:
                raise PeerRefusedError(f"engine {peer.key!r}: port {peer.engine.port}, expected within 1..65535")
        elif peer.engine.node_id != self._engines.first.descriptor.node_id:
            raise PeerRefusedError(f"engine {peer.key!r} is on another host; backend xgmi serves one host, use rdma")

    def disconnect(self, session: Session) -> None:
        """See `Transport.disconnect`."""
        link = self._by_session.pop(session.id, None)
        self._opening.discard(session.id)
        if link is not None:
            for post, _ in list(self._posts.values()):
                if post.session == session.id:
                    link.stop(post, Outcome.CANCELLED, "disconnected")
            link.leave(session.id)

    # --- posts ----------------------------------------------------------------------------------------------------

    def post(self, token: int, session: Session, direction: Direction, plan: TransferPlan, not_after: float) -> None:
        """See `Transport.post`; for `not_after` see the package's docstring.

        REFUSED, when the engine's send queue was full, may have moved some of the bytes already; the same post may be
        repeated, as the contract says.
        """
        if token in self._posts:
            raise TransportError(f"post: token {token} is in use, expected one whose post has ended")
        link = self._by_session.get(session.id)
        if link is None:
            self._tell(Completed(token, Outcome.FAILED, reason=f"session {session.id} is not connected"))
            return
        limits = self._setup.limits
        try:
            batches = _batches.cut(
                plan, self._sizes, link.peer.sizes, min(_MAX_BATCH_OPS, limits.queue_ops), limits.window_bytes // 4
            )
        except TransportError as error:
            self._tell(Completed(token, Outcome.FAILED, reason=str(error)))
            return
        post = Post(token, session.id, direction is Direction.WRITE, not_after, deque(batches))
        self._posts[token] = post, link
        link.submit(post)

    def release(self, token: int) -> None:
        """See `Transport.release`.  At most a window of batches is still under way."""
        post, link = self._posts.get(token, (None, None))
        if post is not None and link is not None:
            link.stop(post, Outcome.CANCELLED, "released")

    # --- events ---------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """See `Transport.fileno`."""
        return self._epoll.fileno()

    def poll(self) -> list[TransportEvent]:
        """See `Transport.poll`."""
        if not self._closed:
            for fd, _ in self._epoll.poll(0):
                if fd == self._wake:
                    os.eventfd_read(self._wake)  # before the news are read: later ones wake us again
                elif self._by_line[fd].look():
                    del self._by_line[fd]
                    self._epoll.unregister(fd)
        while self._news:
            self._news.popleft()()
        events, self._events = self._events, []
        return events

    def _tell(self, event: TransportEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._wake, 1)

    def _report(self, news: Callable[[], None]) -> None:
        """Called by links on any thread."""
        self._news.append(news)
        os.eventfd_write(self._wake, 1)

    def _report_opened(self, link: Link) -> None:
        self._report(lambda: self._opened(link))

    def _report_ended(self, post: Post) -> None:
        self._report(lambda: self._ended(post))

    def _report_finished(self, link: Link) -> None:
        self._report(lambda: self._finished(link))

    def _report_lost(self, link: Link, reason: str, proven: bool) -> None:
        self._report(lambda: self._lost(link, reason, proven=proven))

    def _opened(self, link: Link) -> None:
        if link.line is not None and not self._closed:
            self._by_line[link.line.fileno()] = link
            self._epoll.register(link.line, select.EPOLLIN)
        for session in [one for one in self._opening if self._by_session.get(one) is link]:
            self._opening.remove(session)
            self._events.append(Connected(Session(session)))

    def _ended(self, post: Post) -> None:
        del self._posts[post.token]
        self._events.append(Completed(post.token, post.outcome, post.moved, post.reason))

    def _lost(self, link: Link, reason: str, *, proven: bool) -> None:
        for session in [number for number, one in self._by_session.items() if one is link]:
            del self._by_session[session]
            self._opening.discard(session)
            _log.info("session %d with engine %s is lost: %s", session, link.peer.key, reason)
            self._events.append(SessionLost(Session(session), reason, proven))

    def _finished(self, link: Link) -> None:
        if link.line is not None:
            if self._by_line.pop(link.line.fileno(), None) is not None and not self._closed:
                self._epoll.unregister(link.line)
            link.line.close()

    # --- end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Transport.close`.

        A batch that the card does not end within 10 s is not quiet: its post is not told, its engine stays, and peers
        hear of our end only from the kernel, when the process ends.
        """
        if self._closed:
            return
        self._closed = True
        for session in list(self._by_session):
            self.disconnect(Session(session))
        deadline = time.monotonic() + _QUIET_S
        stuck = [link for link in self._all if not link.join(max(0.0, deadline - time.monotonic()))]
        if stuck:
            _log.error("%d connections do not get quiet; their engines are left running", len(stuck))
            _keep_for_ever(self)
            return
        for link in self._all:
            if link.line is not None:
                link.line.close()
        self._engines.close()
        self._lifeline.close()
        self._epoll.close()
        os.close(self._wake)


def _keep_for_ever(owner: object) -> None:
    """The engine's threads use what this object holds, also while the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
