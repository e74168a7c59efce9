"""Versions of the NICs that the guide's images were tested with, against what is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from moriio_vllm.doctor._rdma import read_devices
from moriio_vllm.doctor._report import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moriio_vllm.doctor._host import Host

__all__ = ["TESTED", "Tested", "check"]


_FOLDERS: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu/libibverbs", "/usr/local/lib")


@attrs.frozen
class Tested:
    """One NIC, and the versions that were tested together."""

    nic: str
    drivers: tuple[str, ...]  # kernel drivers of its PCI function
    modules: dict[str, str]  # kernel module -> version
    packages: dict[str, str]  # userspace package -> version
    library: str  # how the names of its provider's files begin
    release: str


TESTED: Final = (
    Tested(
        "AINIC (AMD Pensando Pollara)", ("ionic", "ionic_rdma"), {"ionic": "26.03.3.001", "ionic_rdma": "26.03.3.001"},
        {"libionic1": "54.0-187-1"}, "libionic", "1.117.5-a-77",
    ),
    Tested(
        "Thor2 (Broadcom)", ("bnxt_en", "bnxt_re"), {"bnxt_en": "1.10.3.235.2.86.0", "bnxt_re": "235.2.86.0"},
        {}, "libbnxt_re", "235.2.86.0",
    ),
)  # fmt: skip


def _packages(host: Host) -> dict[str, str]:
    """Installed Debian packages with their versions."""
    found, name = {}, ""
    for line in host.read("/var/lib/dpkg/status").splitlines():
        if line.startswith("Package: "):
            name = line.split(" ", 1)[1]
        elif line.startswith("Version: "):
            found[name] = line.split(" ", 1)[1]
    return found


def check(host: Host) -> Iterator[Finding]:
    """Kernel modules, userspace packages and libraries of each known NIC that this host has."""
    drivers = {device.driver for device in read_devices(host)}
    packages = _packages(host)
    for tested in TESTED:
        if drivers.isdisjoint(tested.drivers):
            continue
        found = {module: host.read(f"/sys/module/{module}/version") for module in tested.modules}
        yield from _compare(tested, "kernel module", tested.modules, {m: v for m, v in found.items() if v})
        if tested.packages:
            installed = {p: packages[p] for p in tested.packages if p in packages}
            yield from _compare(tested, "package", tested.packages, installed)
        yield from _libraries(host, tested)


def _compare(tested: Tested, kind: str, wanted: dict[str, str], found: dict[str, str]) -> Iterator[Finding]:
    what = f"{tested.nic} {kind}"
    if not found:
        yield Finding(
            what, Level.WARN, f"no version of {' or '.join(wanted)} is shown",
            f"tested with release {tested.release}; see docs/nic-userspace.md",
        )  # fmt: skip
    for name, version in found.items():
        if version == wanted[name]:
            yield Finding(what, Level.OK, f"{name} {version}, as tested")
        else:
            yield Finding(
                what, Level.WARN, f"{name} {version}, tested was {wanted[name]}",
                "kernel driver, firmware and userspace library must be of one release; see docs/nic-userspace.md",
            )  # fmt: skip


def _libraries(host: Host, tested: Tested) -> Iterator[Finding]:
    """Files of the provider: there must be one place of them, or the wrong one may be loaded."""
    places = {
        folder: names
        for folder in _FOLDERS
        if (names := [n for n in host.names(folder) if n.startswith(tested.library) and ".so" in n])
    }
    what = f"{tested.nic} provider"
    if not places:
        advice = f"install it in release {tested.release}, or that of the kernel driver; see docs/nic-userspace.md"
        yield Finding(what, Level.WARN, f"no {tested.library}*.so in {', '.join(_FOLDERS)}", advice)
    elif len(places) > 1 and "/usr/local/lib" in places:
        files = ", ".join(f"{folder}/{names[0]}" for folder, names in places.items())
        advice = "move the distribution's away, so that the one of the kernel driver's release is loaded"
        yield Finding(what, Level.WARN, f"two are installed: {files}", advice)
    else:
        yield Finding(what, Level.OK, ", ".join(f"{folder}/{name}" for folder, ns in places.items() for name in ns))
