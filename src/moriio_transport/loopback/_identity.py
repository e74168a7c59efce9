"""Who we are: what a description says, and how a peer finds out that it is true.

A description names a process (pid, start time, boot, PID namespace) and the address of a *seal* in its memory:
a random nonce and a keyed digest of the described regions.  Whoever can read the seal at that address of that
process knows that the process is alive, that its transport is open, and that the regions are those that it
registered (`_mori`: not the last).  `close` wipes the seal, and so ends the access of every peer that looks before
it copies.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec

from moriio_proto.dialects import read_memory
from moriio_transport.base import Description, PeerRefusedError, Region
from moriio_transport.loopback import _mori

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SEAL_BYTES", "Engine", "Identity", "decode", "find_local", "seal_of", "start_time"]

_NONCE_BYTES = 16
SEAL_BYTES = 32
_REGION = struct.Struct("<QQ")  # address, nbytes
_ADDRESS_LIMIT = 1 << 57  # user space of every Linux that we run on ends at or below

_Address: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=_ADDRESS_LIMIT)]

# Transports of this process by nonce: a peer that is one of them is served within the process.
_local: dict[bytes, Identity] = {}


class Engine(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The `engine` part of a description, MessagePack."""

    format: Literal["moriio-loopback/1", "moriio-loopback-mori/1"]  # the second: see `_mori`
    pid: Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
    start_time: Annotated[int, msgspec.Meta(ge=0)]  # clock ticks after boot
    boot_id: Annotated[str, msgspec.Meta(max_length=64)]
    pid_namespace: Annotated[int, msgspec.Meta(ge=0)]  # inode
    seal_address: _Address
    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]

    @property
    def seals_regions(self) -> bool:
        """Whether the seal covers the regions, too."""
        return self.format != _mori.FORMAT

    def seal(self, regions: Sequence[bytes]) -> bytes:
        """What must lie at the seal's address."""
        return seal_of(self.nonce, regions if self.seals_regions else ())


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Engine)


def start_time(pid: int) -> int:
    """When a process started, in clock ticks after boot.

    Raises:
        OSError: the process does not exist, or its /proc entry is hidden from us.
    """
    # The command name, in brackets, may contain anything; the start time is the 20th field after it.
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])


def own_place() -> tuple[str, int]:
    """Where our pids mean something: boot id, and inode of the PID namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return boot_id, Path("/proc/self/ns/pid").stat().st_ino


def seal_of(nonce: bytes, regions: Sequence[bytes]) -> bytes:
    """What must lie at the seal's address: the nonce and the keyed digest of the regions."""
    return nonce + hashlib.blake2b(b"".join(regions), key=nonce, digest_size=SEAL_BYTES - _NONCE_BYTES).digest()


class Identity:
    """The identity of one transport; made by `register`, ended by `close`.

    Attributes:
        description: what peers get.
        lock: held while another transport of this process copies from or to our memory.
        closed: nobody may touch our memory any more.
    """

    def __init__(self, regions: Sequence[Region], name: _mori.MoriName | None = None) -> None:
        nonce, pid = os.urandom(_NONCE_BYTES), os.getpid()
        if name is None:
            encoded = tuple(_REGION.pack(region.address, region.nbytes) for region in regions)
            self._seal = ctypes.create_string_buffer(seal_of(nonce, encoded), SEAL_BYTES)
        else:
            encoded = tuple(_mori.pack_region(name, i, r.address, r.nbytes) for i, r in enumerate(regions))
            self._seal = ctypes.create_string_buffer(seal_of(nonce, ()), SEAL_BYTES)
        own = (start_time(pid), *own_place(), ctypes.addressof(self._seal), nonce)
        engine = (
            _encoder.encode(["moriio-loopback/1", pid, *own]) if name is None else _mori.pack_engine(name, pid, own)
        )
        self.description = Description(engine, encoded)
        self.lock = threading.Lock()
        self.closed = False
        self._nonce = nonce
        _local[nonce] = self

    def close(self) -> None:
        """Wipe the seal; within this process also wait for the slice that is being copied."""
        with self.lock:
            self.closed = True
        _local.pop(self._nonce, None)
        ctypes.memset(self._seal, 0, SEAL_BYTES)


def find_local(engine: Engine) -> Identity | None:
    """The open transport of this process that has this nonce, if any."""
    return _local.get(engine.nonce)


def decode(description: Description) -> tuple[Engine, list[tuple[int, int]]]:
    """The engine of an untrusted description and its regions as (address, nbytes).

    Raises:
        PeerRefusedError: it is not a description that a loopback transport makes.
    """
    engine = _engine(description.engine)
    regions = []
    for index, encoded in enumerate(description.regions):
        address, nbytes = _region(index, encoded, engine)
        if not (0 < address < _ADDRESS_LIMIT and 0 < nbytes <= _ADDRESS_LIMIT - address):
            raise PeerRefusedError(
                f"peer's region {index}: {nbytes} bytes at {address:#x}, expected at least one, "
                f"below {_ADDRESS_LIMIT:#x}"
            )
        regions.append((address, nbytes))
    return engine, regions


def _engine(data: bytes) -> Engine:
    """In our own form, or in that of MoRI's descriptors."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:  # ValidationError is one
        try:
            return msgspec.convert(_mori.unpack_engine(data), Engine)
        except msgspec.DecodeError:
            raise PeerRefusedError(f"the peer's description is not one of backend loopback: {error}") from error


def _region(index: int, encoded: bytes, engine: Engine) -> tuple[int, int]:
    """Address and size."""
    if not engine.seals_regions:
        try:
            memory = read_memory(encoded)
        except ValueError as error:
            raise PeerRefusedError(f"peer's region {index}: {error}") from error
        return memory.address, memory.nbytes
    if len(encoded) != _REGION.size:
        raise PeerRefusedError(f"peer's region {index}: {len(encoded)} bytes, expected {_REGION.size}")
    address, nbytes = _REGION.unpack(encoded)
    return address, nbytes
