"""The worker's handle on its registration process (`moriio_vllm._registrar_main`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moriio_proto.wire.addresses import tcp_endpoint
from moriio_vllm._registrar_main import Order

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FORGET_AFTER", "PROBE_INTERVAL", "Registrar"]

PROBE_INTERVAL = 5.0  # seconds after which a rank that did not answer is asked again
FORGET_AFTER = 6.0  # seconds; vllm-router drops an instance at most 5.1 s after its last ping


class Registrar:
    """One child process that registers this instance with its router for as long as this process lives.

    Start it in the process of global rank 0 once its own caches are registered; it pings only when every rank
    answers.  A router that is down, late or restarted is waited for without limit.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(
        cls,
        *,
        router: tuple[str, int],
        ping: bytes,
        ranks: Sequence[tuple[str, int]],
        ping_interval: float,
        probe_interval: float = PROBE_INTERVAL,
        forget_after: float = FORGET_AFTER,
    ) -> Registrar:
        """Start the process; returns at once.

        Args:
            router: host and port of the router's registration socket.
            ping: the encoded ping, sent as it is.
            ranks: host and handshake port of every rank of the instance, this one included; at least one.
            ping_interval: seconds from one ping to the next.
            probe_interval: seconds after which a rank that did not answer is asked again.
            forget_after: seconds after which the router has forgotten an instance that stopped pinging.

        Raises:
            ParameterError: a host or port that is none.
            OSError: the process could not be started.
        """
        order = Order(
            router=tcp_endpoint(*router),
            ping=ping,
            ranks=tuple(tcp_endpoint(*rank) for rank in ranks),
            ping_interval=ping_interval,
            probe_interval=probe_interval,
            forget_after=forget_after,
            worker_pid=os.getpid(),
        )
        # The child must find this package where we found it, also when only sys.path says where that is.
        source = str(Path(__file__).resolve().parents[1])
        inherited = os.environ.get("PYTHONPATH", "")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (source, inherited)))}
        command = [sys.executable, "-m", "moriio_vllm._registrar_main", order.to_json()]
        process = subprocess.Popen(  # noqa: S603 - our own module with our own argument
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the child runs."""
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """None while it runs, 0 after `close` or a finished `drain`, anything else when it failed (see its log)."""
        return self._process.poll()

    def drain(self) -> None:
        """Stop pinging.  The child ends by itself, with 0, when the router has surely forgotten the instance."""
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):  # it is gone already; returncode says how
            stdin.write(b"drain\n")
            stdin.flush()

    def wait(self, timeout: float) -> int:
        """Wait for the child to end, at most `timeout` seconds.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        return self._process.wait(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """End the child, by force after `timeout` seconds.  Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # an unsent command to a child that is gone
                self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
