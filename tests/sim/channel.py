"""The control channel of a simulated node: what `ZmqControl` does, over the fake network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import attrs

from moriio_proto.events import Endpoint
from moriio_proto.wire.messages import GET_META

if TYPE_CHECKING:
    from moriio_proto.testing.network import FakeNetwork
    from moriio_transport.driver import Driver

__all__ = ["Directory", "FakeControl"]


class _Host(Protocol):
    """Who the channel belongs to: it may be stopped, or dead."""

    alive: bool

    def perform(self, action: Callable[[Driver, float], None]) -> None:
        """Give the driver something, now or when the process goes on."""


@attrs.frozen
class _PeerRoute:
    """The way back to a process that wrote to our notify port; ends with that process."""

    control: FakeControl


@attrs.frozen
class _OwnRoute:
    """The way back to a peer that answered on a connection of ours: to its address, whoever is there."""

    endpoint: Endpoint


class Directory(dict[str, "FakeControl"]):
    """Which process listens on a host now; each simulated host has one rank."""


class FakeControl:
    """Frames of one process; the methods are those of `moriio_transport.driver.Control`."""

    def __init__(
        self, host: _Host, network: FakeNetwork, directory: Directory, endpoint: Endpoint, hello: tuple[bytes, bytes]
    ) -> None:
        self.host, self.endpoint, self.hello = host, endpoint, hello
        self._network, self._directory = network, directory
        self._dials: dict[Endpoint, int] = {}
        self._dialled = 0
        directory[endpoint.host] = self

    def dial(self, endpoint: Endpoint) -> None:
        """See `Control.dial`."""
        self._dialled += 1
        number = self._dials[endpoint] = self._dialled
        self._network.carry(
            self.endpoint.host, endpoint.host, (GET_META,), lambda frames: self._asked(endpoint, number, frames)
        )

    def forget(self, endpoint: Endpoint) -> None:
        """See `Control.forget`."""
        self._dials.pop(endpoint, None)

    def send(self, endpoint: Endpoint, frame: bytes) -> None:
        """See `Control.send`."""
        route = _PeerRoute(self)

        def arrive(frames: tuple[bytes, ...]) -> None:
            there = self._directory.get(endpoint.host)
            if there is not None and there.endpoint.notify_port == endpoint.notify_port:
                there.take(frames[0], route)

        self._network.carry(self.endpoint.host, endpoint.host, (frame,), arrive)

    def reply(self, route: object, frame: bytes) -> None:
        """See `Control.reply`."""
        if isinstance(route, _OwnRoute):
            self.send(route.endpoint, frame)
        elif isinstance(route, _PeerRoute):
            there, back = route.control, _OwnRoute(self.endpoint)
            self._network.carry(
                self.endpoint.host, there.endpoint.host, (frame,), lambda frames: there.take(frames[0], back)
            )

    def take(self, frame: bytes, route: object) -> None:
        """A frame arrived; lost when the process is dead."""
        self.host.perform(lambda driver, now: driver.on_notify(frame, route, now))

    def _asked(self, endpoint: Endpoint, number: int, frames: tuple[bytes, ...]) -> None:
        """Our dial arrived at the other end, whose process answers it when it runs."""
        there = self._directory.get(endpoint.host)
        if there is None or there.endpoint.handshake_port != endpoint.handshake_port or frames != (GET_META,):
            return

        def answer(driver: Driver, now: float) -> None:
            self._network.carry(
                endpoint.host, self.endpoint.host, there.hello, lambda frames: self._answered(endpoint, number, frames)
            )

        there.host.perform(answer)

    def _answered(self, endpoint: Endpoint, number: int, frames: tuple[bytes, ...]) -> None:
        if self._dials.get(endpoint) == number:
            del self._dials[endpoint]
            self.host.perform(lambda driver, now: driver.on_hello(endpoint, frames[0], frames[1], now))
