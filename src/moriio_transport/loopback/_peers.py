"""The two kinds of peer: another transport of this process, and one of another process of this host.

`open_peer` proves that a description is true before anything is written; `move` proves again, before every slice,
that the peer's transport is still open.  That costs one 32-byte read in some megabytes.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

from moriio_transport.base import Description, PeerRefusedError, TransportError
from moriio_transport.loopback import _identity, _libc
from moriio_transport.loopback._denied import explain
from moriio_transport.loopback._post import PeerGoneError

if TYPE_CHECKING:
    from moriio_transport.loopback._runs import RegionTable, Runs

__all__ = ["LocalPeer", "Peer", "ProcessPeer", "open_peer"]


class LocalPeer:
    """A transport of this process: memmove, one run after the other.

    Args:
        identity: the other transport's.
        regions: its regions.
    """

    death_fd: int | None = None  # a peer in our process does not die alone

    def __init__(self, identity: _identity.Identity, regions: RegionTable) -> None:
        self.regions = regions
        self._identity = identity

    def move(self, runs: Runs, start: int, stop: int, *, write: bool) -> int:
        """Copy the runs `[start, stop)`; returns their bytes.

        Raises:
            PeerGoneError: the other transport is closed.
        """
        local, remote = runs.local[start:stop], runs.remote[start:stop]
        source, target = (local, remote) if write else (remote, local)
        with self._identity.lock:
            if self._identity.closed:
                raise PeerGoneError("the peer, in this process, has closed its transport")
            for to, at, nbytes in zip(target[:, 0].tolist(), source[:, 0].tolist(), local[:, 1].tolist(), strict=True):
                ctypes.memmove(to, at, nbytes)
        return runs.size(start, stop)

    def close(self) -> None:
        """Nothing is held."""


class ProcessPeer:
    """A transport of another process: process_vm_readv and writev.

    Args:
        engine: its proven description.
        seal: what lies at `engine.seal_address` while its transport is open.
        death_fd: its pidfd, readable when the process has ended; owned by this object.
        regions: its regions.
    """

    def __init__(self, engine: _identity.Engine, seal: bytes, death_fd: int, regions: RegionTable) -> None:
        self.regions = regions
        self.death_fd: int | None = death_fd
        self._pid, self._seal_address, self._seal = engine.pid, engine.seal_address, seal

    def move(self, runs: Runs, start: int, stop: int, *, write: bool) -> int:
        """Copy the runs `[start, stop)`, or the first bytes of them; returns how many.

        Raises:
            PeerGoneError: the seal has changed: the transport is closed, or another process has the pid.
            TransportError: with cause and what to do.
        """
        self.check()
        local, remote = runs.iovecs(start)
        try:
            moved = _libc.copy_between(self._pid, local, remote, stop - start, write=write)
        except OSError as error:
            raise TransportError(explain(error, self._pid)) from error
        if moved == 0:
            raise TransportError(f"process {self._pid}: the kernel copied no byte")
        return moved

    def check(self) -> None:
        """Read the seal.

        Raises:
            PeerGoneError: it is not there any more.
            TransportError: it cannot be read; with cause and what to do.
        """
        try:
            found = _libc.read_process(self._pid, self._seal_address, len(self._seal))
        except OSError as error:
            if error.errno == errno.EFAULT:
                found = b""
            else:
                raise TransportError(explain(error, self._pid)) from error
        if found != self._seal:
            raise PeerGoneError(f"process {self._pid} is not, or not any more, the peer that was described")

    def close(self) -> None:
        """Give the pidfd back.  A slice may still be under way: it does not need it."""
        if self.death_fd is not None:
            os.close(self.death_fd)
            self.death_fd = None


Peer = LocalPeer | ProcessPeer


def open_peer(description: Description, engine: _identity.Engine, regions: RegionTable) -> Peer:
    """Prove that a decoded description is true.

    Raises:
        PeerGoneError: the described process has ended.
        PeerRefusedError: the description is not true, or we may not access the process.
    """
    boot_id, namespace = _identity.own_place()
    if engine.boot_id != boot_id:
        raise PeerRefusedError("the peer runs on another host, or ran before a reboot: loopback serves one host only")
    if engine.pid_namespace != namespace:
        raise PeerRefusedError(
            f"the peer's PID namespace is {engine.pid_namespace}, ours {namespace}: "
            "containers need one PID namespace for both (docker run --pid=container:NAME or --pid=host)"
        )
    if engine.pid == os.getpid():
        identity = _identity.find_local(engine)
        same = identity is not None and identity.description.engine == description.engine
        if identity is None or not same or (engine.seals_regions and identity.description != description):
            raise PeerRefusedError("the description names this process, but none of its open transports")
        return LocalPeer(identity, regions)
    return _open_process(description, engine, regions)


def _open_process(description: Description, engine: _identity.Engine, regions: RegionTable) -> ProcessPeer:
    try:
        pidfd = os.pidfd_open(engine.pid)
    except ProcessLookupError as error:
        raise PeerGoneError(f"process {engine.pid} has ended") from error
    except OSError as error:
        raise PeerRefusedError(f"pidfd_open({engine.pid}): {error.strerror}; loopback needs Linux 5.3") from error
    peer = ProcessPeer(engine, engine.seal(description.regions), pidfd, regions)
    try:
        _prove(peer, engine)
    except PeerGoneError:
        peer.close()
        raise
    except (OSError, TransportError) as error:
        peer.close()
        raise PeerRefusedError(str(error)) from error
    return peer


def _prove(peer: ProcessPeer, engine: _identity.Engine) -> None:
    # In this order: the pidfd holds whoever has the pid now, and the start time says whether that is the peer.
    if _identity.start_time(engine.pid) != engine.start_time:
        raise PeerGoneError(f"process {engine.pid} has ended, and another has its id")
    try:
        peer.check()
    except PeerGoneError as error:
        # The process lives, so this proves nothing: its transport may be closed, or the description be made up.
        raise PeerRefusedError(str(error)) from error
