"""Checks of everything on which the engine would end the process instead of raising."""

from __future__ import annotations

import ctypes
import ipaddress
import itertools
import os
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moriio_transport.base import TransportError, TransportUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moriio_transport.base import Region

__all__ = ["check_address", "check_memlock", "check_overlap", "check_rocm_smi", "ipv4_of"]

_CAP_IPC_LOCK: Final = 14


def ipv4_of(host: str) -> str:
    """The address of this host as the engine wants it: dotted IPv4.

    Raises:
        TransportUnavailableError: there is none for this name.
    """
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportUnavailableError(
            f"host {host!r} has no IPv4 address, which MoRI-IO needs ({error}); set kv_connector_extra_config.host_ip"
        ) from None
    return str(found[0][4][0])


def check_address(host: str) -> None:
    """Bind it: the engine ends the process where it cannot.

    Raises:
        TransportUnavailableError: no dotted IPv4 address, or not one of this host.
    """
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address == ipaddress.IPv4Address("255.255.255.255"):
        raise TransportUnavailableError(f"host {host!r}: MoRI-IO needs a dotted IPv4 address that peers can reach")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise TransportUnavailableError(
            f"host {host} is no address of this machine ({error.strerror}); set kv_connector_extra_config.host_ip"
        ) from error


def check_rocm_smi() -> None:
    """ROCm's management library must load and see a GPU: without it the engine ends the process.

    Raises:
        TransportUnavailableError: what was looked for and found.
    """
    given = os.environ.get("MORI_ROCM_SMI_PATH")
    names = [*([given] if given else []), "librocm_smi64.so.1", "librocm_smi64.so", "/opt/rocm/lib/librocm_smi64.so.1"]
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        count = ctypes.c_uint32()
        if library.rsmi_init(ctypes.c_uint64(0)) == 0:
            library.rsmi_num_monitor_devices(ctypes.byref(count))
            library.rsmi_shut_down()
        if count.value:
            return
        raise TransportUnavailableError(
            f"{name} sees no GPU, and MoRI-IO would end the process; pass /dev/kfd and /dev/dri into the container"
        )
    raise TransportUnavailableError(
        f"none of {', '.join(names)} can be loaded, and MoRI-IO would end the process; install ROCm's "
        "rocm-smi-lib or set MORI_ROCM_SMI_PATH"
    )


def check_memlock(regions: Sequence[Region]) -> None:
    """Host memory of these regions fits the limit of what may be locked.

    Raises:
        TransportError: both numbers and what to do.
    """
    wanted = sum(region.nbytes for region in regions if region.device == "cpu")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and wanted > limit and not _may_lock_anyway():
        raise TransportError(
            f"register: {wanted} bytes of host memory must be pinned, the memlock limit is {limit}; raise it "
            "(--ulimit memlock=-1, or LimitMEMLOCK=infinity in the unit)"
        )


def _may_lock_anyway() -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def check_overlap(regions: Sequence[Region]) -> None:
    """No two regions share a byte: letting one go would take the other's key.

    Raises:
        TransportError: names both.
    """
    order = sorted(range(len(regions)), key=lambda index: regions[index].address)
    for one, other in itertools.pairwise(order):
        a, b = regions[one], regions[other]
        if a.device == b.device and a.device_index == b.device_index and a.address + a.nbytes > b.address:
            raise TransportError(f"register: regions {one} ({a}) and {other} ({b}) overlap, expected each byte once")
