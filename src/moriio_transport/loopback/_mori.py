"""The compatibility form of a description: also a valid one of AMD's MoRI library.

The connector built into vLLM unpacks what a peer's handshake carries as MoRI's engine and memory descriptors, which are
MessagePack arrays.  In this form ours are such arrays: the fields that MoRI knows come first, and what only we know of
an engine stands behind them, where MoRI's fields end and nobody else looks.

    engine   key, node id, host name, host, port, pid | the fields of our own form but the pid
    region   engine key, id, device id, bus id, address, size, location, IPC handle, NUMA node, IPC offset, ...

Unlike in our own form the seal does not cover the regions: MoRI's engine is described before memory is registered.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import attrs
import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FORMAT", "MoriName", "pack_engine", "pack_region", "unpack_engine"]

FORMAT = "moriio-loopback-mori/1"
_ON_CPU = 1  # MoRI's number of the location
_NO_HANDLE = bytes(64)
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]


@attrs.frozen
class MoriName:
    """What MoRI calls this engine: `key` is unique to a process start, `host` is where peers reach it."""

    key: str
    host: str


class _EngineWire(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    key: _Text
    node_id: _Text
    hostname: _Text
    host: _Text
    port: int
    pid: int
    format: Literal["moriio-loopback-mori/1"]
    start_time: int
    boot_id: str
    pid_namespace: int
    seal_address: int
    nonce: bytes


_decoder = msgspec.msgpack.Decoder(_EngineWire)


def pack_engine(name: MoriName, pid: int, own: Sequence[object]) -> bytes:
    """An engine descriptor; `own`: start time, boot id, PID namespace, seal address, nonce."""
    boot_id = own[1]
    return msgspec.msgpack.encode([name.key, boot_id, socket.gethostname(), name.host, 0, pid, FORMAT, *own])


def unpack_engine(data: bytes) -> list[object]:
    """Our own form's fields of an engine descriptor, format and pid first; unchecked beyond their types.

    Raises:
        msgspec.DecodeError: not an engine descriptor that `pack_engine` made.
    """
    e = _decoder.decode(data)
    return [e.format, e.pid, e.start_time, e.boot_id, e.pid_namespace, e.seal_address, e.nonce]


def pack_region(name: MoriName, index: int, address: int, nbytes: int) -> bytes:
    """A memory descriptor of CPU memory."""
    mori = [name.key, index, -1, "", address, nbytes, _ON_CPU, _NO_HANDLE, 0, 0, _NO_HANDLE, -1, "", 0, 0]
    return msgspec.msgpack.encode(mori)
