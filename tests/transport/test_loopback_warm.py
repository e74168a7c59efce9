"""Prefaulting and huge pages: quick memory, unchanged bytes, and no error that matters."""

import contextlib
import ctypes
import logging
import mmap

import numpy as np
import pytest

from moriio_transport.base import Region
from moriio_transport.loopback import LoopbackTransport, _libc, _warm

MIB = 1 << 20


@pytest.fixture
def mapping():
    """16 MiB of private memory that was never touched: the map and its address."""
    memory = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def present(address, nbytes):
    """How many pages are in memory."""
    pages = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
    return sum(page & 1 for page in pages)


def test_registered_memory_is_prefaulted_and_unchanged(mapping):
    """After registration and the wait all pages are present, and what was in them still is."""
    memory, address = mapping
    memory[5 * MIB : 5 * MIB + 4] = b"kept"
    with contextlib.closing(LoopbackTransport()) as transport:
        transport.register([Region(address, 16 * MIB)])
        transport.wait_warm()
        assert present(address, 16 * MIB) == 16 * MIB // mmap.PAGESIZE
    assert memory[5 * MIB : 5 * MIB + 5] == b"kept\0"
    assert np.count_nonzero(np.frombuffer(memory, np.uint8)) == 4


def test_parts_of_pages_are_prefaulted(mapping):
    """A region that begins and ends within pages has its first and last byte present."""
    _, address = mapping
    _warm.Warmer([Region(address + 100, 3 * mmap.PAGESIZE)]).wait()
    assert present(address, 4 * mmap.PAGESIZE) == 4


def test_huge_pages_are_asked_for(mapping, monkeypatch):
    """Whole huge pages within a region, and no others, are made huge before the prefault and collapsed after."""
    _, address = mapping
    calls = []
    monkeypatch.setattr(_libc, "madvise", lambda at, nbytes, advice: calls.append((at, at + nbytes, advice)))
    region = Region(address + 100, 16 * MIB - 200)
    _warm.Warmer([region]).wait()
    assert [advice for _, _, advice in calls] == [_libc.MADV_HUGEPAGE, _libc.MADV_POPULATE_WRITE, _libc.MADV_COLLAPSE]
    for start, end, advice in calls:
        if advice != _libc.MADV_POPULATE_WRITE:
            assert start % (2 * MIB) == end % (2 * MIB) == 0
            assert region.address <= start < end <= region.address + region.nbytes


def test_short_memory_is_left_alone(mapping, monkeypatch):
    """Where prefaulting would use up the last memory it is not done."""
    _, address = mapping
    monkeypatch.setattr(_warm, "free_bytes", lambda: _warm._KEEP_FREE_BYTES + 16 * MIB - 1)
    _warm.Warmer([Region(address, 16 * MIB)]).wait()
    assert present(address, 16 * MIB) == 0


def test_free_memory_is_the_least_of_machine_and_limits(monkeypatch, tmp_path):
    """Free memory is what the machine has or, if less, what a limit of either version leaves, the root's or our own."""
    monkeypatch.setattr(_warm, "_CGROUP", tmp_path)
    monkeypatch.setattr(_warm, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("9:name=systemd:/x\n4:memory:/us\n0::/we\n")

    def limit(folder, names, most, used):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (most, used), strict=True):
            (tmp_path / folder / name).write_text(f"{value}\n")

    old, new = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    assert _warm.free_bytes() > MIB
    limit(".", new, "max", 5)
    assert _warm.free_bytes() > MIB
    limit(".", new, 1000, 5)
    assert _warm.free_bytes() == 995
    limit("memory", old, 800, 500)
    assert _warm.free_bytes() == 300
    limit("memory/us", old, 700, 500)
    assert _warm.free_bytes() == 200
    limit("we", new, 110, 10)
    assert _warm.free_bytes() == 100


def test_errors_are_only_logged(mapping, caplog):
    """Memory that cannot be prefaulted, here read-only memory, is logged at level debug and is no error."""
    _, address = mapping
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(16 * MIB), mmap.PROT_READ) == 0
    with caplog.at_level(logging.DEBUG, _warm.__name__):
        _warm.Warmer([Region(address, 16 * MIB)]).wait()
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
