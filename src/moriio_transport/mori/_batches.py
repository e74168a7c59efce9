"""From a plan to batches: what one call of the engine gets, checked against both sides' regions before.

A batch lies within one pair of regions, as sessions do, and in its bytes and operations within the limits given, save
that a run longer than the limit is a batch of its own.  The engine merges neighbours within a batch, so no work request
is longer than the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from moriio_transport.base import TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moriio_proto.geometry import TransferPlan

__all__ = ["Batch", "Pair", "cut"]

Pair: TypeAlias = "tuple[int, int]"  # local region, remote region
_Offsets: TypeAlias = npt.NDArray[np.uint64]


@attrs.frozen(eq=False)
class Batch:
    """Runs of one pair of regions: offsets and sizes, arrays of shape [ops]."""

    pair: Pair
    local: _Offsets
    remote: _Offsets
    sizes: _Offsets
    nbytes: int

    @property
    def ops(self) -> int:
        """Runs."""
        return len(self.sizes)


def _check(side: str, sizes: Sequence[int], region: npt.NDArray[np.int32], offset: _Offsets, nbytes: _Offsets) -> None:
    known = np.array(sizes, np.uint64)
    unknown = (region < 0) | (region >= len(known))
    if unknown.any():
        run = int(unknown.argmax())
        raise TransportError(f"run {run}: {side} region {region[run]}, expected within [0, {len(known)})")
    size = known[region]
    outside = (offset > size) | (nbytes > size - offset)  # the difference wraps only where the first is true
    if outside.any():
        run = int(outside.argmax())
        raise TransportError(
            f"run {run}: {side} bytes [{offset[run]}, + {nbytes[run]}) of region {region[run]}, which has {size[run]}"
        )


def cut(plan: TransferPlan, ours: Sequence[int], theirs: Sequence[int], max_ops: int, max_bytes: int) -> list[Batch]:
    """The batches of a plan, in order of their pairs; none for a plan without runs.

    Args:
        plan: byte runs.
        ours: bytes of each of our regions.
        theirs: bytes of each region of the peer.
        max_ops: runs of a batch, at least 1.
        max_bytes: of a batch of more than one run.

    Raises:
        TransportError: a run leaves its region on either side; names the first one.
    """
    _check("local", ours, plan.local_region, plan.local_offset, plan.nbytes)
    _check("remote", theirs, plan.remote_region, plan.remote_offset, plan.nbytes)
    if not len(plan):
        return []
    key = plan.local_region.astype(np.int64) * len(theirs) + plan.remote_region
    local, remote, sizes = plan.local_offset, plan.remote_offset, plan.nbytes
    if (key != key[0]).any():
        order = key.argsort(kind="stable")
        key, local, remote, sizes = key[order], local[order], remote[order], sizes[order]
    borders = [*(np.flatnonzero(np.diff(key)) + 1).tolist(), len(key)]
    ends = sizes.cumsum()
    batches: list[Batch] = []
    at = 0
    for border in borders:
        pair = divmod(int(key[at]), len(theirs))
        while at < border:
            before = int(ends[at] - sizes[at])
            stop = int(ends.searchsorted(np.uint64(before + max_bytes), "right"))
            stop = min(max(stop, at + 1), at + max_ops, border)
            part = slice(at, stop)
            batches.append(Batch(pair, local[part], remote[part], sizes[part], int(ends[stop - 1]) - before))
            at = stop
    return batches
