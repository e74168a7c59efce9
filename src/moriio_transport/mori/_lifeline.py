"""A lifeline: a TCP connection on which a transport names itself, then says nothing, and that ends with its process.

The engine notices a dead peer only when a transfer to it fails, and a stopped one not before 5 s in which our
interpreter stands still.  The lifeline closes both holes: who answers with the right key lives and runs; whose
kernel ends the connection, or refuses a new one, is gone.  It is announced behind the engine's descriptor, where
peers that do not know it do not look.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from typing import Final

import attrs

from moriio_transport.base import TransportError

__all__ = ["ENDED", "Address", "Lifeline", "PeerGoneError", "append", "dial", "ended", "has_gone", "refuses",
           "separate"]  # fmt: skip

ANSWER_S: Final = 5.0  # a live process answers in microseconds; the engine's own handshake gives up after as long
QUESTION_S: Final = 1.0  # after an error: who does not answer so fast counts as not proven
_MAGIC: Final = b"moriio-lifeline1"
_TAIL: Final = struct.Struct(f"<H{len(_MAGIC)}s")  # port, magic: the last bytes of the description
_LENGTH: Final = struct.Struct("<H")
ENDED: Final = "the peer's process has ended"


class PeerGoneError(TransportError):
    """The process, or its transport, is proven to be gone."""


@attrs.frozen
class Address:
    """Where a lifeline listens."""

    host: str
    port: int


def append(engine: bytes, port: int) -> bytes:
    """The engine's descriptor with our port behind it."""
    return engine + _TAIL.pack(port, _MAGIC)


def separate(description: bytes) -> tuple[bytes, int | None]:
    """The engine's descriptor, and the port where the peer has a lifeline."""
    if len(description) > _TAIL.size:
        port, magic = _TAIL.unpack(description[-_TAIL.size :])
        if magic == _MAGIC:
            return description[: -_TAIL.size], port
    return description, None


def dial(address: Address, key: str, timeout: float = ANSWER_S) -> socket.socket:
    """A connection to the lifeline of the engine `key`, which has answered.

    Raises:
        PeerGoneError: nobody listens there, or somebody else.
        TransportError: it cannot be reached, or is stopped.
    """
    where = f"lifeline {address.host}:{address.port}"
    try:
        line = socket.create_connection((address.host, address.port), timeout)
    except ConnectionRefusedError as error:
        raise PeerGoneError(f"{where}: nobody listens, the peer's process has ended") from error
    except OSError as error:
        raise TransportError(f"{where} cannot be reached: {error}") from error
    try:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        length = _LENGTH.unpack(_receive(line, _LENGTH.size))[0]
        found = _receive(line, length).decode("utf-8", "replace")
    except TimeoutError as error:
        line.close()
        raise TransportError(f"{where}: no answer in {timeout:g} s, the peer's process is stopped or busy") from error
    except OSError as error:
        line.close()
        raise TransportError(f"{where}: {error}") from error
    if found != key:
        line.close()
        raise PeerGoneError(f"{where}: engine {found!r} answers, expected {key!r}, which has ended")
    line.setblocking(False)
    return line


def _receive(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = line.recv(count - len(data))
        if not more:
            raise ConnectionResetError("closed before it named itself")
        data += more
    return data


def has_gone(address: Address, key: str) -> bool:
    """Ask again after an error: whether the process is proven to be gone; False where it lives or does not answer."""
    for _ in range(2):  # a process that is just dying takes the connection and resets it; then nobody listens
        try:
            dial(address, key, QUESTION_S).close()
        except PeerGoneError:
            return True
        except TransportError:
            continue
        return False
    return False


def refuses(address: Address) -> bool:
    """Whether nobody listens where an engine without a lifeline did; False where nothing is proven."""
    try:
        socket.create_connection((address.host, address.port), QUESTION_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def ended(line: socket.socket) -> str | None:
    """Why a readable line is over: `ENDED` is proof, another text is none; None where it goes on."""
    try:
        return ENDED if line.recv(64) == b"" else None
    except BlockingIOError:
        return None
    except OSError as error:
        return f"the way to the peer is broken: {error}"


class Lifeline:
    """Names this transport to whoever connects, in a thread of its own, until `close`.

    Args:
        host: IPv4 address under which peers reach us.
        key: of our first engine.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, host: str, key: str) -> None:
        self._greeting = _LENGTH.pack(len(key.encode())) + key.encode()
        self._listener = socket.create_server((host, 0), backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._stop = socket.socketpair()
        self._lines: dict[int, socket.socket] = {}
        self._thread = threading.Thread(target=self._serve, name="moriio-lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every line: from here on peers know that nothing of this transport lives."""
        self._stop.close()
        self._thread.join()

    def _serve(self) -> None:
        with select.epoll() as poll, contextlib.closing(self._wake), contextlib.closing(self._listener):
            poll.register(self._wake, select.EPOLLIN)
            poll.register(self._listener, select.EPOLLIN)
            while True:
                ready = [fd for fd, _ in poll.poll()]
                if self._wake.fileno() in ready:
                    break
                for fd in ready:
                    if fd == self._listener.fileno():
                        self._accept(poll)
                    else:
                        self._hear(fd)
            for line in self._lines.values():
                line.close()

    def _accept(self, poll: select.epoll) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError:  # it has gone again, or we are out of descriptors: the peer tries again
            return
        line.setblocking(False)
        try:
            line.send(self._greeting)  # a new socket's buffer holds it
        except OSError:
            line.close()
            return
        self._lines[line.fileno()] = line
        poll.register(line, select.EPOLLIN)

    def _hear(self, fd: int) -> None:
        """A peer has left; or talks, which none of ours does."""
        with contextlib.suppress(OSError):
            if self._lines[fd].recv(4096):
                return
        self._lines.pop(fd).close()
