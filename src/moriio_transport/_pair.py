"""What the conformance suite is made of: a pair of transports with memory, and a listener for events."""

from __future__ import annotations

import contextlib
import multiprocessing
import select
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from moriio_proto.geometry import TransferPlan
from moriio_transport.base import (
    Completed,
    Connected,
    Description,
    Direction,
    Region,
    Session,
    SessionLost,
    Transport,
    TransportEvent,
)
from moriio_transport.registry import load_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection

__all__ = [
    "Listener",
    "LocalTarget",
    "Memory",
    "Pair",
    "ProcessTarget",
    "Target",
    "allocate",
    "open_transport",
    "plan_of",
]

_HANG_S = 30.0

Memory = list[npt.NDArray[np.uint8]]
Run = tuple[int, int, int, int, int]  # local region and offset, remote region and offset, nbytes


def plan_of(runs: Sequence[Run]) -> TransferPlan:
    """A plan from (local region, local offset, remote region, remote offset, nbytes) of each run."""
    columns = list(zip(*runs, strict=True)) or [()] * 5
    kinds = (np.int32, np.uint64, np.int32, np.uint64, np.uint64)
    return TransferPlan(*(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))


class Target(Protocol):
    """The passive side of a pair; never called by the transport under test."""

    description: Description

    def read(self, region: int, offset: int, nbytes: int) -> bytes:
        """Bytes of its memory."""

    def write(self, region: int, offset: int, data: bytes) -> None:
        """Change its memory."""

    def shut(self) -> None:
        """Close its transport, and keep its memory for `read`."""

    def close(self) -> None:
        """Close everything."""


class Listener:
    """Collects the events of a transport, waiting on its file descriptor alone."""

    def __init__(self, transport: Transport) -> None:
        self.events: list[TransportEvent] = []
        self._transport = transport
        self._poll = select.poll()
        self._poll.register(transport.fileno(), select.POLLIN)

    def until(self, enough: Callable[[list[TransportEvent]], bool]) -> list[TransportEvent]:
        """Wait until `enough(all events so far)`; fails where nothing comes for long."""
        deadline = time.monotonic() + _HANG_S
        while not enough(self.events):
            left = deadline - time.monotonic()
            assert left > 0, f"no further event; so far {self.events}"
            if self._poll.poll(left * 1e3):
                self.events += self._transport.poll()
        return self.events

    def ends(self, *tokens: int) -> list[Completed]:
        """Wait until each token has ended; fails where one ended twice."""
        self.until(lambda events: set(tokens) <= {e.token for e in events if isinstance(e, Completed)})
        completed = [e for e in self.events if isinstance(e, Completed)]
        twice = [token for token, times in Counter(e.token for e in completed).items() if times > 1]
        assert not twice, f"tokens that ended twice: {twice}"
        by_token = {e.token: e for e in completed}
        return [by_token[token] for token in tokens]


@attrs.frozen
class Pair:
    """An initiator under test with its memory, and a target to copy to and from."""

    initiator: Transport
    memory: Memory
    target: Target
    listener: Listener

    def connect(self) -> Session:
        """A connected session to the target."""
        session = self.initiator.connect(self.target.description)
        assert self.connected(session), self.listener.events
        return session

    def connected(self, session: Session) -> bool:
        """Wait until `connect` has ended; whether it ended well."""
        ends = (Connected, SessionLost)
        self.listener.until(lambda events: any(isinstance(e, ends) and e.session == session for e in events))
        return Connected(session) in self.listener.events

    def post(self, token: int, session: Session, plan: TransferPlan, direction: Direction = Direction.WRITE) -> None:
        """Post without a time limit."""
        self.initiator.post(token, session, direction, plan, time.monotonic() + 3600)

    def copy(self, session: Session, plan: TransferPlan, direction: Direction = Direction.WRITE) -> Completed:
        """Post and wait for the end; the token is used for nothing else."""
        token = 1_000_000 + len(self.listener.events)
        self.post(token, session, plan, direction)
        return self.listener.ends(token)[0]

    def remote(self, region: int = 0) -> npt.NDArray[np.uint8]:
        """All bytes of a target region as large as ours of that index."""
        return np.frombuffer(self.target.read(region, 0, len(self.memory[region])), np.uint8)


def allocate(sizes: Sequence[int]) -> Memory:
    """Zeroed regions of these sizes, in bytes."""
    return [np.zeros(size, np.uint8) for size in sizes]


def open_transport(backend: str, key: str, options: Mapping[str, Any], memory: Memory) -> Transport:
    """A transport of a backend, with this memory registered and `options` over its defaults."""
    plugin = load_transport(backend)
    transport = plugin.create(engine_key=key, host="127.0.0.1", options={**plugin.options, **options})
    transport.register([Region(array.ctypes.data, array.nbytes) for array in memory])
    return transport


class LocalTarget:
    """A target in this process; arguments as of `open_transport`."""

    def __init__(
        self, backend: str, options: Mapping[str, Any], sizes: Sequence[int], key: str = "conformance-target"
    ) -> None:
        self._memory = allocate(sizes)
        self._transport = open_transport(backend, key, options, self._memory)
        self.description = self._transport.describe()

    def read(self, region: int, offset: int, nbytes: int) -> bytes:
        """See `Target.read`."""
        return self._memory[region][offset : offset + nbytes].tobytes()

    def write(self, region: int, offset: int, data: bytes) -> None:
        """See `Target.write`."""
        self._memory[region][offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def shut(self) -> None:
        """See `Target.shut`."""
        self._transport.close()

    def close(self) -> None:
        """See `Target.close`."""
        self._transport.close()


def _serve(pipe: Connection, backend: str, options: Mapping[str, Any], sizes: Sequence[int], key: str) -> None:
    """The child process of `ProcessTarget`: answers (method, arguments) until None."""
    target = LocalTarget(backend, options, sizes, key)
    pipe.send(target.description)
    while (order := pipe.recv()) is not None:
        method, arguments = order
        pipe.send(getattr(target, method)(*arguments))
    target.close()


class ProcessTarget:
    """A target in a child process, which can be killed."""

    def __init__(
        self, backend: str, options: Mapping[str, Any], sizes: Sequence[int], key: str = "conformance-target"
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, backend, options, sizes, key), daemon=True)
        self._process.start()
        theirs.close()
        self.description: Description = self._pipe.recv()

    def _ask(self, method: str, *arguments: object) -> Any:
        self._pipe.send((method, arguments))
        return self._pipe.recv()

    def read(self, region: int, offset: int, nbytes: int) -> bytes:
        """See `Target.read`."""
        data: bytes = self._ask("read", region, offset, nbytes)
        return data

    def write(self, region: int, offset: int, data: bytes) -> None:
        """See `Target.write`."""
        self._ask("write", region, offset, data)

    def shut(self) -> None:
        """See `Target.shut`."""
        self._ask("shut")

    def kill(self) -> None:
        """SIGKILL; does not wait."""
        self._process.kill()

    def close(self) -> None:
        """See `Target.close`; reaps the child."""
        with contextlib.suppress(BrokenPipeError):  # killed by the test
            self._pipe.send(None)
        self._process.join()
        self._pipe.close()
        self._process.close()
