"""The six Linux calls that the loopback transport needs and Python does not have.

Every call is made through `ctypes.CDLL`, which gives the interpreter lock back while it runs.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

__all__ = [
    "IOV_MAX",
    "MADV_COLLAPSE",
    "MADV_HUGEPAGE",
    "MADV_POPULATE_WRITE",
    "allow_every_tracer",
    "copy_between",
    "is_mapped",
    "madvise",
    "read_process",
]

IOV_MAX = 1024  # entries of one vector that the kernel takes

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_MS_ASYNC = 1

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_writev = _libc.process_vm_writev
for _call in (_readv, _writev):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    _call.restype = ctypes.c_ssize_t
for _call in (_libc.madvise, _libc.msync):
    _call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _call.restype = ctypes.c_int


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _raise_errno(call: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{call}: {os.strerror(number)}")


def copy_between(pid: int, local: int, remote: int, count: int, *, write: bool) -> int:
    """One process_vm_writev (or readv): copy `count` runs, in order.

    Args:
        pid: the other process.
        local: address of `count` iovecs (address, length; 64 bit each) of this process.
        remote: address of as many iovecs of the other process, with the same lengths.
        count: at most `IOV_MAX`.
        write: True copies local to remote.

    Returns:
        Bytes copied; fewer than asked for where a page is missing on the way.

    Raises:
        OSError: EPERM, ESRCH, EFAULT and others, when no byte was copied.
    """
    moved: int = (_writev if write else _readv)(pid, local, count, remote, count, 0)
    if moved < 0:
        _raise_errno("process_vm_writev" if write else "process_vm_readv")
    return moved


def read_process(pid: int, address: int, nbytes: int) -> bytes:
    """Read up to `nbytes` bytes at `address` of another process.

    Raises:
        OSError: EPERM, ESRCH or EFAULT, as the kernel says.
    """
    buffer = ctypes.create_string_buffer(nbytes)
    local = _IoVec(ctypes.addressof(buffer), nbytes)
    remote = _IoVec(address, nbytes)
    moved = copy_between(pid, ctypes.addressof(local), ctypes.addressof(remote), 1, write=False)
    return buffer.raw[:moved]


def allow_every_tracer() -> None:
    """Let every process of this user copy from and to this one where the Yama module restricts it.

    Raises:
        OSError: anything but EINVAL, which only says that there is no Yama.
    """
    if _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0) != 0 and ctypes.get_errno() != errno.EINVAL:
        _raise_errno("prctl(PR_SET_PTRACER)")


def madvise(address: int, nbytes: int, advice: int) -> None:
    """Advise the kernel about `[address, address + nbytes)`; `address` must be page aligned.

    Raises:
        OSError: the kernel does not take this advice for these pages.
    """
    if _libc.madvise(address, nbytes, advice) != 0:
        _raise_errno(f"madvise({advice})")


def is_mapped(address: int, nbytes: int) -> bool:
    """Whether all pages of `[address, address + nbytes)` belong to a mapping; touches none of them."""
    start = address - address % mmap.PAGESIZE
    # MS_ASYNC has done nothing since Linux 2.6.19 but to walk the range and to answer ENOMEM at a hole.
    return int(_libc.msync(start, address + nbytes - start, _MS_ASYNC)) == 0
