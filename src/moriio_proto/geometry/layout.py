"""Block layouts: for every layer, which byte runs of which region hold block *b*.

A block of a layer is a fixed list of *pieces*.  Piece `p` of block `b` is the contiguous run
`[offset + b * stride, + nbytes)` of its region.  Every cache that vLLM makes is of that form:

    standard [blocks, heads, tokens, content]         1 piece
    interleaved K/V [blocks, 2, ...]                   1 piece, or 2 where K and V are not adjacent
    split K/V [2, blocks, ...]                         2 pieces, one per half
    MLA [blocks, tokens, latent]                       1 piece
    several kernel blocks per scheduler block          one piece each, unless adjacent
    all layers in one shared allocation                the same region, another offset

Offsets are bytes and 64 bit; a block is always a *scheduler* block of `block_tokens` tokens.
"""

from __future__ import annotations

from typing import Annotated, Any

import attrs
import msgspec
from msgspec import Meta

from moriio_proto.errors import DecodeError

__all__ = [
    "MAX_BLOCKS",
    "MAX_GROUPS",
    "MAX_LAYERS",
    "MAX_PIECES",
    "MAX_REGIONS",
    "CacheGeometry",
    "GeometryMismatchError",
    "GeometryWire",
    "LayerLayout",
    "Piece",
    "check_compatible",
]

# Limits of one geometry, ours or a peer's; each far above what vLLM makes.
MAX_LAYERS = 4096
MAX_PIECES = 256  # of one block of one layer
MAX_REGIONS = 4096
MAX_GROUPS = 64  # KV cache groups
MAX_BLOCKS = 2**31 - 1  # block ids are signed 32 bit in vLLM
MAX_BYTES = 2**63 - 1  # offsets are computed in signed 64 bit


class GeometryMismatchError(ValueError):
    """Two sides whose caches cannot be copied into each other; `factor` names what differs."""

    def __init__(self, factor: str, ours: object, theirs: object) -> None:
        super().__init__(f"{factor} differs: ours is {ours!r}, the peer's is {theirs!r}")
        self.factor, self.ours, self.theirs = factor, ours, theirs


@attrs.frozen
class Piece:
    """One contiguous run of every block (all in bytes)."""

    region: int  # index into the registered regions
    offset: int  # of block 0, from the region's start
    stride: int  # from one block to the next
    nbytes: int  # of the run


@attrs.frozen
class LayerLayout:
    """The cache of one layer.

    `content` says what the bytes of a block mean (element type, order and sizes of the inner dimensions), so
    that two layers with the same content can be copied byte by byte, whatever their strides.
    """

    name: str
    pieces: tuple[Piece, ...]
    content: str
    group: int = 0  # KV cache group


_Size = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
_Count = Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]


class _PieceWire(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    region: Annotated[int, Meta(ge=0, lt=MAX_REGIONS)]
    offset: _Size
    stride: _Size
    nbytes: _Size


class _LayerWire(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=512)]
    content: Annotated[str, Meta(max_length=512)]
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    pieces: Annotated[list[_PieceWire], Meta(min_length=1, max_length=MAX_PIECES)]


