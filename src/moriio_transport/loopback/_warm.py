"""Makes registered memory quick to copy, beside the work that matters.

The kernel pins page by page while it copies between processes, so present and huge pages double the speed.
Prefaulting takes tenths of a second a gigabyte and collapsing into huge pages anything up to a minute where memory
is fragmented: both run on a thread of their own, and every error is only logged, for nothing depends on them.
None of the three kinds of advice changes what the memory holds.
"""

from __future__ import annotations

import logging
import mmap
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from moriio_transport.loopback import _libc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moriio_transport.base import Region

__all__ = ["Warmer"]

_log = logging.getLogger(__name__)

_HUGE_BYTES = 2 << 20
_STEP_BYTES = 32 << 20  # so that close() does not wait long
_KEEP_FREE_BYTES = 2 << 30  # prefaulting is a courtesy: it must never be what runs a machine out of memory
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


class Warmer:
    """A thread that prefaults regions and asks for huge pages, then ends.

    Args:
        regions: in main memory, and mapped until `close`.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = tuple(regions)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moriio-loopback-warm", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until all is done."""
        self._thread.join()

    def close(self) -> None:
        """End early and wait for the call that is under way."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for region in self._regions:
            first = _up(region.address, _HUGE_BYTES)
            last = (region.address + region.nbytes) // _HUGE_BYTES * _HUGE_BYTES
            if first < last:
                _advise(first, last, _libc.MADV_HUGEPAGE)  # before the prefault: what is not there yet comes huge
            for start in range(region.address, region.address + region.nbytes, _STEP_BYTES):
                if self._stop.is_set():
                    return
                end = min(start + _STEP_BYTES, region.address + region.nbytes)
                if free_bytes() < _KEEP_FREE_BYTES + (end - start):
                    _log.debug("loopback: memory is short, the rest is neither prefaulted nor collapsed")
                    return
                _advise(start - start % mmap.PAGESIZE, end, _libc.MADV_POPULATE_WRITE)
                if (huge := max(_up(start, _HUGE_BYTES), first)) < (huge_end := min(_up(end, _HUGE_BYTES), last)):
                    _advise(huge, huge_end, _libc.MADV_COLLAPSE)


def _up(address: int, unit: int) -> int:
    return -(-address // unit) * unit


def _advise(start: int, end: int, advice: int) -> None:
    try:
        _libc.madvise(start, end - start, advice)
    except OSError as error:
        _log.debug("loopback: %d bytes at %#x: %s", end - start, start, error)


def free_bytes() -> int:
    """Bytes that may still be used: the machine's, or what a limit on our control group leaves if that is less."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) << 10
    for limit_file, used_file in _limit_files():
        try:
            limit = limit_file.read_text(encoding="utf-8").strip()
            used = used_file.read_text(encoding="utf-8")
        except OSError:
            continue
        if limit != "max":
            free = min(free, int(limit) - int(used))
    return free


def _limit_files() -> Iterator[tuple[Path, Path]]:
    """Where limit and use may stand: versions 2 and 1, of the group that we see as the root and of our own."""
    for line in ["0::/", "0:memory:/", *_OWN_GROUPS.read_text(encoding="utf-8").splitlines()]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder = _CGROUP / path.lstrip("/")
            yield folder / "memory.max", folder / "memory.current"
        elif controllers == "memory":
            folder = _CGROUP / "memory" / path.lstrip("/")
            yield folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"
