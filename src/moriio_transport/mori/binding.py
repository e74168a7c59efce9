"""The one place that touches amd_mori: loading it, engines, memory, sessions and statuses.

Everything the engine does not forgive is kept here: the order of creation and destruction, descriptors that are decoded
strictly before the library sees them, and an address that can be bound (the library ends the process otherwise).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from moriio_transport.base import PeerRefusedError, Region, TransportError, TransportUnavailableError
from moriio_transport.mori.preflight import check_address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["WANTED", "Engine", "Engines", "Library", "PeerEngine", "load_library"]

WANTED: Final = "amd_mori>=1.2.4,<2"
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "IOEngine": (
        "get_engine_desc", "create_backend", "register_remote_engine", "register_memory", "deregister_memory",
        "create_session", "pop_peer_failure",
    ),
    "IOEngineSession": ("batch_read", "batch_write", "allocate_transfer_uid", "alive"),
    "IOEngineConfig": (),
    "RdmaBackendConfig": (
        "qp_per_transfer", "post_batch_size", "num_worker_threads", "poll_cq_mode", "enable_notification",
        "enable_transfer_chunking", "chunk_bytes", "max_chunks_per_transfer", "num_nics_per_transfer", "max_send_wr",
        "max_cqe_num", "max_msg_sge",
    ),
    "XgmiBackendConfig": ("num_streams", "num_events"),
    "BackendType": ("RDMA", "XGMI"),
    "EngineDesc": ("pack", "unpack", "key", "host", "port", "node_id"),
    "MemoryDesc": ("pack", "unpack", "engine_key", "size"),
    "MemoryLocationType": ("CPU", "GPU"),
    "PollCqMode": ("POLLING", "EVENT"),
    "StatusCode": ("SUCCESS", "IN_PROGRESS"),
    "set_log_level": (),
}  # fmt: skip


@attrs.frozen
class Library:
    """The loaded package."""

    io: Any  # the module mori.io
    version: str

    def rdma_config(self, options: Mapping[str, Any]) -> Any:
        """The engine's configuration of backend `rdma`; notification is off (the control channel tells peers)."""
        config = self.io.RdmaBackendConfig(
            qp_per_transfer=options["qp_per_transfer"],
            post_batch_size=options["post_batch_size"],
            num_worker_threads=options["num_workers"],
            poll_cq_mode=self.io.PollCqMode.EVENT if options["poll_cq_mode"] == "event" else self.io.PollCqMode.POLLING,
            enable_notification=False,
            enable_transfer_chunking=options["transfer_chunking"],
            chunk_bytes=options["chunk_bytes"],
            max_chunks_per_transfer=options["max_chunks_per_transfer"],
            num_nics_per_transfer=options["nics_per_transfer"],
        )
        config.max_send_wr = options["max_send_wr"]
        config.max_cqe_num = options["max_cqe"]
        config.max_msg_sge = options["max_sge"]
        return config

    def xgmi_config(self, options: Mapping[str, Any]) -> Any:
        """The engine's configuration of backend `xgmi`."""
        return self.io.XgmiBackendConfig(num_streams=options["num_streams"], num_events=options["num_events"])


def load_library() -> Library:
    """Import amd_mori and check that it has every call that is needed.

    Raises:
        TransportUnavailableError: what was found and what is needed.
    """
    try:
        version = importlib.metadata.version("amd_mori")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    need = f"backends rdma and xgmi need {WANTED} and the ROCm runtime; backend loopback needs neither"
    try:
        io = importlib.import_module("mori.io")
    except Exception as error:  # foreign code that loads native libraries: whatever it raises becomes one error
        raise TransportUnavailableError(f"amd_mori ({version}) cannot be imported: {error!r}; {need}") from error
    missing = [name for name in _NAMES if not hasattr(io, name)]
    missing += [
        f"{name}.{m}" for name, ms in _NAMES.items() for m in ms if name not in missing and not _has(io, name, m)
    ]
    if missing:
        where = getattr(io, "__file__", "?")
        raise TransportUnavailableError(f"amd_mori {version} at {where} has no {', '.join(missing)}; {need}")
    return Library(io, version)


def _has(io: Any, name: str, member: str) -> bool:
    return hasattr(getattr(io, name), member)


@attrs.frozen
class PeerEngine:
    """A peer's engine and memory, decoded strictly: the library itself accepts fragments."""

    engine: Any  # EngineDesc
    key: str
    memory: tuple[Any, ...]  # MemoryDesc of each region
    sizes: tuple[int, ...]  # bytes

    @classmethod
    def decode(cls, library: Library, engine: bytes, regions: Sequence[bytes]) -> PeerEngine:
        """From what a handshake carried.

        Raises:
            PeerRefusedError: names what is wrong.
        """
        desc = _unpack(library.io.EngineDesc, engine, "engine descriptor", 6)
        if not desc.key:
            raise PeerRefusedError("engine descriptor: no key")
        memory = tuple(
            _unpack(library.io.MemoryDesc, data, f"memory descriptor {i}", 8) for i, data in enumerate(regions)
        )
        for i, piece in enumerate(memory):
            if piece.engine_key != desc.key or piece.size <= 0:
                raise PeerRefusedError(
                    f"memory descriptor {i}: {piece.size} bytes of engine {piece.engine_key!r}, expected some of "
                    f"{desc.key!r}"
                )
        return cls(desc, str(desc.key), memory, tuple(int(piece.size) for piece in memory))


