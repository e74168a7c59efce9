"""Transfer plans: which byte runs move a list of blocks from one side's cache into the other's.

`Pairing` is made once per pair of geometries and holds, per layer pair, the pieces as numpy columns.  A plan is
then a handful of vector operations: `offset + block * stride` for both sides, a merge of neighbours that are
contiguous on *both* sides, and a cut at the transport's longest operation.  Block ids are checked against both
geometries before any address is computed; every geometry was checked to lie inside its regions when it was made.
So no run of a plan can leave a region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from moriio_proto.errors import ProtocolError
from moriio_proto.geometry.layout import CacheGeometry, LayerLayout, check_compatible

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_OP_BYTES", "Blocks", "Pairing", "PlanError", "TransferPlan", "plan_blocks", "split"]

MAX_OP_BYTES = 2**32 - 1  # longest operation when the transport names no limit

_I32: type[np.int32] = np.int32
_U64: type[np.uint64] = np.uint64


class PlanError(ProtocolError):
    """Blocks or layers that one of the two sides does not have; nothing was planned."""


@attrs.frozen(eq=False)
class TransferPlan:
    """Byte runs to copy: five parallel arrays of one length; no run is empty.

    Offsets count from the start of their region.  The arrays are read-only by convention: plans are shared.
    """

    local_region: npt.NDArray[np.int32]
    local_offset: npt.NDArray[np.uint64]
    remote_region: npt.NDArray[np.int32]
    remote_offset: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        """Sum of all runs."""
        return int(self.nbytes.sum())


def _empty() -> TransferPlan:
    region, offset = np.empty(0, _I32), np.empty(0, _U64)
    return TransferPlan(region, offset, region, offset, offset)


Blocks: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"  # flat list of scheduler block ids
_Column: TypeAlias = npt.NDArray[np.int64]


@attrs.frozen(eq=False)
class _Columns:
    """Pieces and their partners on the other side: columns of shape [pieces, 1], to be broadcast over blocks."""

    local_region: npt.NDArray[np.int32]
    local_offset: _Column
    local_stride: _Column
    remote_region: npt.NDArray[np.int32]
    remote_offset: _Column
    remote_stride: _Column
    nbytes: _Column
    single_region: bool  # all pieces lie in one region on each side


_Row: TypeAlias = tuple[int, int, int, int, int, int, int]  # region, offset, stride of both sides; bytes


def _columns(rows: list[_Row]) -> _Columns:
    """Merge pieces that are adjacent on both sides in every block (of one layer or of several), then transpose."""
    merged: list[_Row] = []
    for row in sorted(rows):
        region, offset, stride, its_region, its_offset, its_stride, nbytes = row
        if merged:
            *place, length = merged[-1]
            if place == [region, offset - length, stride, its_region, its_offset - length, its_stride]:
                merged[-1] = (*merged[-1][:6], length + nbytes)
                continue
        merged.append(row)
    table = np.array(merged, np.int64).reshape(-1, 7)
    lr, lo, ls, rr, ro, rs, nb = (np.ascontiguousarray(table[:, [c]]) for c in range(7))
    single = len(merged) > 0 and bool((lr == lr[0]).all() and (rr == rr[0]).all())
    return _Columns(lr.astype(_I32), lo, ls, rr.astype(_I32), ro, rs, nb, single)


def _paired(ours: LayerLayout, theirs: LayerLayout) -> list[_Row]:
    return [
        (p.region, p.offset, p.stride, q.region, q.offset, q.stride, p.nbytes)
        for p, q in zip(ours.pieces, theirs.pieces, strict=True)
    ]


class Pairing:
    """Two compatible geometries, prepared for planning.

    Layers are paired by name; `layer_start` and `layer_end` index the local geometry's layers.

    Args:
        local: our caches.
        remote: the peer's caches.

    Raises:
        GeometryMismatchError: the caches cannot be copied into each other; names the factor.
    """

    def __init__(self, local: CacheGeometry, remote: CacheGeometry) -> None:
        check_compatible(local, remote)
        self.local, self.remote = local, remote
        by_name = {layer.name: layer for layer in remote.layers}
        self._rows = [_paired(layer, by_name[layer.name]) for layer in local.layers]
        self._ranges: dict[tuple[int, int], _Columns] = {}  # of these a worker uses few: one layer, or all

    def plan(
        self,
        layer_start: int,
        layer_end: int,
        local_blocks: Blocks,
        remote_blocks: Blocks,
        max_op_bytes: int = MAX_OP_BYTES,
    ) -> TransferPlan:
        """Runs that copy block `local_blocks[i]` to or from `remote_blocks[i]` in the layers `[start, end)`.

        Args:
            layer_start: index of the first local layer.
            layer_end: one past the last.
            local_blocks: scheduler block ids on our side.
            remote_blocks: as many on the peer's side.
            max_op_bytes: no run is longer.

        Returns:
            Runs that cover each block of each layer once, in no promised order.

        Raises:
            PlanError: a layer or block that one side does not have, lists of different length, a limit below 1.
        """
        columns = self._range(layer_start, layer_end)
        ours = _block_ids("local", local_blocks, self.local.num_blocks)
        theirs = _block_ids("remote", remote_blocks, self.remote.num_blocks)
        if len(ours) != len(theirs):
            raise PlanError(f"{len(ours)} local blocks for {len(theirs)} remote blocks: expected as many")
        if max_op_bytes < 1:
            raise PlanError(f"max_op_bytes={max_op_bytes}: expected at least 1")
        if not len(ours) or not len(columns.nbytes):
            return _empty()
        return _runs(columns, ours, theirs, max_op_bytes)

    def _range(self, start: int, end: int) -> _Columns:
        found = self._ranges.get((start, end))
        if found is None:
            if not 0 <= start <= end <= len(self.local.layers):
                raise PlanError(f"layers [{start}, {end}): expected within [0, {len(self.local.layers)})")
            found = _columns([row for rows in self._rows[start:end] for row in rows])
            self._ranges[start, end] = found
        return found


def _block_ids(side: str, blocks: Blocks, num_blocks: int) -> npt.NDArray[np.int64]:
    try:
        ids = np.asarray(blocks, np.int64)
    except (OverflowError, TypeError, ValueError):
        raise PlanError(f"{side} blocks: expected a flat list of 64-bit integers") from None
    if ids.ndim != 1:
        raise PlanError(f"{side} blocks: expected a flat list, not {ids.ndim} dimensions")
    if len(ids) and ids.view(_U64).max() >= num_blocks:  # a negative id is a huge unsigned one
        bad = ids[(ids < 0) | (ids >= num_blocks)][0]
        raise PlanError(f"{side} block {bad}: expected within [0, {num_blocks})")
    return ids


def _runs(
    columns: _Columns, ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64], max_op_bytes: int
) -> TransferPlan:
    """Addresses of all pieces of all blocks, neighbours merged, long runs cut."""
    count = len(ours)
    local = (columns.local_offset + columns.local_stride * ours).ravel()
    remote = (columns.remote_offset + columns.remote_stride * theirs).ravel()
    nbytes = columns.nbytes.repeat(count)
    local_region = columns.local_region.repeat(count)
    remote_region = columns.remote_region.repeat(count)
    joined = (local[1:] == local[:-1] + nbytes[:-1]) & (remote[1:] == remote[:-1] + nbytes[:-1])
    if not columns.single_region:
        joined &= (local_region[1:] == local_region[:-1]) & (remote_region[1:] == remote_region[:-1])
    if joined.any():
        first = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        local, remote = local[first], remote[first]
        local_region, remote_region = local_region[first], remote_region[first]
        nbytes = np.add.reduceat(nbytes, first)
    plan = TransferPlan(local_region, local.view(_U64), remote_region, remote.view(_U64), nbytes.view(_U64))
    return plan if nbytes.max() <= max_op_bytes else _cut(plan, max_op_bytes)


def _cut(plan: TransferPlan, max_op_bytes: int) -> TransferPlan:
    """Replace every run longer than the limit by consecutive runs of at most the limit."""
    nbytes = plan.nbytes.view(np.int64)
    parts = -(-nbytes // max_op_bytes)
    run = np.repeat(np.arange(len(plan)), parts)
    part = np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)
    skip = part * max_op_bytes
    return TransferPlan(
        plan.local_region[run],
        plan.local_offset[run] + skip.view(_U64),
        plan.remote_region[run],
        plan.remote_offset[run] + skip.view(_U64),
        np.minimum(nbytes[run] - skip, max_op_bytes).view(_U64),
    )


def split(plan: TransferPlan, max_ops: int) -> list[TransferPlan]:
    """Cut a plan into plans of at most `max_ops` runs each, in order; an empty plan gives an empty list.

    Raises:
        PlanError: `max_ops` below 1.
    """
    if max_ops < 1:
        raise PlanError(f"max_ops={max_ops}: expected at least 1")
    if 0 < len(plan) <= max_ops:
        return [plan]
    fields = [getattr(plan, f.name) for f in attrs.fields(TransferPlan)]
    return [TransferPlan(*(f[at : at + max_ops] for f in fields)) for at in range(0, len(plan), max_ops)]


def plan_blocks(
    local: CacheGeometry,
    remote: CacheGeometry,
    layers: Sequence[int] | slice,
    local_blocks: Blocks,
    remote_blocks: Blocks,
    max_op_bytes: int = MAX_OP_BYTES,
) -> TransferPlan:
    """One plan without a prepared `Pairing`: for tests and tools.

    Args:
        local: our caches.
        remote: the peer's caches.
        layers: indices into `local.layers`, each within it.
        local_blocks: scheduler block ids on our side.
        remote_blocks: as many on the peer's side.
        max_op_bytes: no run is longer.

    Raises:
        GeometryMismatchError: the caches cannot be copied into each other.
        PlanError: as `Pairing.plan`.
    """
    pairing = Pairing(local, remote)
    indices = range(len(local.layers))[layers] if isinstance(layers, slice) else layers
    plans = [pairing.plan(i, i + 1, local_blocks, remote_blocks, max_op_bytes) for i in indices]
    names = [f.name for f in attrs.fields(TransferPlan)]
    return TransferPlan(*(np.concatenate([getattr(p, name) for p in (_empty(), *plans)]) for name in names))
