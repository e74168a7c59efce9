"""``mori.io`` over process memory: the same names and calls, bytes moved by this project's loopback transport.

Descriptors are those of the loopback transport's compatibility form, so a peer that uses backend ``loopback`` with
``mori_compat`` and a peer that uses this package reach each other.  As in the library a transfer is asynchronous: the
call returns a status that one thread of the engine completes.
"""

from __future__ import annotations

import enum
import itertools
import math
import os
import select
import threading
from collections import deque

import msgspec
import numpy as np

from moriio_proto.geometry import TransferPlan
from moriio_transport.base import Completed, Connected, Description, Direction, Outcome, Region, TransportError
from moriio_transport.loopback import LoopbackTransport, MoriName
from moriio_transport.loopback._mori import pack_region


class BackendType(enum.IntEnum):
    """Kinds of backend; here they make no difference."""

    XGMI = 1
    RDMA = 2


class PollCqMode(enum.IntEnum):
    """How completions are found; here it makes no difference."""

    POLLING = 0
    EVENT = 1


class StatusCode(enum.IntEnum):
    """The codes that a transfer can have here."""

    SUCCESS = 0
    IN_PROGRESS = 2
    ERR_RDMA_OP = 13


class RdmaBackendConfig:
    """Takes and ignores the knobs."""

    def __init__(self, *knobs, **named):
        self.knobs = knobs, named


XgmiBackendConfig = RdmaBackendConfig


class IOEngineConfig:
    """Where peers reach the engine."""

    def __init__(self, host="", port=0):
        self.host, self.port = host, port


class _Desc:
    """A packed descriptor and its fields."""

    def __init__(self, packed):
        self._packed = packed
        self._fields = msgspec.msgpack.decode(packed)

    def pack(self):
        """The bytes that a peer unpacks."""
        return self._packed

    @classmethod
    def unpack(cls, packed):
        """The inverse of `pack`."""
        return cls(packed)


class EngineDesc(_Desc):
    """Who an engine is."""

    @property
    def key(self):
        """The engine's name."""
        return self._fields[0]


class MemoryDesc(_Desc):
    """Where a piece of memory is."""

    @property
    def engine_key(self):
        """The engine that registered it."""
        return self._fields[0]

    @property
    def data(self):
        """Its address."""
        return self._fields[4]

    @property
    def size(self):
        """Its bytes."""
        return self._fields[5]


class TransferStatus:
    """How a transfer goes."""

    def __init__(self):
        self._code, self._message = StatusCode.IN_PROGRESS, ""

    def Code(self):  # noqa: N802 - the library's names
        """One of `StatusCode`."""
        return self._code

    def Message(self):  # noqa: N802
        """Why it failed."""
        return self._message

    def Succeeded(self):  # noqa: N802
        """All bytes moved."""
        return self._code is StatusCode.SUCCESS

    def Failed(self):  # noqa: N802
        """It ended otherwise."""
        return self._code is StatusCode.ERR_RDMA_OP

    def end(self, *, ok, message=""):
        """Called by the engine, once."""
        self._message = message
        self._code = StatusCode.SUCCESS if ok else StatusCode.ERR_RDMA_OP


class IOEngineSession:
    """Transfers between two pieces of memory."""

    def __init__(self, engine, local, remote):
        self._engine, self._pair = engine, (local, remote)

    def batch_read(self, local_offsets, remote_offsets, sizes, uid):
        """Remote to local."""
        return self._engine.submit(self._pair, Direction.READ, local_offsets, remote_offsets, sizes)

    def batch_write(self, local_offsets, remote_offsets, sizes, uid):
        """Local to remote."""
        return self._engine.submit(self._pair, Direction.WRITE, local_offsets, remote_offsets, sizes)


class IOEngine:
    """One engine and its thread."""

    def __init__(self, key, config):
        self._name = MoriName(key, config.host)
        self._own = LoopbackTransport(mori=self._name, warm=False)
        self._own.register([])  # proves who we are; memory has descriptors of its own
        self._remotes = {}
        self._ids, self._uids = itertools.count(), itertools.count()
        self._jobs = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._links = {}  # (local, remote) descriptor -> (transport, session)
        self._statuses = {}  # token -> status
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="mori-standin")
        self._thread.start()

    def close(self):
        """End the thread and its transports; the real engine does this when it is destroyed."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for transport in (self._own, *(t for t, _ in self._links.values())):
            transport.close()
        os.close(self._wake)

    def get_engine_desc(self):
        """What peers need to know of this engine."""
        return EngineDesc(self._own.describe().engine)

    def create_backend(self, kind, config=None):
        """There is only one."""

    def register_remote_engine(self, desc):
        """Know a peer."""
        self._remotes[desc.key] = desc.pack()

    def register_torch_tensor(self, tensor):
        """Describe the memory of a CPU tensor."""
        nbytes = tensor.nelement() * tensor.element_size()
        return MemoryDesc(pack_region(self._name, next(self._ids), tensor.data_ptr(), nbytes))

    def allocate_transfer_uid(self):
        """A number."""
        return next(self._uids)

    def create_session(self, local, remote):
        """Prepare transfers between two pieces of memory."""
        return IOEngineSession(self, local, remote)

    def submit(self, pair, direction, local_offsets, remote_offsets, sizes):
        """Queue a transfer."""
        status = TransferStatus()
        if not sizes:
            status.end(ok=True)
        else:
            self._jobs.append((pair, direction, (local_offsets, remote_offsets, sizes), status))
            os.eventfd_write(self._wake, 1)
        return status

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self):
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        tokens = itertools.count(1)
        while not self._closing:
            for fd, _ in poller.poll():
                if fd == self._wake:
                    os.eventfd_read(self._wake)
            while self._jobs:
                pair, direction, columns, status = self._jobs.popleft()
                try:
                    transport, session = self._link(pair, poller)
                except TransportError as error:
                    status.end(ok=False, message=str(error))
                    continue
                token = next(tokens)
                self._statuses[token] = status
                plan = _plan(columns, transport.capabilities.max_op_bytes)
                transport.post(token, session, direction, plan, math.inf)
            self._collect()

    def _collect(self):
        for transport in {id(t): t for t, _ in self._links.values()}.values():
            for event in transport.poll():
                if isinstance(event, Completed):
                    done = event.outcome is Outcome.DONE
                    self._statuses.pop(event.token).end(ok=done, message=event.reason)
                elif not isinstance(event, Connected):
                    self._links = {k: v for k, v in self._links.items() if v != (transport, event.session)}

    def _link(self, pair, poller):
        local, remote = pair
        key = local.pack(), remote.pack()
        if key not in self._links:
            transport = LoopbackTransport(warm=False)
            transport.register([Region(local.data, local.size)])
            session = transport.connect(Description(self._remotes[remote.engine_key], (remote.pack(),)))
            self._links[key] = transport, session
            poller.register(transport.fileno(), select.POLLIN)
        return self._links[key]


def _plan(columns, longest):
    runs = [
        (a + skip, b + skip, min(longest, n - skip))
        for a, b, n in zip(*columns, strict=True)
        for skip in range(0, n, longest)
    ]
    local, remote, sizes = np.array(runs, np.uint64).reshape(-1, 3).T.copy()
    region = np.zeros(len(runs), np.int32)
    return TransferPlan(region, local, region, remote, sizes)