def _unpack(kind: Any, data: bytes, what: str, fields: int) -> Any:
    try:
        values = msgspec.msgpack.decode(data, type=list)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PeerRefusedError(f"{what}: {len(data)} bytes that are no msgpack array: {error}") from None
    if len(values) < fields:
        raise PeerRefusedError(f"{what}: {len(values)} fields, expected at least {fields}")
    try:
        return kind.unpack(data)
    except RuntimeError as error:
        raise PeerRefusedError(f"{what}: {error}") from None


class Engine:
    """One MoRI-IO engine with our memory.  Made and destroyed off the reactor's thread, save the first.

    Args:
        library: the loaded package.
        backend: `library.io.BackendType.RDMA` or `XGMI`.
        config: of the backend.
        key: unique for ever; contains the instance token.
        host: IPv4 address, which was checked to be ours.

    Raises:
        TransportUnavailableError: what the engine said.
    """

    def __init__(self, library: Library, backend: Any, config: Any, key: str, host: str) -> None:
        io = library.io
        check_address(host)
        try:
            self._engine = io.IOEngine(key, io.IOEngineConfig(host, 0))
            self._engine.create_backend(backend, config)
        except RuntimeError as error:
            raise TransportUnavailableError(f"amd_mori {library.version} makes no engine on {host}: {error}") from error
        self._io = io
        self.key = key
        self.dead_peers: set[str] = set()  # keys of engines whose queue pairs with this one are broken
        self.users = 0
        self._memory: list[Any] = []

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory known; it is pinned by the first session.

        Raises:
            TransportError: names the region; nothing stays registered.
        """
        places = self._io.MemoryLocationType
        for index, region in enumerate(regions):
            place = places.CPU if region.device == "cpu" else places.GPU
            try:
                self._memory.append(
                    self._engine.register_memory(region.address, region.nbytes, region.device_index, place)
                )
            except (RuntimeError, ValueError, TypeError) as error:
                for known in self._memory:
                    self._engine.deregister_memory(known)
                self._memory.clear()
                raise TransportError(f"register: region {index}, {region}: {error}") from error

    @property
    def descriptor(self) -> Any:
        """EngineDesc; only after `register`, when the port is known."""
        return self._engine.get_engine_desc()

    @property
    def memory(self) -> list[bytes]:
        """Packed descriptor of each region."""
        return [piece.pack() for piece in self._memory]

    def meet(self, peer: PeerEngine) -> None:
        """Make a peer's engine known; again does nothing.

        Raises:
            TransportError: what the engine said.
        """
        try:
            self._engine.register_remote_engine(peer.engine)
        except RuntimeError as error:
            raise TransportError(f"engine {peer.key!r} cannot be registered: {error}") from error

    def open_session(self, local: int, peer: PeerEngine, remote: int) -> Any:
        """A session between a region of ours and one of a peer's.  Holds the interpreter lock, for 5 s at most.

        Raises:
            TransportError: the peer is not reachable, or does not know the memory.
        """
        try:
            session = self._engine.create_session(self._memory[local], peer.memory[remote])
        except RuntimeError as error:
            raise TransportError(f"no session with engine {peer.key!r}: {error}") from error
        if session is None:
            raise TransportError(f"no session with engine {peer.key!r}: the engine does not know it")
        return session

    def failure(self) -> str:
        """What the engine noticed of a broken peer or device, for messages; the oldest, once."""
        event = self._engine.pop_peer_failure()
        return "" if event is None else f"{event.reason.name} {event.device_name} {event.detail}".strip()

    def close(self) -> None:
        """Destroy the engine: its queue pairs go, so nothing of it moves any more.  Its sessions are gone before."""
        self._memory.clear()
        self._engine = None


class Engines:
    """The engines of a transport: the first, whose description peers hold, and those that replace it for one peer.

    A broken queue pair stays broken for the pair of engine keys.  So an engine is chosen on which nothing broke with
    that peer, and made anew where there is none.  Each costs a busy thread, so a replacement goes with its last user.

    Args:
        make: engine of a key, with memory registered.
        key: of the first engine; the others append a counter.
    """

    def __init__(self, make: Callable[[str], Engine], key: str) -> None:
        self._make, self._key, self._count = make, key, 0
        self._lock = threading.Lock()
        self._replacements: list[Engine] = []
        self.first = make(key)

    def take(self, peer_key: str) -> Engine:
        """An engine for a connection; give it back with `give`.

        Raises:
            TransportUnavailableError: none is left and no further one can be made.
        """
        with self._lock:
            for engine in (self.first, *self._replacements):
                if peer_key not in engine.dead_peers:
                    break
            else:
                self._count += 1
                engine = self._make(f"{self._key}+{self._count}")
                self._replacements.append(engine)
            engine.users += 1
            return engine

    def give(self, engine: Engine) -> None:
        """A connection does not use it any more; all its sessions are dropped."""
        with self._lock:
            engine.users -= 1
            if engine.users == 0 and engine is not self.first:
                self._replacements.remove(engine)
                engine.close()

    def close(self) -> None:
        """Destroy all; nobody uses one any more."""
        with self._lock:
            for engine in (*self._replacements, self.first):
                engine.close()
            self._replacements.clear()
