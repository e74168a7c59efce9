"""Dialects: peers without our extension, which are vLLM's built-in connector, and how their caches lie.

The dialect of a peer is read from its hello, never guessed from our own settings:

    key `moriio`                                                  this project
    kv_head_layouts, mamba_state_layouts, attention_block_sizes   vLLM 0.33
    none of these                                                 vLLM 0.32 and older

Such a hello names each layer's address and the memory descriptors that contain it, but not all of what a
`CacheGeometry` needs.  What it does not say is taken from our own layout, exactly as the built-in connector itself
takes it; `remote_geometry` is the only place where that happens:

    fact                         0.32                                       0.33
    where a layer begins         its address minus its descriptor's         the same
    number of blocks             `num_blocks`                               the same
    bytes of a block             assumed ours; `block_len` must agree       from `kv_head_layouts`, else as 0.32
    stride from block to block   assumed ours                               from `kv_head_layouts`, else as 0.32
    order of K, V, heads, tokens assumed ours                               from `kv_head_layouts`, else as 0.32
    tokens of a block            assumed ours                               `attention_block_sizes`
    element type                 assumed ours                               assumed ours

What can be checked is: layer names, one descriptor a layer, one address a layer or two for split K/V halves, the
block length, and that every block lies inside the described memory.
"""

from __future__ import annotations

import enum
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import msgspec

from moriio_proto.events import Endpoint, HelloReceived
from moriio_proto.geometry.layout import (
    MAX_PIECES,
    CacheGeometry,
    GeometryMismatchError,
    LayerLayout,
    Piece,
    check_compatible,
)
from moriio_proto.wire.messages import Hello, LayerDescriptors

__all__ = [
    "Dialect",
    "Judged",
    "Memory",
    "descriptors",
    "dialect_of",
    "judge",
    "plain_addresses",
    "read_memory",
    "remote_geometry",
]


class Dialect(enum.Enum):
    """Which program a peer runs; the value is for people."""

    OURS = "moriio"
    VLLM_033 = "vLLM 0.33"
    VLLM_032 = "vLLM 0.32 or older"

    @property
    def knows_failure(self) -> bool:
        """Whether a failed WRITE can be told: as `write_failed`; an older listener ends on it."""
        return self is not Dialect.VLLM_032


def dialect_of(hello: Hello) -> Dialect:
    """What the sender of a hello runs."""
    if hello.extension is not None:
        return Dialect.OURS
    return Dialect.VLLM_033 if hello.since_033 else Dialect.VLLM_032


@attrs.frozen
class Memory:
    """What a packed memory descriptor of the MoRI library says: `nbytes` bytes at virtual address `address`."""

    address: int
    nbytes: int


class _MemoryWire(msgspec.Struct, array_like=True):
    """The first fields of the packed array; more may follow."""

    engine_key: str
    id: int
    device_id: int
    device_bus_id: str
    data: int
    size: int


_AXES: Final = re.compile(r"\[(.*?),?C=\d+\]")  # what a layer's content says of the axes inside a block
_MEMORY: Final = msgspec.msgpack.Decoder(_MemoryWire)


def read_memory(blob: bytes) -> Memory:
    """Read one descriptor.

    Raises:
        ValueError: it is none.
    """
    try:
        wire = _MEMORY.decode(blob)
    except msgspec.MsgspecError as error:
        raise ValueError(f"memory descriptor: {error}") from None
    if not (0 < wire.data < 2**64 and 0 < wire.size <= 2**64 - wire.data):
        raise ValueError(f"memory descriptor: {wire.size} bytes at {wire.data:#x}: expected 64-bit memory")
    return Memory(wire.data, wire.size)


def descriptors(hello: Hello, layers: LayerDescriptors) -> tuple[bytes, ...]:
    """The descriptors of the peer's regions, in the order in which its geometry counts regions."""
    if hello.extension is not None:
        return hello.extension.regions
    return tuple(dict.fromkeys(blob for blobs in layers.layers.values() for blob in blobs))


