"""The frames as msgspec sees them: field names, order, and a limit on everything that a peer can make us build.

A limit is checked by msgspec before the list or string is built, so no frame allocates more than a small multiple of
its own size, and that is checked first.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from moriio_proto.errors import DecodeError
from moriio_proto.geometry.layout import MAX_GROUPS, MAX_LAYERS, MAX_REGIONS, GeometryWire

__all__ = [
    "ENVELOPE",
    "EXTENSION",
    "HELLO",
    "LAYERS",
    "MAX_BLOCK_ID",
    "MAX_BLOCK_LIST",
    "MAX_GROUPS",
    "MAX_HELLO_BYTES",
    "MAX_ID_CHARS",
    "MAX_NOTIFY_BYTES",
    "MAX_RANKS",
    "MAX_TEXT_CHARS",
    "NOTIFY",
    "PING",
    "HelloFrame",
    "NotifyFrame",
    "PingFrame",
    "check_size",
    "decoded",
]

MAX_NOTIFY_BYTES = 2**22  # one frame on a notify port
MAX_HELLO_BYTES = 2**22  # one message of the handshake's answer
MAX_ID_CHARS = 512
MAX_TEXT_CHARS = 1024  # reasons, names, addresses
MAX_BLOCK_LIST = 2**17  # block ids of one list: two million tokens in blocks of 16
MAX_BLOCK_ID = 2**31 - 1
MAX_RANKS = 65535  # a rank shifts a port
MAX_DESCRIPTORS = 64  # of one layer
MAX_DESCRIPTOR_BYTES = 2**16
MAX_CAPABILITIES = 64
MAX_LEASE_MS = 24 * 3600 * 1000

_Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
_Token = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
_Blob = Annotated[bytes, Meta(max_length=MAX_DESCRIPTOR_BYTES)]
_Block = Annotated[int, Meta(ge=0, le=MAX_BLOCK_ID)]
_Blocks = Annotated[list[_Block], Meta(max_length=MAX_BLOCK_LIST)]
_Rank = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
_Size = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Int63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# Heads, tokens, bytes of a head; strides of block, head and token; where the one or two planes begin.
_HeadLayout = Annotated[list[_Int63], Meta(min_length=7, max_length=8)]

_T = TypeVar("_T")
_PerLayer: TypeAlias = Annotated[dict[_Text, _T], Meta(max_length=MAX_LAYERS)]


class NotifyFrame(msgspec.Struct):
    """All fields of all notify frames: one pass, whatever the order of the keys."""

    type: _Text | None = None  # upstream took a map with a req_id and no type for remote_blocks
    transfer_id: _Id = ""
    req_id: _Text | None = None
    block_notify_list: Annotated[list[_Block | _Blocks], Meta(max_length=MAX_BLOCK_LIST)] | None = None
    decode_rank: _Rank = 0
    first_block: _Block = 0
    token: _Token = ""
    reason: _Text = ""
    num_writers: _Size | None = None
    write_failed: bool = False
    consumer_tp_size: _Size = 1
    lease_ms: Annotated[int, Meta(ge=0, le=MAX_LEASE_MS)] | None = None
    stamp: _Int63 = 0
    blocks: _Blocks = []
    prompt_digest: _Token = ""


class PingFrame(msgspec.Struct):
    """Field order is upstream's."""

    type: Literal["P", "D"]
    http_address: _Text
    zmq_address: _Text
    dp_size: _Size
    tp_size: _Size
    transfer_mode: Literal["READ", "WRITE"]


class HelloFrame(msgspec.Struct, omit_defaults=True):
    """Upstream's fields in upstream's order, the keys that 0.33 added, and ours last."""

    engine_id: _Text
    agent_metadata: _Blob
    kv_caches_base_addr: Annotated[list[int], Meta(max_length=MAX_LAYERS)]
    num_blocks: _Int63
    block_len: _Int63
    attn_backend_name: _Text
    kv_head_layouts: _PerLayer[_HeadLayout] | msgspec.UnsetType = msgspec.UNSET
    mamba_state_layouts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    attention_block_sizes: _PerLayer[_Int63] | msgspec.UnsetType = msgspec.UNSET
    moriio: bytes | msgspec.UnsetType = msgspec.UNSET


class EnvelopeFrame(msgspec.Struct, array_like=True):
    version: _Int63
    payload: bytes


class ExtensionFrame(msgspec.Struct):
    """Unknown keys and capabilities are ignored: that is how version 1 grows."""

    token: _Id
    global_dp_rank: _Rank
    tp_rank: _Rank
    dp_size: _Size
    dp_size_local: _Rank
    tp_size: _Size
    capabilities: Annotated[list[_Text], Meta(max_length=MAX_CAPABILITIES)]
    notify_port: _Port
    transport: _Text
    regions: Annotated[list[_Blob], Meta(max_length=MAX_REGIONS)]
    geometry: GeometryWire
    transfer_mode: Literal["READ", "WRITE", ""] = ""


LayerMap: TypeAlias = Annotated[
    dict[_Text, Annotated[list[_Blob], Meta(max_length=MAX_DESCRIPTORS)]], Meta(max_length=MAX_LAYERS)
]

NOTIFY = msgspec.msgpack.Decoder(NotifyFrame)
PING = msgspec.msgpack.Decoder(PingFrame)
HELLO = msgspec.msgpack.Decoder(HelloFrame)
ENVELOPE = msgspec.msgpack.Decoder(EnvelopeFrame)
EXTENSION = msgspec.msgpack.Decoder(ExtensionFrame)
LAYERS: msgspec.msgpack.Decoder[dict[str, list[bytes]]] = msgspec.msgpack.Decoder(LayerMap)


def check_size(frame: bytes, limit: int) -> None:
    """Refuse a frame before anything looks into it.

    Raises:
        DecodeError: empty, or longer than `limit` bytes.
    """
    if not 0 < len(frame) <= limit:
        raise DecodeError(f"frame of {len(frame)} bytes: expected 1 to {limit}")


def decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    """Decode, with one kind of error.

    Raises:
        DecodeError: whatever is wrong with the bytes.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(str(error)) from None
    except RecursionError:  # nested deeper than anything here is
        raise DecodeError("nested too deeply") from None
