"""A strict stand-in for `mori.io`.

The same signatures (`engine/test_signatures.py` compares), bytes that really move within this process, and `violations`
of what the real engine answers with a hang or a crash.
"""

from __future__ import annotations

import ctypes
import enum
import queue
import threading
import uuid
import weakref

import attrs
import msgspec

NODE = str(uuid.uuid4())


class BackendType(enum.Enum):
    Unknown, XGMI, RDMA, TCP, FABRIC = range(5)


class MemoryLocationType(enum.Enum):
    Unknown, CPU, GPU = range(3)


class PollCqMode(enum.Enum):
    POLLING, EVENT = range(2)


class StatusCode(enum.Enum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


class IOEngineConfig:
    def __init__(self, host="", port=0):
        self.host, self.port = host, port


class RdmaBackendConfig:
    def __init__(
        self, qp_per_transfer=1, post_batch_size=-1, num_worker_threads=-1, poll_cq_mode=PollCqMode.POLLING,
        enable_notification=True, notif_per_qp=1024, enable_transfer_chunking=False, chunk_bytes=65536,
        max_chunks_per_transfer=64, num_nics_per_transfer=1,
    ):  # fmt: skip
        vars(self).update({name: value for name, value in locals().items() if name != "self"})

    qp_per_transfer = post_batch_size = num_worker_threads = poll_cq_mode = enable_notification = None
    notif_per_qp = enable_transfer_chunking = chunk_bytes = max_chunks_per_transfer = num_nics_per_transfer = None
    max_send_wr = max_cqe_num = max_msg_sge = 0


class XgmiBackendConfig:
    num_streams = num_events = None

    def __init__(self, num_streams=64, num_events=64):
        self.num_streams, self.num_events = num_streams, num_events


@attrs.frozen
class EngineDesc:
    key: str
    node_id: str
    hostname: str
    host: str
    port: int
    pid: int

    def pack(self):
        return msgspec.msgpack.encode(attrs.astuple(self))

    @staticmethod
    def unpack(arg0):
        return EngineDesc(*msgspec.msgpack.decode(arg0))


@attrs.frozen
class MemoryDesc:
    engine_key: str
    id: int
    device_id: int
    device_bus_id: str
    numa_node: int
    data: int
    size: int
    loc: int

    def pack(self):
        return msgspec.msgpack.encode(attrs.astuple(self))

    @staticmethod
    def unpack(arg0):
        return MemoryDesc(*msgspec.msgpack.decode(arg0))


class Faults:
    """What goes wrong next, and what the caller did wrong."""

    def __init__(self):
        self.fail_next = False
        self.running = threading.Event()
        self.running.set()
        self.violations = []
        self.engines = weakref.WeakValueDictionary()  # by key
        self.made = []  # keys in order


faults = Faults()


class TransferStatus:
    def __init__(self):
        self._code, self._message, self._final = StatusCode.INIT, "", threading.Event()

    def Code(self):  # noqa: N802 - the library's name
        return self._code

    def Message(self):  # noqa: N802
        return self._message

    def Succeeded(self):  # noqa: N802
        return self._code is StatusCode.SUCCESS

    def WaitFor(self, timeout_ms=-1):  # noqa: N802
        self._final.wait(None if timeout_ms < 0 else timeout_ms / 1000)
        return self._code

    def _end(self, code, message):
        self._code, self._message = code, message
        self._final.set()


class IOEngineSession:
    def __init__(self, mori_sess):
        self._engine, self._local, self._remote = mori_sess
        self._uids = 0

    def allocate_transfer_uid(self):
        self._uids += 1
        return self._uids

    def alive(self):
        return self._check() is not None

    def batch_read(self, *args):
        return self._copy(False, *args)

    def batch_write(self, *args):
        return self._copy(True, *args)

    def _check(self):
        engine = self._engine()
        if engine is None:
            faults.violations.append("session used after its engine")
        return engine

    def _copy(self, write, local_offsets, remote_offsets, sizes, transfer_uid):
        engine, status = self._check(), TransferStatus()
        status._code = StatusCode.IN_PROGRESS
        runs = []
        for ours, theirs, nbytes in zip(local_offsets, remote_offsets, sizes, strict=True):
            assert type(ours) is type(theirs) is type(nbytes) is int
            assert 0 <= ours <= self._local.size - nbytes
            assert 0 <= theirs <= self._remote.size - nbytes
            pair = self._local.data + ours, self._remote.data + theirs
            runs.append((*(reversed(pair) if write else pair), nbytes))
        engine._work.put((weakref.ref(status), runs))
        return status


class IOEngine:
    def __init__(self, key, config):
        assert key not in faults.engines, f"two engines of the key {key}"
        faults.made.append(key)
        faults.engines[key] = self
        self._key, self._host, self._backend, self._port = key, config.host, None, 0
        self._memory, self._known = {}, set()
        self._work = queue.SimpleQueue()
        threading.Thread(target=_move, args=(self._work,), daemon=True).start()
        weakref.finalize(self, self._work.put, None)

    def get_engine_desc(self):
        assert self._backend is not None, "the port is not known before the backend"
        return EngineDesc(self._key, NODE, "host", self._host, self._port, 1)

    def create_backend(self, type, config=None):  # noqa: A002 - the library's name
        assert (type is BackendType.XGMI) == isinstance(config, XgmiBackendConfig)
        self._backend, self._port = type, 4000 + len(faults.made)

    def register_remote_engine(self, engine_desc):
        self._known.add(engine_desc.key)

    def register_memory(self, ptr, size, device_id, mem_loc):
        assert self._backend is not None, "memory registered before the backend is unknown to it"
        desc = MemoryDesc(self._key, len(self._memory), device_id, "", 0, ptr, size, mem_loc.value)
        self._memory[desc.id] = desc
        return desc

    def deregister_memory(self, mem_desc):
        del self._memory[mem_desc.id]

    def create_session(self, local_mem, remote_mem):
        if remote_mem.engine_key not in self._known:
            return None
        peer = faults.engines.get(remote_mem.engine_key)
        if peer is None:
            raise RuntimeError("connect refused")
        if peer._memory.get(remote_mem.id) != remote_mem:
            raise RuntimeError("remote MR size mismatch got=0")
        return IOEngineSession((weakref.ref(self), local_mem, remote_mem))

    def pop_peer_failure(self):
        return None


def _move(work):
    """The engine's thread."""
    while (item := work.get()) is not None:
        status, runs = item
        faults.running.wait()
        kept = status()
        if kept is None:
            faults.violations.append("a status was dropped before it was final")
            continue
        if faults.fail_next:
            faults.fail_next = False
            kept._end(StatusCode.ERR_GPU_OP, "hipMemcpy failed")
            continue
        for to, at, nbytes in runs:
            ctypes.memmove(to, at, nbytes)
        kept._end(StatusCode.SUCCESS, "success")


def set_log_level(arg0):
    """Nothing is logged."""
