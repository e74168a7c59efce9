"""From a plan (region, offset) to the iovecs that the kernel takes, checked on the way.

All checks come before any address arithmetic, on whole arrays: a plan with one bad run is refused as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moriio_transport.base import TransportError
from moriio_transport.loopback._libc import IOV_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moriio_proto.geometry import TransferPlan

__all__ = ["IOVEC_BYTES", "SLICE_BYTES", "RegionTable", "Runs", "resolve"]

IOVEC_BYTES = 16
# A system call cannot be called back: this bounds what still moves after release(), or after `not_after`, to about
# a millisecond.  Larger slices gain nothing that can be measured.
SLICE_BYTES = 4 << 20

_U64: type[np.uint64] = np.uint64


class RegionTable:
    """The registered regions of one side.

    Args:
        side: "local" or "remote", for messages.
        regions: (address, nbytes) of each; all within the address space.
    """

    def __init__(self, side: str, regions: Sequence[tuple[int, int]]) -> None:
        self._side = side
        self._bases = np.array([address for address, _ in regions], _U64)
        self._sizes = np.array([nbytes for _, nbytes in regions], _U64)

    def addresses(
        self, region: npt.NDArray[np.int32], offset: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Addresses of runs, each array of shape [runs].

        Raises:
            TransportError: a run does not lie within a registered region; names the first one.
        """
        try:
            size = self._sizes[region.view(np.uint32)]  # unsigned: -1 is out of range, not the last
        except IndexError:
            first = int(np.flatnonzero((region < 0) | (region >= len(self._sizes)))[0])
            raise TransportError(
                f"run {first}: {self._side} region {region[first]}, expected within [0, {len(self._sizes)})"
            ) from None
        outside = (offset > size) | (nbytes > size - offset)  # the difference wraps only where the first is true
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            raise TransportError(
                f"run {first}: {self._side} bytes [{offset[first]}, + {nbytes[first]}) of region {region[first]}, "
                f"which has {size[first]}"
            )
        return self._bases[region] + offset


class Runs:
    """Equally long iovecs of both sides.

    Attributes:
        local, remote: uint64 arrays [runs, 2] of (address, nbytes).
        nbytes: of all runs together.
    """

    def __init__(self, local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64]) -> None:
        self.local, self.remote = local, remote
        self._local_at, self._remote_at = local.ctypes.data, remote.ctypes.data
        self._ends = np.cumsum(local[:, 1], dtype=np.int64)
        self.nbytes = int(self._ends[-1]) if len(local) else 0

    def __len__(self) -> int:
        return len(self.local)

    def iovecs(self, start: int) -> tuple[int, int]:
        """Where the iovecs of run `start` and of those after it lie: local, remote."""
        return self._local_at + IOVEC_BYTES * start, self._remote_at + IOVEC_BYTES * start

    def size(self, start: int, stop: int) -> int:
        """Bytes of the runs `[start, stop)`."""
        return int(self._ends[stop - 1]) - (int(self._ends[start - 1]) if start else 0)

    def slice_end(self, start: int) -> int:
        """The end of the slice that begins with run `start`: one run at least, then as the two limits allow."""
        begin = int(self._ends[start - 1]) if start else 0
        fits = int(self._ends.searchsorted(begin + SLICE_BYTES, "right"))
        return min(max(fits, start + 1), start + IOV_MAX, len(self.local))

    def rest(self, start: int, stop: int, moved: int) -> Runs:
        """What is left of the runs `[start, stop)` after their first `moved` bytes, fewer than they have."""
        ends = np.cumsum(self.local[start:stop, 1], dtype=np.int64)
        first = int(ends.searchsorted(moved, "right"))
        skip = _U64(moved - (int(ends[first - 1]) if first else 0))
        local, remote = self.local[start + first : stop].copy(), self.remote[start + first : stop].copy()
        for iovecs in (local, remote):
            iovecs[0, 0] += skip
            iovecs[0, 1] -= skip
        return Runs(local, remote)


def resolve(plan: TransferPlan, ours: RegionTable, theirs: RegionTable) -> Runs:
    """The addresses of a plan.

    Raises:
        TransportError: a run leaves a region on either side; nothing was computed.
    """
    local, remote = np.empty((len(plan), 2), _U64), np.empty((len(plan), 2), _U64)
    local[:, 0] = ours.addresses(plan.local_region, plan.local_offset, plan.nbytes)
    remote[:, 0] = theirs.addresses(plan.remote_region, plan.remote_offset, plan.nbytes)
    local[:, 1] = remote[:, 1] = plan.nbytes
    return Runs(local, remote)
