"""The registration process: pings the router for one instance, whatever the worker is doing.

Started by `moriio_vllm.registrar.Registrar` as `python -m moriio_vllm._registrar_main ORDER`.  It is a process and not
a thread because model code holds the worker's interpreter lock for longer than the router's patience.  It imports
neither torch nor vLLM.  It ends with its worker: at the end of its standard input, or when the worker's pidfd says
so (a sibling forked from the worker may keep the pipe open).

The router's socket is told to keep nothing for a router that is not connected (`IMMEDIATE`), so a refused ping is
the news that the router is out of reach, a socket that turns writable is the news that it is back, and no stale
pings come in a burst.  libzmq resolves the router's name again for every attempt to connect.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import time
from collections import deque

import attrs
import zmq

from moriio_proto.machines.registration import (
    AwaitRouter,
    Entered,
    Probe,
    R,
    Registration,
    RegistrationEffect,
    SendPing,
)

__all__ = ["GET_META", "Order", "main"]

GET_META = b"get_meta_msg"  # as in moriio_proto.wire.messages, whose imports this process does not need

_log = logging.getLogger("moriio.registrar")

_STDIN = 0


@attrs.frozen
class Order:
    """What the worker orders; travels as the one command-line argument, in JSON.

    Times are in seconds.  `worker_pid` is the process with which this one ends.
    """

    router: str
    ping: bytes
    ranks: tuple[str, ...]  # ZeroMQ addresses of every rank's handshake port
    ping_interval: float
    probe_interval: float
    forget_after: float
    worker_pid: int

    def to_json(self) -> str:
        """The argument of the process."""
        return json.dumps({**attrs.asdict(self), "ping": self.ping.hex()})

    @classmethod
    def from_json(cls, text: str) -> Order:
        """The order that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "ping": bytes.fromhex(fields["ping"]), "ranks": tuple(fields["ranks"])})


def _dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A DEALER that reconnects for ever and notices a peer that vanished without a word."""
    sock = context.socket(zmq.DEALER)
    options = {
        zmq.LINGER: 0,
        zmq.IPV6: 1,
        zmq.RECONNECT_IVL: 100,  # ms, doubled after each failure up to:
        zmq.RECONNECT_IVL_MAX: 1000,
        zmq.CONNECT_TIMEOUT: 3000,  # ms; the kernel's own limit is minutes
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 5,  # s
        zmq.TCP_KEEPALIVE_INTVL: 2,  # s
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.TCP_MAXRT: 5000,  # ms that a sent ping may stay unacknowledged
        zmq.IMMEDIATE: 1,
        zmq.SNDHWM: 1,
    }
    for option, value in options.items():
        sock.setsockopt(option, value)
    sock.connect(address)
    return sock


class _Driver:
    """One poll over the worker, the ranks and the router; all decisions are the machine's."""

    def __init__(self, order: Order, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._order = order
        self._context = context
        self._machine = Registration.of(
            len(order.ranks),
            ping_interval=order.ping_interval,
            probe_interval=order.probe_interval,
            forget_after=order.forget_after,
        )
        self._router = _dealer(context, order.router)
        self._probes: dict[int, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(_STDIN, zmq.POLLIN)

    def run(self) -> None:
        """Until the worker closes, drains or dies."""
        worker = self._open_worker()
        while self._machine.state is not R.CLOSED:
            for ready, _ in self._poller.poll(self._timeout_ms()):
                if ready == _STDIN:
                    self._on_command(os.read(_STDIN, 4096))
                elif ready == worker:
                    self._fire("cmd_close")
                elif ready is self._router:
                    self._poller.unregister(self._router)
                    self._fire("cq_writable")
                else:
                    self._on_answer(ready)
            self._apply(self._machine.due(time.monotonic()))

    def _open_worker(self) -> int:
        """A descriptor that turns readable when the worker dies, polled from now on; -1 without pidfd."""
        try:
            worker = os.pidfd_open(self._order.worker_pid)
        except OSError as error:  # an old kernel or a sandbox: the end of standard input remains
            _log.warning("no pidfd of the worker (%s): ending at the end of standard input only", error)
            return -1
        if os.getppid() != self._order.worker_pid:  # it died before we looked, and its id may be another's by now
            self._fire("cmd_close")
        self._poller.register(worker, zmq.POLLIN)
        return worker

    def _timeout_ms(self) -> int | None:
        left = self._machine.deadline - time.monotonic()
        if left <= 0:
            return 0
        return None if left == math.inf else math.ceil(left * 1000)

    def _fire(self, trigger: str, rank: int = -1) -> None:
        self._apply(self._machine.handle(trigger, time.monotonic(), rank))

    def _apply(self, effects: list[RegistrationEffect]) -> None:
        """Carry out effects and those of their outcomes, in order."""
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            if isinstance(effect, SendPing):
                todo.extend(self._machine.handle(self._send(), time.monotonic()))
            elif isinstance(effect, Probe):
                self._probe(effect.rank)
            elif isinstance(effect, AwaitRouter):
                _log.warning("no connection to router %s: registering as soon as there is one", self._order.router)
                self._poller.register(self._router, zmq.POLLOUT)
            else:
                self._report(effect)

    def _send(self) -> str:
        try:
            self._router.send(self._order.ping, zmq.NOBLOCK)
        except zmq.Again:
            return "cq_refused"
        return "cq_sent"

    def _probe(self, rank: int) -> None:
        if rank in self._probes:
            _log.warning("not registered yet: no handshake answer from %s; asking again", self._order.ranks[rank])
        self._forget(rank)
        sock = _dealer(self._context, self._order.ranks[rank])
        sock.setsockopt(zmq.IMMEDIATE, 0)
        self._probes[rank] = sock
        self._poller.register(sock, zmq.POLLIN)
        sock.send(GET_META)

    def _forget(self, rank: int) -> None:
        sock = self._probes.pop(rank, None)
        if sock is not None:
            self._poller.unregister(sock)
            sock.close(0)

    def _on_answer(self, sock: object) -> None:
        rank = next((r for r, probe in self._probes.items() if probe is sock), None)
        if rank is None:  # closed by an earlier event of the same poll
            return
        frames = self._probes[rank].recv_multipart()
        if len(frames) != 2 or frames[0]:
            _log.warning("%s answered, but not as a rank does", self._order.ranks[rank])
            return
        self._forget(rank)
        self._fire("recv_listening", rank)

    def _on_command(self, data: bytes) -> None:
        self._fire("cmd_drain" if data.startswith(b"drain") else "cmd_close")

    def _report(self, entered: Entered) -> None:
        if entered.state is R.REGISTERED:
            _log.info("registered with router %s", self._order.router)
        elif entered.state is R.DRAINING:
            _log.info("draining: no more pings to router %s", self._order.router)


def main(argv: list[str]) -> int:
    """Run one order.  Returns 0 when closed, drained or bereft of its worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; this process ends with its worker
    shape = "%(levelname)s %(asctime)s [moriio registrar] %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=shape)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        _Driver(Order.from_json(argv[1]), context).run()
    finally:
        context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
