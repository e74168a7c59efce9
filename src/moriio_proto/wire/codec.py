"""Bytes to messages and back.

Encoding gives exactly upstream's bytes for every message that upstream knows, as long as the fields that only this
project has are at their defaults.  Decoding never raises anything but `DecodeError`, whatever the bytes: the frame's
size is checked first, and then every list and string has a limit that is checked before it is built.

The handshake's extension is decoded in two steps.  The key `moriio` holds an array of the protocol version and an
opaque payload; the payload is looked at only when the version is ours, so that a mismatch is named as such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from moriio_proto.errors import DecodeError, LocalProtocolError
from moriio_proto.geometry.layout import CacheGeometry
from moriio_proto.wire._schema import (
    ENVELOPE,
    EXTENSION,
    HELLO,
    LAYERS,
    MAX_GROUPS,
    MAX_HELLO_BYTES,
    MAX_ID_CHARS,
    MAX_NOTIFY_BYTES,
    MAX_TEXT_CHARS,
    NOTIFY,
    PING,
    HelloFrame,
    NotifyFrame,
    PingFrame,
    check_size,
    decoded,
)
from moriio_proto.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    BareId,
    Claim,
    Granted,
    Hello,
    HelloExtension,
    LayerDescriptors,
    Mode,
    NotifyMessage,
    Ping,
    Refused,
    Release,
    Released,
    RemoteBlocks,
    WriteDone,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "MAX_HELLO_BYTES",
    "MAX_NOTIFY_BYTES",
    "decode_hello",
    "decode_notify",
    "decode_ping",
    "encode",
    "encode_hello",
    "encode_ping",
]

_pack = msgspec.msgpack.Encoder().encode

# The first byte of a msgpack map; of these only 0xde and 0xdf can also begin UTF-8, and never an ASCII id.
_MAP_BYTES = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))


def encode(message: NotifyMessage) -> bytes:
    """One frame for a notify port.

    Raises:
        LocalProtocolError: a frame that would end the listener of an upstream peer, or is no message.
    """
    try:
        encoder = _ENCODERS[type(message)]
    except KeyError:
        raise LocalProtocolError(f"{message!r}: expected a notify message") from None
    return encoder(message)


def _encode_remote_blocks(message: RemoteBlocks) -> bytes:
    groups = message.blocks
    if not groups or not (message.token or any(groups)):
        raise LocalProtocolError(f"blocks={groups!r}: expected a block id, an empty list ends upstream's listener")
    fields: dict[str, Any] = {
        "req_id": message.req_id[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode("utf-8"),  # a client may choose it
        "transfer_id": message.transfer_id,
        "block_notify_list": groups[0] if len(groups) == 1 else groups,
        "decode_rank": message.decode_rank,
        "type": "remote_blocks",
    }
    if message.first_block:
        fields["first_block"] = message.first_block
    return _of_prompt(fields, message)


def _encode_write_done(message: WriteDone) -> bytes:
    if (
        message.failed and not message.token and not message.reason
    ):  # as vLLM 0.33 says it; an older listener ends on it
        return _pack({"type": "write_failed", "transfer_id": message.transfer_id})
    fields: dict[str, Any] = {"type": "write_done", "transfer_id": message.transfer_id}
    if message.num_writers is not None:
        fields["num_writers"] = message.num_writers
    if message.failed:
        fields["write_failed"] = True
    if message.reason:
        fields["reason"] = message.reason[:MAX_TEXT_CHARS]
    return _with_token(fields, message.token)


def _encode_release(message: Release) -> bytes:
    fields = {
        "type": "release",
        "transfer_id": message.transfer_id,
        "consumer_tp_size": message.consumer_tp_size,
    }
    return _of_prompt(fields, message)


def _encode_bare(message: BareId) -> bytes:
    if not _is_bare_id(message.transfer_id):
        raise LocalProtocolError(f"transfer_id={message.transfer_id!r}: expected 1 to {MAX_ID_CHARS} ASCII characters")
    return message.transfer_id.encode("ascii")


def _encode_claim(message: Claim) -> bytes:
    return _of_prompt({"type": "claim", "transfer_id": message.transfer_id, "stamp": message.stamp}, message)


def _encode_granted(message: Granted) -> bytes:
    fields = {
        "type": "granted",
        "transfer_id": message.transfer_id,
        "lease_ms": message.lease_ms,
        "stamp": message.stamp,
    }
    if message.blocks:
        fields["blocks"] = list(message.blocks)
    return _with_token(fields, message.token)


def _encode_refused(message: Refused) -> bytes:
    fields = {"type": "refused", "transfer_id": message.transfer_id}
    if message.reason:
        fields["reason"] = message.reason[:MAX_TEXT_CHARS]
    return _with_token(fields, message.token)


def _of_prompt(fields: dict[str, Any], message: RemoteBlocks | Release | Claim | Abort) -> bytes:
    if message.prompt_digest:
        fields["prompt_digest"] = message.prompt_digest
    return _with_token(fields, message.token)


def _encode_abort(message: Abort) -> bytes:
    return _of_prompt({"type": "abort", "transfer_id": message.transfer_id}, message)


def _with_token(fields: dict[str, Any], token: str) -> bytes:
    if token:
        fields["token"] = token
    return _pack(fields)


def _plain(kind: str) -> Callable[[Any], bytes]:
    """Encoder of a message that has a transfer id and a token only."""

    def encode_plain(message: Released) -> bytes:
        return _with_token({"type": kind, "transfer_id": message.transfer_id}, message.token)

    return encode_plain


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    RemoteBlocks: _encode_remote_blocks,
    WriteDone: _encode_write_done,
    Release: _encode_release,
    BareId: _encode_bare,
    Claim: _encode_claim,
    Granted: _encode_granted,
    Refused: _encode_refused,
    Abort: _encode_abort,
    Released: _plain("released"),
}


def decode_notify(frame: bytes) -> NotifyMessage:
    """Read one frame of a notify port.

    Raises:
        DecodeError: no message; the sender's frame may be dropped, nothing else is wrong.
    """
    check_size(frame, MAX_NOTIFY_BYTES)
    if frame[0] not in _MAP_BYTES:
        return _bare_id(frame)
    fields = decoded(NOTIFY, frame)
    if not fields.transfer_id:
        raise DecodeError("notify: transfer_id missing")
    kind = fields.type
    if kind is None and fields.req_id is not None:
        kind = "remote_blocks"
    build = _BUILDERS.get(kind or "")
    if build is None:
        raise DecodeError(f"notify: type={kind!r} is none of {', '.join(_BUILDERS)}")
    return build(fields)


def _is_bare_id(text: str) -> bool:
    return 1 <= len(text) <= MAX_ID_CHARS and text.isascii() and text.isprintable()


def _bare_id(frame: bytes) -> BareId:
    text = frame[: MAX_ID_CHARS + 1].decode("latin-1")  # never fails; what is not ASCII is refused below
    if not _is_bare_id(text):
        raise DecodeError(f"frame {frame[:32]!r}: expected a msgpack map or an ASCII transfer id")
    return BareId(text)


def _build_remote_blocks(fields: NotifyFrame) -> RemoteBlocks:
    if fields.block_notify_list is None:
        raise DecodeError("remote_blocks: block_notify_list missing")
    return RemoteBlocks(
        fields.transfer_id,
        fields.req_id or "",
        _groups(fields.block_notify_list),
        fields.decode_rank,
        fields.first_block,
        fields.token,
        fields.prompt_digest,
    )


def _groups(blocks: list[Any]) -> tuple[list[int], ...]:
    """One list per KV cache group; a flat list is one group."""
    kinds = set(map(type, blocks))
    if list not in kinds:
        return (blocks,)
    if len(kinds) > 1 or len(blocks) > MAX_GROUPS:
        raise DecodeError(f"block_notify_list: expected a flat list or at most {MAX_GROUPS} lists")
    return tuple(blocks)


def _build_granted(fields: NotifyFrame) -> Granted:
    if fields.lease_ms is None:
        raise DecodeError("granted: lease_ms missing")
    return Granted(fields.transfer_id, fields.token, fields.lease_ms, fields.stamp, tuple(fields.blocks))


_BUILDERS: dict[str, Callable[[NotifyFrame], NotifyMessage]] = {
    "remote_blocks": _build_remote_blocks,
    "write_done": lambda f: WriteDone(f.transfer_id, f.write_failed, f.num_writers, f.reason, f.token),
    "write_failed": lambda f: WriteDone(f.transfer_id, failed=True, reason=f.reason, token=f.token),
    "release": lambda f: Release(f.transfer_id, f.consumer_tp_size, f.token, f.prompt_digest),
    "claim": lambda f: Claim(f.transfer_id, f.token, f.stamp, f.prompt_digest),
    "granted": _build_granted,
    "refused": lambda f: Refused(f.transfer_id, f.token, f.reason),
    "abort": lambda f: Abort(f.transfer_id, f.token, f.prompt_digest),
    "released": lambda f: Released(f.transfer_id, f.token),
}


def encode_ping(ping: Ping) -> bytes:
    """One registration frame for the router."""
    mode: Any = ping.transfer_mode.value
    return _pack(PingFrame(ping.role, ping.http_address, ping.zmq_address, ping.dp_size, ping.tp_size, mode))


def decode_ping(frame: bytes) -> Ping:
    """Read a registration frame, as a router does.

    Raises:
        DecodeError: no ping; all six keys are required.
    """
    check_size(frame, MAX_NOTIFY_BYTES)
    p = decoded(PING, frame)
    return Ping(p.type, p.http_address, p.zmq_address, p.dp_size, p.tp_size, Mode(p.transfer_mode))


def encode_hello(hello: Hello, layers: LayerDescriptors) -> tuple[bytes, bytes]:
    """The two messages of the handshake's answer (each is sent behind an empty frame).

    Without an extension the bytes are those of upstream 0.32.
    """
    first = HelloFrame(
        hello.engine_id,
        hello.agent_metadata,
        list(hello.kv_caches_base_addr),
        hello.num_blocks,
        hello.block_len,
        hello.attn_backend_name,
    )
    if hello.extension is not None:
        first.moriio = _encode_extension(hello.extension)
    return _pack(first), _pack(layers.layers)


def _encode_extension(ext: HelloExtension) -> bytes:
    payload = {
        "token": ext.token,
        "global_dp_rank": ext.global_dp_rank,
        "tp_rank": ext.tp_rank,
        "dp_size": ext.dp_size,
        "dp_size_local": ext.dp_size_local,
        "tp_size": ext.tp_size,
        "capabilities": sorted(ext.capabilities),
        "notify_port": ext.notify_port,
        "transport": ext.transport,
        "regions": ext.regions,
        "geometry": ext.geometry.to_wire(),
        "transfer_mode": ext.transfer_mode,
    }
    return _pack([ext.version, _pack(payload)])


def decode_hello(first: bytes, second: bytes) -> tuple[Hello, LayerDescriptors]:
    """Read the two messages of the handshake's answer.

    Raises:
        DecodeError: malformed, or an extension of a version that this side does not speak.
    """
    check_size(first, MAX_HELLO_BYTES)
    check_size(second, MAX_HELLO_BYTES)
    wire = decoded(HELLO, first)
    if any(not 0 <= address < 2**64 for address in wire.kv_caches_base_addr):
        raise DecodeError("kv_caches_base_addr: expected 64-bit addresses")
    hello = Hello(
        wire.engine_id,
        wire.agent_metadata,
        tuple(wire.kv_caches_base_addr),
        wire.num_blocks,
        wire.block_len,
        wire.attn_backend_name,
        None if isinstance(wire.moriio, msgspec.UnsetType) else _decode_extension(wire.moriio),
        _any_set((wire.kv_head_layouts, wire.mamba_state_layouts, wire.attention_block_sizes)),
        _or_empty(wire.kv_head_layouts),
        _or_empty(wire.attention_block_sizes),
        _any_set((wire.mamba_state_layouts,)),
    )
    return hello, LayerDescriptors(decoded(LAYERS, second))


def _or_empty(value: dict[str, Any] | msgspec.UnsetType) -> dict[str, Any]:
    return {} if isinstance(value, msgspec.UnsetType) else value


def _any_set(values: Iterable[object]) -> bool:
    return any(value is not msgspec.UNSET for value in values)


def _decode_extension(data: bytes) -> HelloExtension:
    envelope = decoded(ENVELOPE, data)
    if envelope.version != PROTOCOL_VERSION:
        raise DecodeError(f"moriio: the peer speaks version {envelope.version}, this side {PROTOCOL_VERSION}")
    e = decoded(EXTENSION, envelope.payload)
    if e.tp_rank >= e.tp_size or e.global_dp_rank >= e.dp_size:
        raise DecodeError(
            f"rank dp={e.global_dp_rank} tp={e.tp_rank}: expected below dp_size={e.dp_size}, tp_size={e.tp_size}"
        )
    geometry = CacheGeometry.from_wire(e.geometry)
    if len(e.regions) != len(geometry.region_bytes):
        raise DecodeError(f"{len(e.regions)} regions: expected {len(geometry.region_bytes)}, as the geometry has")
    return HelloExtension(
        token=e.token,
        global_dp_rank=e.global_dp_rank,
        tp_rank=e.tp_rank,
        dp_size=e.dp_size,
        dp_size_local=e.dp_size_local,
        tp_size=e.tp_size,
        capabilities=frozenset(e.capabilities),
        notify_port=e.notify_port,
        transport=e.transport,
        regions=tuple(e.regions),
        geometry=geometry,
        transfer_mode=e.transfer_mode,
    )
