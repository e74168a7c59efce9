"""What the RDMA devices of this host say of themselves, through libibverbs as the engine loads it.

Read before the engine is made, because it aborts the process, waits for ever or quietly takes another path where a
device is not what it expects.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs

from moriio_transport.base import TransportError, TransportUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moriio_transport.base import Region

__all__ = ["Port", "active_ports", "read_ports", "try_pin"]

_ACTIVE: Final = 4  # enum ibv_port_state
_ACCESS: Final = 1 | 2 | 4  # local write, remote write, remote read
_MAX_PORTS: Final = 16
_PCI: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
STATES: Final = {1: "DOWN", 2: "INIT", 3: "ARMED", 4: "ACTIVE", 5: "ACTIVE_DEFER"}


class _Device(ctypes.Structure):
    """Head of struct ibv_device."""

    _fields_ = (
        ("ops", ctypes.c_void_p * 2),
        ("node_type", ctypes.c_int),
        ("transport_type", ctypes.c_int),
        ("name", ctypes.c_char * 64),
        ("dev_name", ctypes.c_char * 64),
        ("dev_path", ctypes.c_char * 256),
        ("ibdev_path", ctypes.c_char * 256),
    )


class _PortAttributes(ctypes.Structure):
    """Head of struct ibv_port_attr, with room for the rest."""

    _fields_ = (
        ("state", ctypes.c_int),
        ("max_mtu", ctypes.c_int),
        ("active_mtu", ctypes.c_int),
        ("gid_table_length", ctypes.c_int),
        ("capabilities", ctypes.c_uint32),
        ("max_message", ctypes.c_uint32),
        ("rest", ctypes.c_char * 128),
    )


@attrs.frozen
class Port:
    """One port of one device."""

    device: str
    number: int
    state: str
    max_message: int  # bytes of the longest message
    pci: bool  # the device has a PCI address; the engine never stops looking for one

    @property
    def active(self) -> bool:
        """It carries traffic."""
        return self.state == "ACTIVE"


def _load() -> Any:
    errors = []
    for name in ("libibverbs.so", "libibverbs.so.1"):  # the engine's order
        try:
            library = ctypes.CDLL(name, use_errno=True)
        except OSError as error:
            errors.append(str(error))
            continue
        library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.POINTER(_Device))
        for function in ("ibv_open_device", "ibv_alloc_pd", "ibv_reg_mr"):
            getattr(library, function).restype = ctypes.c_void_p
        return library
    raise TransportUnavailableError(
        f"backend rdma: libibverbs cannot be loaded ({'; '.join(errors)}); install rdma-core's libibverbs1 and the "
        "userspace provider of the NIC"
    )


@contextlib.contextmanager
def _devices(library: Any) -> Iterator[list[Any]]:
    """Pointers to the devices that `MORI_RDMA_DEVICES` leaves."""
    count = ctypes.c_int()
    found = library.ibv_get_device_list(ctypes.byref(count))
    try:
        yield [found[i] for i in range(count.value if found else 0) if _chosen(found[i].contents.name.decode())]
    finally:
        if found:
            library.ibv_free_device_list(found)


def _chosen(name: str) -> bool:
    text = os.environ.get("MORI_RDMA_DEVICES", "")
    if not text:
        return True
    listed = name in (part.strip().split(":")[0] for part in text.lstrip("^").split(","))
    return listed is not text.startswith("^")


@contextlib.contextmanager
def _opened(library: Any, device: Any) -> Iterator[ctypes.c_void_p | None]:
    context = library.ibv_open_device(device)
    if not context:
        yield None
        return
    try:
        yield ctypes.c_void_p(context)
    finally:
        library.ibv_close_device(ctypes.c_void_p(context))


def read_ports() -> list[Port]:
    """Every port of every device that the engine will look at.

    Raises:
        TransportUnavailableError: there is no libibverbs.
    """
    library, ports = _load(), []
    with _devices(library) as devices:
        for device in devices:
            pci = _PCI.search(os.path.realpath(device.contents.ibdev_path.decode())) is not None
            name = device.contents.name.decode()
            with _opened(library, device) as context:
                if context is None:
                    ports.append(Port(name, 1, "cannot be opened", 0, pci))
                    continue
                for number in range(1, _MAX_PORTS + 1):
                    attributes = _PortAttributes()
                    if library.ibv_query_port(context, ctypes.c_uint8(number), ctypes.byref(attributes)):
                        break
                    state = STATES.get(attributes.state, str(attributes.state))
                    ports.append(Port(name, number, state, attributes.max_message, pci))
    return ports


def active_ports() -> list[Port]:
    """The ports that the engine can use, at least one.

    Raises:
        TransportUnavailableError: there is none, or a device on which the engine would wait for ever.
    """
    ports = read_ports()
    virtual = sorted({port.device for port in ports if not port.pci})
    if virtual:
        raise TransportUnavailableError(
            f"backend rdma: {', '.join(virtual)} has no PCI address (a software device?), and the engine would look "
            f"for it for ever; exclude it: MORI_RDMA_DEVICES=^{','.join(virtual)}"
        )
    active = [port for port in ports if port.active]
    if not active:
        seen = ", ".join(f"{port.device} port {port.number} {port.state}" for port in ports) or "no device"
        raise TransportUnavailableError(
            f"backend rdma: no active port ({seen}); the engine would abort (availDevices.size() > 0). Is the cable "
            "up, is /dev/infiniband passed into the container, and does the userspace provider fit the kernel driver? "
            "`moriio doctor` looks further"
        )
    return active


def try_pin(regions: Sequence[Region]) -> None:
    """Register host memory with every usable device and let it go again: where that fails the engine aborts.

    Raises:
        TransportError: names the region, the device and the cause.
    """
    library = _load()
    usable = {port.device for port in active_ports()}
    with _devices(library) as devices:
        for device in devices:
            name = device.contents.name.decode()
            if name in usable:
                with _opened(library, device) as context:
                    _pin_all(library, name, context, regions)


def _pin_all(library: Any, device: str, context: ctypes.c_void_p | None, regions: Sequence[Region]) -> None:
    domain = library.ibv_alloc_pd(context) if context is not None else None
    if not domain:
        raise TransportError(f"register: device {device} gives no protection domain")
    try:
        for index, region in enumerate(regions):
            if region.device != "cpu":
                continue  # the engine has several ways to reach a GPU's memory: it alone can say
            memory = library.ibv_reg_mr(
                ctypes.c_void_p(domain), ctypes.c_void_p(region.address), ctypes.c_size_t(region.nbytes), _ACCESS
            )
            if not memory:
                why = os.strerror(ctypes.get_errno())
                raise TransportError(
                    f"register: region {index} ({region.nbytes} bytes at {region.address:#x}) cannot be pinned for "
                    f"{device}: {why}; the engine would abort. Raise the memlock limit (--ulimit memlock=-1)"
                )
            library.ibv_dereg_mr(ctypes.c_void_p(memory))
    finally:
        library.ibv_dealloc_pd(ctypes.c_void_p(domain))