class GeometryWire(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A geometry as the handshake carries it: nested lists, checked while they are decoded."""

    num_blocks: _Count
    block_tokens: _Count
    region_bytes: Annotated[list[_Size], Meta(max_length=MAX_REGIONS)]
    layers: Annotated[list[_LayerWire], Meta(max_length=MAX_LAYERS)]


@attrs.frozen
class CacheGeometry:
    """All caches of one worker: layers over registered regions.

    Raises:
        ValueError: a piece of a block outside its region, a layer named twice, a number out of range.
    """

    layers: tuple[LayerLayout, ...]
    region_bytes: tuple[int, ...]  # size of each registered region
    num_blocks: int  # scheduler blocks; ids are [0, num_blocks)
    block_tokens: int  # tokens of one scheduler block

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.num_blocks <= MAX_BLOCKS:
            raise ValueError(f"num_blocks={self.num_blocks}: expected within [1, {MAX_BLOCKS}]")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens={self.block_tokens}: expected at least 1")
        if any(not 0 <= size <= MAX_BYTES for size in self.region_bytes):
            raise ValueError(f"region_bytes={self.region_bytes}: expected sizes within [0, {MAX_BYTES}]")
        if len({layer.name for layer in self.layers}) != len(self.layers):
            raise ValueError("layers: expected different names")
        for layer in self.layers:
            self._check_layer(layer)

    def _check_layer(self, layer: LayerLayout) -> None:
        if not layer.pieces:
            raise ValueError(f"layer {layer.name!r}: expected at least one piece")
        for piece in layer.pieces:
            if not 0 <= piece.region < len(self.region_bytes):
                raise ValueError(f"layer {layer.name!r}: region {piece.region} of {len(self.region_bytes)}")
            if piece.offset < 0 or piece.stride < 0 or piece.nbytes < 1:
                raise ValueError(f"layer {layer.name!r}: {piece}: expected no negative number and at least one byte")
            if piece.stride < piece.nbytes and self.num_blocks > 1:
                raise ValueError(f"layer {layer.name!r}: {piece}: a block overlaps the next")
            end = piece.offset + (self.num_blocks - 1) * piece.stride + piece.nbytes
            if end > self.region_bytes[piece.region]:
                size = self.region_bytes[piece.region]
                raise ValueError(f"layer {layer.name!r}: {piece} ends at {end}, its region has {size} bytes")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(piece.nbytes for layer in self.layers for piece in layer.pieces)

    def to_wire(self) -> list[Any]:
        """Nested lists of ints and strings: what `from_wire` reads."""
        layers = [
            [y.name, y.content, y.group, [[p.region, p.offset, p.stride, p.nbytes] for p in y.pieces]]
            for y in self.layers
        ]
        return [self.num_blocks, self.block_tokens, list(self.region_bytes), layers]

    @classmethod
    def from_wire(cls, obj: object) -> CacheGeometry:
        """Read what `to_wire` wrote (plain lists, or `GeometryWire` when it was decoded in one pass).

        Raises:
            DecodeError: not of that form, a limit exceeded, or not a valid geometry.
        """
        try:
            wire = msgspec.convert(obj, GeometryWire)
            layers = tuple(
                LayerLayout(
                    y.name, tuple(Piece(p.region, p.offset, p.stride, p.nbytes) for p in y.pieces), y.content, y.group
                )
                for y in wire.layers
            )
            return cls(layers, tuple(wire.region_bytes), wire.num_blocks, wire.block_tokens)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DecodeError(f"geometry: {error}") from None


def check_compatible(ours: CacheGeometry, theirs: CacheGeometry) -> None:
    """Whether blocks of the two sides can be copied into each other byte by byte.

    Layers are paired by name, never by position; strides, offsets, regions and block counts may differ.

    Raises:
        GeometryMismatchError: names the first factor that differs.
    """
    if ours.block_tokens != theirs.block_tokens:
        raise GeometryMismatchError("block_tokens", ours.block_tokens, theirs.block_tokens)
    by_name = {layer.name: layer for layer in theirs.layers}
    names = {layer.name for layer in ours.layers}
    if names != by_name.keys():
        only_ours, only_theirs = sorted(names - by_name.keys()), sorted(by_name.keys() - names)
        raise GeometryMismatchError("layer names", _shown(only_ours), _shown(only_theirs))
    for layer in ours.layers:
        other = by_name[layer.name]
        factors: tuple[tuple[str, object, object], ...] = (
            ("content", layer.content, other.content),
            ("group", layer.group, other.group),
            ("piece lengths", [p.nbytes for p in layer.pieces], [p.nbytes for p in other.pieces]),
        )
        for factor, mine, its in factors:
            if mine != its:
                raise GeometryMismatchError(f"{factor} of layer {layer.name!r}", mine, its)


def _shown(names: list[str]) -> str:
    """A few of the names that only one side has."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "nothing more"
