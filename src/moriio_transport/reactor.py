"""The one thread of a worker that talks to peers: it waits in one poll, and hands everything to the driver.

    loop:  wait for sockets, the transport's fd, the wake-up fd, or the core's next deadline
           commands of the worker half -> driver;  frames -> driver;  transport events -> driver;  deadline -> driver

Other threads only append to `inbox` and take from `settled`; both are deques, whose operations are atomic.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import zmq

from moriio_proto.effects import Settled
from moriio_proto.events import Event
from moriio_transport.control import Frame, ZmqControl
from moriio_transport.driver import Driver

__all__ = ["Reactor", "ReactorDiedError"]

log = logging.getLogger(__name__)


class ReactorDiedError(RuntimeError):
    """The reactor thread ended by an exception (its cause): this worker cannot transfer any more."""


class Reactor:
    """Runs a driver in a thread of its own until `close`."""

    def __init__(self, driver: Driver, control: ZmqControl, clock: Callable[[], float] = time.monotonic) -> None:
        self._driver, self._control, self._clock = driver, control, clock
        self._inbox: deque[Event] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="moriio-reactor", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    # --- other threads --------------------------------------------------------------------------------------------

    def submit(self, events: Iterable[Event]) -> None:
        """Queue commands; they reach the core in order.

        Raises:
            ReactorDiedError: nobody would carry them out.
        """
        self.check()
        self._inbox.extend(events)
        self._wake()

    def take_settled(self) -> list[Settled]:
        """Verdicts since the last call.

        Raises:
            ReactorDiedError: there will be none any more.
        """
        self.check()
        settled, out = self._driver.settled, []
        while settled:
            out.append(settled.popleft())
        return out

    def check(self) -> None:
        """Raise `ReactorDiedError` if the thread has died."""
        if self._cause is not None:
            raise ReactorDiedError(f"the transfer thread died: {self._cause!r}") from self._cause

    def close(self) -> None:
        """Stop serving, and wait until no copy of ours is under way.  Idempotent; nothing may be submitted after it."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as e:  # the boundary of this thread: its death must reach the worker, which fails loudly
            log.exception("the transfer thread died")
            self._cause = e
        finally:
            self._driver.transport.close()
            self._control.close()

    def _loop(self) -> None:
        driver, poller = self._driver, self._control.poller
        transport_fd = driver.transport.fileno()
        wake_fd = self._wake_fd
        poller.register(transport_fd, zmq.POLLIN)
        poller.register(wake_fd, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(self._timeout_ms()))
            if ready.pop(wake_fd, None):
                os.eventfd_read(wake_fd)  # before the inbox is read: later commands wake us again
            self._obey()
            for source in ready:
                if source == transport_fd:
                    driver.on_transport(self._clock())
                else:
                    self._on_socket(source)
            deadline = driver.core.next_deadline()
            if deadline is not None and deadline <= self._clock():
                driver.tick(self._clock())

    def _obey(self) -> None:
        """Commands go before frames: a peer may answer already what the worker half said before the frame came."""
        if self._inbox:
            self._driver.on_commands(self._take_inbox(), self._clock())

    def _on_socket(self, source: zmq.Socket[bytes]) -> None:
        if source.closed:
            return
        for inbound in self._control.receive(source):
            self._obey()
            if isinstance(inbound, Frame):
                self._driver.on_notify(inbound.data, inbound.route, self._clock())
            else:
                self._driver.on_hello(*inbound, self._clock())

    def _take_inbox(self) -> list[Event]:
        inbox, out = self._inbox, []
        while inbox:
            out.append(inbox.popleft())
        return out

    def _timeout_ms(self) -> int | None:
        deadline = self._driver.core.next_deadline()
        if deadline is None:
            return None
        return max(0, int((deadline - self._clock()) * 1000) + 1)
