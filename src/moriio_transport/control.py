"""The control channel: handshake and notify ports of one rank, over ZeroMQ as deployed peers speak it.

Two ROUTER sockets are bound when it is made: a taken port fails there, by name.  Peers are reached through one DEALER
per notify port.  Its identity is made of our instance token, so that a peer's answers find us again after a
reconnect.  A dial is a DEALER of its own: one frame out, two messages back, closed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import attrs
import zmq

from moriio_proto.errors import ConfigurationError, ParameterError
from moriio_proto.events import Endpoint
from moriio_proto.wire.addresses import tcp_endpoint
from moriio_proto.wire.messages import GET_META

__all__ = ["Frame", "HelloAnswer", "Inbound", "ZmqControl"]

log = logging.getLogger(__name__)

HEARTBEAT_MS = 5_000  # ZMTP ping on idle connections: a middlebox that dropped one is noticed
HEARTBEAT_TIMEOUT_MS = 15_000
QUEUED_FRAMES = 1_000  # to a peer that does not read; more are dropped, and resent by the core
MAX_SOCKETS = 8_192  # ranks that we talk to at one time; the process may have fewer file descriptors
MAX_FRAME = 1 << 23  # larger messages end the connection before they are in memory
FRAMES_PER_TURN = 256  # of one socket, so that one busy peer cannot starve the rest


class Frame(NamedTuple):
    """A notify frame and the way back."""

    data: bytes
    route: object


class HelloAnswer(NamedTuple):
    """The two messages that answer a dial."""

    endpoint: Endpoint
    first: bytes
    second: bytes


Inbound = Frame | HelloAnswer


class _PeerRoute(NamedTuple):
    """The way back to a peer that wrote to our notify port."""

    identity: bytes


class _OwnRoute(NamedTuple):
    """The way back to a peer that answered on a connection of ours."""

    endpoint: Endpoint


@attrs.define(eq=False)
class _Dial:
    socket: zmq.Socket[bytes]
    endpoint: Endpoint
    payloads: list[bytes] = attrs.field(factory=list)


class ZmqControl:
    """Sockets of one rank.  Used by one thread; `dial`, `send` and `reply` never block.

    Raises:
        ConfigurationError: a port is taken, or the address is not ours.
    """

    def __init__(
        self, *, bind_host: str, handshake_port: int, notify_port: int, token: str, hello: tuple[bytes, bytes]
    ) -> None:
        self._hello = hello
        self._token = token
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._dealers: dict[Endpoint, zmq.Socket[bytes]] = {}
        self._dials: dict[Endpoint, _Dial] = {}
        self._by_socket: dict[zmq.Socket[bytes], Endpoint | _Dial] = {}
        self.poller = zmq.Poller()
        self.dropped_frames = 0
        try:
            self._handshake = self._bind(bind_host, "handshake_port", handshake_port)
            self._notify = self._bind(bind_host, "notify_port", notify_port)
        except ConfigurationError:
            self.close()
            raise

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0), (zmq.SNDHWM, QUEUED_FRAMES), (zmq.MAXMSGSIZE, MAX_FRAME), (zmq.IPV6, 1),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS), (zmq.TCP_KEEPALIVE, 1),
            (zmq.RECONNECT_IVL, 50), (zmq.RECONNECT_IVL_MAX, 2_000),
        ):  # fmt: skip
            socket.setsockopt(option, value)
        return socket

    def _bind(self, host: str, key: str, port: int) -> zmq.Socket[bytes]:
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnected peer takes its identity over
        try:
            socket.bind(f"tcp://*:{port}" if host == "*" else tcp_endpoint(host, port))
        except zmq.ZMQError as e:
            socket.close()
            raise ConfigurationError(key, port, f"a free port on {host} ({e.strerror})") from e
        self.poller.register(socket, zmq.POLLIN)
        return socket

    # --- out ------------------------------------------------------------------------------------------------------

    def dial(self, endpoint: Endpoint) -> None:
        """Ask a handshake port for its hello; replaces a dial under way."""
        self._hang_up(endpoint)
        socket = self._dealer(endpoint.host, endpoint.handshake_port)
        if socket is None:
            return
        self._dials[endpoint] = self._by_socket[socket] = _Dial(socket, endpoint)
        self.poller.register(socket, zmq.POLLIN)
        self._try_send(socket, [GET_META])

    def send(self, endpoint: Endpoint, frame: bytes) -> None:
        """To a notify port; dropped when the peer's queue is full."""
        socket = self._dealers.get(endpoint)
        if socket is None:
            identity = f"{self._token}>{endpoint.notify_port}".encode()[:255]
            socket = self._dealer(endpoint.host, endpoint.notify_port, identity)
            if socket is None:
                return
            self._dealers[endpoint] = socket
            self._by_socket[socket] = endpoint
            self.poller.register(socket, zmq.POLLIN)
        self._try_send(socket, [frame])

    def reply(self, route: object, frame: bytes) -> None:
        """On the connection that `route` names; dropped when it is gone."""
        if isinstance(route, _OwnRoute):
            self.send(route.endpoint, frame)
        elif isinstance(route, _PeerRoute):
            self._try_send(self._notify, [route.identity, frame])

    def _dealer(self, host: str, port: int, identity: bytes = b"") -> zmq.Socket[bytes] | None:
        """A socket to a peer; None, which its senders take for lost frames, when there can be none."""
        socket = None
        try:
            socket = self._socket(zmq.DEALER)
            if identity:
                socket.setsockopt(zmq.IDENTITY, identity)
            socket.connect(tcp_endpoint(host, port))  # names stay names: resolved again at every reconnect
        except (ParameterError, zmq.ZMQError) as e:  # no such host, or no file descriptor left
            log.warning("%s:%d cannot be reached: %s", host, port, e)
            if socket is not None:
                socket.close()
            return None
        return socket

    def _try_send(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> bool:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:  # full queue or peer gone: a lost frame, which every sender here provides for
            self.dropped_frames += 1
            return False
        return True

    # --- in -------------------------------------------------------------------------------------------------------

    def receive(self, ready: zmq.Socket[bytes]) -> Iterator[Inbound]:
        """What a readable socket of `poller` holds, at most `FRAMES_PER_TURN` messages."""
        for _ in range(FRAMES_PER_TURN):
            try:
                frames = ready.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:  # EAGAIN: read empty
                return
            if ready is self._handshake:
                self._answer_dial(frames)
            elif ready is self._notify:
                yield Frame(frames[-1], _PeerRoute(frames[0]))
            else:
                yield from self._on_own(ready, frames)
                if ready.closed:
                    return

    def _answer_dial(self, frames: list[bytes]) -> None:
        if frames[-1] != GET_META:
            log.warning("handshake port: frame %r refused, expected %r", frames[-1][:32], GET_META)
            return
        for payload in self._hello:
            self._try_send(self._handshake, [frames[0], b"", payload])

    def _on_own(self, ready: zmq.Socket[bytes], frames: list[bytes]) -> Iterator[Inbound]:
        owner = self._by_socket.get(ready)
        if isinstance(owner, _Dial):
            owner.payloads.append(frames[-1])
            if len(owner.payloads) == 2:
                self._hang_up(owner.endpoint)
                yield HelloAnswer(owner.endpoint, *owner.payloads)
        elif owner is not None:
            yield Frame(frames[-1], _OwnRoute(owner))

    def _hang_up(self, endpoint: Endpoint) -> None:
        dial = self._dials.pop(endpoint, None)
        if dial is not None:
            self._drop(dial.socket)

    def _drop(self, socket: zmq.Socket[bytes]) -> None:
        self._by_socket.pop(socket, None)
        self.poller.unregister(socket)
        socket.close()

    def forget(self, endpoint: Endpoint) -> None:
        """Close the connections to a peer that is not needed any more."""
        self._hang_up(endpoint)
        socket = self._dealers.pop(endpoint, None)
        if socket is not None:
            self._drop(socket)

    def close(self) -> None:
        """Close all sockets; frames not sent yet are lost."""
        self._context.destroy(linger=0)