def plain_addresses(layers: Sequence[LayerLayout], region_addresses: Sequence[int]) -> tuple[int, ...]:
    """Our layers' addresses as a peer without our extension counts them: two where K and V halves lie apart."""
    addresses = []
    for layer in layers:
        first, middle = layer.pieces[0], layer.pieces[len(layer.pieces) // 2]
        apart = len(layer.pieces) % 2 == 0 and middle.offset - first.offset >= first.stride
        starts = [first, middle] if apart else [first]
        addresses += [region_addresses[piece.region] + piece.offset for piece in starts]
    return tuple(addresses)


def remote_geometry(hello: Hello, layers: LayerDescriptors, ours: CacheGeometry) -> CacheGeometry:
    """Where a peer's caches lie, and that they can be copied from and to ours.

    Raises:
        GeometryMismatchError: names the first factor that differs.
        ValueError: the hello contradicts itself, such as a block outside the described memory.
    """
    theirs = hello.extension.geometry if hello.extension is not None else _assumed(hello, layers, ours)
    check_compatible(ours, theirs)
    return theirs


@attrs.frozen
class Judged:
    """A hello, and what its receiver makes of it: a geometry, or a problem."""

    endpoint: Endpoint  # that answered
    hello: Hello
    layers: LayerDescriptors
    token: str
    capabilities: frozenset[str]
    geometry: CacheGeometry | None
    problem: str


def judge(event: HelloReceived, ours: CacheGeometry, factors: Mapping[str, object]) -> Judged:
    """Read a hello; whatever is wrong with it becomes the problem.

    `factors`: what else both sides must share, by the name of the extension's field; an empty value is not compared.
    """
    hello, extension = event.hello, event.hello.extension
    geometry: CacheGeometry | None = None
    problem = ""
    try:
        for factor, own in factors.items() if extension is not None else ():
            theirs = getattr(extension, factor)
            if own and theirs and own != theirs:
                raise GeometryMismatchError(factor, own, theirs)
        geometry = remote_geometry(hello, event.layers, ours)
    except ValueError as e:
        problem = f"{dialect_of(hello).value} at {event.endpoint.host}: {e}"
    token, capabilities = ("", frozenset[str]()) if extension is None else (extension.token, extension.capabilities)
    return Judged(event.endpoint, hello, event.layers, token, capabilities, geometry, problem)


def _assumed(hello: Hello, layers: LayerDescriptors, ours: CacheGeometry) -> CacheGeometry:
    """The geometry of a peer that does not send one."""
    if hello.recurrent_state:
        raise GeometryMismatchError("recurrent state", "none", "some")
    blobs = descriptors(hello, layers)
    memory = [read_memory(blob) for blob in blobs]
    index = {blob: i for i, blob in enumerate(blobs)}
    mine = {layer.name: layer for layer in ours.layers}
    made = []
    _check_block(hello, ours)
    for name, bases in _addresses(hello, layers).items():
        described = layers.layers[name]
        if len(described) != 1:
            raise GeometryMismatchError(f"memory descriptors of layer {name!r}", 1, len(described))
        region = index[described[0]]
        starts = [base - memory[region].address for base in bases]
        if name in mine:
            made.append(_layer(mine[name], region, starts, hello, ours))
        else:  # named in the comparison that follows
            made.append(LayerLayout(name, (Piece(region, 0, 1, 1),), ""))
    return CacheGeometry(tuple(made), tuple(m.nbytes for m in memory), hello.num_blocks, ours.block_tokens)


def _addresses(hello: Hello, layers: LayerDescriptors) -> dict[str, Sequence[int]]:
    """The one or two addresses of each layer: two where K and V halves lie apart."""
    bases, names = hello.kv_caches_base_addr, list(layers.layers)
    each = len(bases) // len(names) if names else 0
    if each not in (1, 2) or each * len(names) != len(bases):
        raise GeometryMismatchError("addresses", f"1 or 2 for each of {len(names)} layers", len(bases))
    return {name: bases[i * each : (i + 1) * each] for i, name in enumerate(names)}


def _layer(mine: LayerLayout, region: int, starts: Sequence[int], hello: Hello, ours: CacheGeometry) -> LayerLayout:
    """The peer's layout of a layer that we have, too."""
    layout = hello.head_layouts.get(mine.name)
    if layout is not None:
        pieces = _pieces_of(mine, region, starts[0], layout)
    else:
        pieces = _pieces_like(mine, region, starts, hello, ours)
    return attrs.evolve(mine, pieces=pieces)


def _pieces_like(
    mine: LayerLayout, region: int, starts: Sequence[int], hello: Hello, ours: CacheGeometry
) -> tuple[Piece, ...]:
    """Our own pieces, moved to where the peer's layer (or each half of it) begins."""
    size, rest = divmod(len(mine.pieces), len(starts))
    if rest:
        raise GeometryMismatchError(f"K/V halves of layer {mine.name!r}", "in one part", "apart")
    pieces = []
    for i, piece in enumerate(mine.pieces):
        half = i // size
        skip = piece.offset - mine.pieces[half * size].offset
        # Pieces further apart than a block lie behind all blocks, so where depends on how many there are.
        if abs(skip) >= piece.stride and hello.num_blocks != ours.num_blocks:
            factor = f"number of blocks (on which the layout of layer {mine.name!r} depends)"
            raise GeometryMismatchError(factor, ours.num_blocks, hello.num_blocks)
        pieces.append(attrs.evolve(piece, region=region, offset=starts[half] + skip))
    return tuple(pieces)


def _pieces_of(mine: LayerLayout, region: int, start: int, layout: Sequence[int]) -> tuple[Piece, ...]:
    """The pieces that 0.33 describes: heads, tokens, bytes of a head; strides of block, head, token; K and V planes."""
    heads, tokens, run, block_stride, head_stride, token_stride, *planes = layout
    axes = [("KV", len(planes), planes[-1] - planes[0]), ("H", heads, head_stride), ("N", tokens, token_stride)]
    axes = sorted((axis for axis in axes if axis[1] > 1), key=lambda axis: -axis[2])
    order, own = ",".join(f"{label}={count}" for label, count, _ in axes), _AXES.search(mine.content)
    if own is not None and own[1] != order:
        raise GeometryMismatchError(f"order in a block of layer {mine.name!r}", own[1], order)
    while axes and axes[-1][2] == run:
        run *= axes.pop()[1]
    if math.prod(count for _, count, _ in axes) > MAX_PIECES:
        raise GeometryMismatchError(f"pieces of a block of layer {mine.name!r}", len(mine.pieces), f"over {MAX_PIECES}")
    skips = itertools.product(*(range(0, count * stride, stride) for _, count, stride in axes))
    return tuple(Piece(region, start + planes[0] + sum(skip), block_stride, run) for skip in skips)


def _check_block(hello: Hello, ours: CacheGeometry) -> None:
    """Bytes and tokens of a block, as far as the hello says them."""
    for name, tokens in hello.attention_block_sizes.items():
        if tokens != ours.block_tokens:
            raise GeometryMismatchError(f"block_tokens of layer {name!r}", ours.block_tokens, tokens)
    if not ours.layers:
        return
    # Of the first layer; where K and V lie apart, of one of the two, unless several kernel blocks make a block.
    layer = ours.layers[0]
    whole = sum(piece.nbytes for piece in layer.pieces)
    lengths = {whole, whole // 2} if "KV=2" in layer.content else {whole}
    if hello.block_len not in lengths:
        raise GeometryMismatchError("block_len", " or ".join(map(str, sorted(lengths))), hello.block_len)
