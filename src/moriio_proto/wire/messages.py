"""Every message of the wire, one frozen record each; `moriio_proto.wire.codec` turns them into bytes and back.

P = prefill = producer, D = decode = consumer.  A field that upstream's connector does not know stands last and
has a default; a message whose such fields have their defaults encodes to exactly the bytes upstream would send.
The messages of `Extension` go only to a peer that showed the capability in its handshake: any other peer would end
its listener thread on them.

History of `PROTOCOL_VERSION` (what is only added is a capability instead, so that it stays 1 as long as possible):

    1  2026-11-30  instance token, ranks, capabilities, geometry and regions in the key `moriio` of the handshake
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs

if TYPE_CHECKING:
    from moriio_proto.geometry.layout import CacheGeometry

__all__ = [
    "CAPABILITIES",
    "CAP_ABORT",
    "CAP_FAILURE",
    "CAP_LEASE",
    "CAP_PARTIAL",
    "GET_META",
    "PROTOCOL_VERSION",
    "Abort",
    "BareId",
    "Claim",
    "Extension",
    "Granted",
    "Hello",
    "HelloExtension",
    "LayerDescriptors",
    "Mode",
    "NotifyMessage",
    "Ping",
    "Refused",
    "Release",
    "Released",
    "RemoteBlocks",
    "WriteDone",
]

GET_META = b"get_meta_msg"  # the one frame that a dialler sends to a handshake port
PROTOCOL_VERSION = 1

CAP_LEASE = "lease"  # Claim, Granted, Refused
CAP_ABORT = "abort"  # Abort, Released
CAP_PARTIAL = "first_block"  # RemoteBlocks.first_block
CAP_FAILURE = "write_failed"  # WriteDone.failed and .reason
CAPABILITIES = frozenset({CAP_LEASE, CAP_ABORT, CAP_PARTIAL, CAP_FAILURE})


class Mode(enum.Enum):
    """Who moves the bytes; the value is the wire's `transfer_mode`."""

    READ = "READ"  # D reads from P's memory after P's answer
    WRITE = "WRITE"  # P writes into D's memory, layer by layer


@attrs.frozen
class Ping:
    """A node registers with the router; sent for ever, never answered."""

    role: Literal["P", "D"]
    http_address: str  # "ip:port"
    zmq_address: str  # "host:IP,handshake:PORT,notify:PORT", base ports
    dp_size: int  # global
    tp_size: int
    transfer_mode: Mode


@attrs.frozen
class HelloExtension:
    """What this project adds to the handshake's answer; carried in the key `moriio`, which upstream ignores."""

    token: str  # new per process start
    global_dp_rank: int
    tp_rank: int
    dp_size: int  # global
    dp_size_local: int  # of one pod; 0 = unknown
    tp_size: int
    capabilities: frozenset[str]
    notify_port: int  # where this rank really listens
    transport: str  # name of the transport that `agent_metadata` and `regions` belong to
    regions: tuple[bytes, ...]  # one opaque descriptor per registered region
    geometry: CacheGeometry
    transfer_mode: str = ""  # "READ" or "WRITE"; "" = not told
    version: int = PROTOCOL_VERSION


@attrs.frozen
class Hello:
    """First message of the handshake's answer: who answers and what its memory looks like."""

    engine_id: str
    agent_metadata: bytes  # the transport's engine descriptor, opaque here
    kv_caches_base_addr: tuple[int, ...]  # virtual addresses, one per layer
    num_blocks: int
    block_len: int  # bytes
    attn_backend_name: str
    extension: HelloExtension | None = None
    # Keys that vLLM 0.33 added: read, never sent.
    since_033: bool = False  # one of them was there
    head_layouts: Mapping[str, Sequence[int]] = attrs.field(factory=dict)  # by layer; `dialects` says what they mean
    attention_block_sizes: Mapping[str, int] = attrs.field(factory=dict)  # tokens, by layer
    recurrent_state: bool = False  # there are layers without attention


@attrs.frozen
class LayerDescriptors:
    """Second message of the handshake's answer: the packed memory descriptors of each layer."""

    layers: dict[str, list[bytes]]


@attrs.frozen
class RemoteBlocks:
    """D -> P (WRITE): the blocks of D that the transfer goes to."""

    transfer_id: str
    req_id: str  # D's own, for logs only
    blocks: tuple[list[int], ...]  # block ids per KV cache group, at least one group
    decode_rank: int = 0  # D's global data-parallel rank
    first_block: int = 0  # index in the prompt of the first block that D wants (those before it D has)
    token: str = ""  # D's instance token
    prompt_digest: str = ""  # of the prompt that D wants: P serves no other; "" = not told


@attrs.frozen
class WriteDone:
    """P -> D (WRITE): this P rank has written all blocks, or has given up when `failed`."""

    transfer_id: str
    failed: bool = False
    num_writers: int | None = None  # how many P ranks will say so; None = not told
    reason: str = ""
    token: str = ""  # P's instance token


@attrs.frozen
class Release:
    """D -> P: D will not read P's blocks (any more)."""

    transfer_id: str
    consumer_tp_size: int = 1
    token: str = ""  # D's instance token
    prompt_digest: str = ""  # as in `RemoteBlocks`


@attrs.frozen
class BareId:
    """Legacy frame, a bare transfer id: a release at P, a write_done at D."""

    transfer_id: str


@attrs.frozen
class Claim:
    """Accessor -> owner: asks for a lease on the owner's blocks, or for more of it (WRITE: P asks D; READ: D asks P).

    D also sends it in WRITE while its request queues: P is asked for patience.
    """

    transfer_id: str
    token: str  # the sender's instance token
    stamp: int = 0  # the sender's clock, microseconds; opaque to the receiver, who brings it back
    prompt_digest: str = ""  # as in `RemoteBlocks`; from D only


@attrs.frozen
class Granted:
    """Answer to `Claim`: the owner holds its blocks for `lease_ms` milliseconds.

    The accessor counts from `stamp`, when it sent the claim; the owner from when it received it, and so longer.
    """

    transfer_id: str
    token: str  # the sender's instance token
    lease_ms: int
    stamp: int = 0  # of the claim that is answered
    blocks: Sequence[int] = ()  # READ: P's block ids by position; D reads these, whatever its request's parameters say


@attrs.frozen
class Refused:
    """Owner -> accessor: there are no such blocks (any more); what was moved after the lease is worth nothing."""

    transfer_id: str
    token: str  # the sender's instance token
    reason: str = ""


@attrs.frozen
class Abort:
    """Either way: the sender wants no more of the transfer; answered by `Released` when the receiver is quiet."""

    transfer_id: str
    token: str  # the sender's instance token
    prompt_digest: str = ""  # as in `RemoteBlocks`; from D only


@attrs.frozen
class Released:
    """Answer to `Abort`: no operation of the sender can touch the other side's blocks any more."""

    transfer_id: str
    token: str  # the sender's instance token


Extension: TypeAlias = Claim | Granted | Refused | Abort | Released
NotifyMessage: TypeAlias = RemoteBlocks | WriteDone | Release | BareId | Extension
