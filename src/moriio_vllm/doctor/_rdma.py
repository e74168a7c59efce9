"""RDMA devices: ports, device files, and whether the userspace provider fits the kernel driver."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import attrs

from moriio_vllm.doctor._report import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moriio_vllm.doctor._host import Host
    from moriio_vllm.doctor._plan import Plan

__all__ = ["Device", "check", "read_devices"]

_ABI: Final = re.compile(r"Driver (\S+) does not support the kernel ABI of (\d+) \(supports (\d+) to (\d+)\)")
_PROVIDER: Final = re.compile(r"couldn't load driver '?([^':]+)'?")
_CLASS: Final = "/sys/class/infiniband"


@attrs.frozen
class Device:
    """An RDMA device as the kernel sees it."""

    name: str
    driver: str  # of its PCI function
    firmware: str
    ports: dict[str, str]  # number -> state


def read_devices(host: Host) -> list[Device]:
    """From sysfs."""
    found = []
    for name in host.names(_CLASS):
        base = f"{_CLASS}/{name}"
        uevent = dict(line.split("=", 1) for line in host.read(f"{base}/device/uevent").splitlines() if "=" in line)
        ports = {
            port: host.read(f"{base}/ports/{port}/state").split(":")[-1].strip() or "unknown"
            for port in host.names(f"{base}/ports")
        }
        found.append(Device(name, uevent.get("DRIVER", "unknown"), host.read(f"{base}/fw_ver"), ports))
    return found


def check(host: Host, plan: Plan) -> Iterator[Finding]:
    """Ports, device files and providers."""
    devices, bad = read_devices(host), plan.unless_needed("rdma")
    if not devices:
        yield Finding(
            "RDMA devices", bad, "none in /sys/class/infiniband",
            "load the NIC's kernel driver on the host; in a container, start it with --device /dev/infiniband and "
            "--network host" if bad is Level.FAIL else "",
        )  # fmt: skip
        return
    yield from _ports(devices, bad)
    yield from _files(host, bad)
    yield from _providers(host, devices, bad)


def _ports(devices: list[Device], bad: Level) -> Iterator[Finding]:
    active = False
    for device in devices:
        for port, state in device.ports.items():
            active |= state == "ACTIVE"
            what = (
                f"{device.name} port {port} {state} (driver {device.driver}, firmware {device.firmware or 'unknown'})"
            )
            level = Level.OK if state == "ACTIVE" else Level.NOTE
            yield Finding("RDMA port", level, what)
    if not active:
        yield Finding(
            "RDMA port", bad, "no port is ACTIVE: MoRI-IO aborts with availDevices.size() > 0",
            "check cable and switch (ibv_devinfo, ip link); a RoCE port follows the state of its network interface",
        )  # fmt: skip


def _files(host: Host, bad: Level) -> Iterator[Finding]:
    files = [name for name in host.names("/dev/infiniband") if name.startswith("uverbs")]
    locked = [name for name in files if not host.usable(f"/dev/infiniband/{name}")]
    if not files:
        yield Finding(
            "/dev/infiniband", bad, "no uverbs device file", "start the container with --device /dev/infiniband"
        )
    elif locked:
        advice = "run as root, or let the user's group read and write /dev/infiniband/uverbs*"
        yield Finding("/dev/infiniband", bad, f"no access to {', '.join(locked)}", advice)
    else:
        yield Finding("/dev/infiniband", Level.OK, f"{len(files)} uverbs device files, usable")


def _providers(host: Host, devices: list[Device], bad: Level) -> Iterator[Finding]:
    """What libibverbs makes of the kernel's devices."""
    answer = host.probe("verbs")
    said = "\n".join(answer.warnings)
    for driver, kernel, low, high in dict.fromkeys(_ABI.findall(said)):
        yield Finding(
            "userspace provider", bad,
            f"{driver}: kernel driver has ABI {kernel}, the installed library supports {low} to {high}",
            f"install the {driver} userspace library of the kernel driver's release (see docs/nic-userspace.md)",
        )  # fmt: skip
    for driver in dict.fromkeys(_PROVIDER.findall(said)):
        yield Finding(
            "userspace provider", bad, f"libibverbs cannot load the library of {driver}",
            "install it, or remove its file in /etc/libibverbs.d if no such NIC is used",
        )  # fmt: skip
    if answer.status != 0:
        last = answer.warnings[-1] if answer.warnings else f"exit status {answer.status}"
        yield Finding("libibverbs", bad, f"gives no list of devices: {last}", "install rdma-core (libibverbs1)")
        return
    seen = {line.split()[0] for line in answer.lines if line.strip()}
    lost = [device.name for device in devices if device.name not in seen]
    if lost:
        yield Finding(
            "libibverbs", bad, f"does not see {', '.join(lost)}, which the kernel has",
            "install the NIC's userspace provider in the release of its kernel driver; check MORI_RDMA_DEVICES",
        )  # fmt: skip
    else:
        yield Finding("libibverbs", Level.OK, f"sees {', '.join(sorted(seen))}")
