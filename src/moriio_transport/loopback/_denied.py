"""Why the kernel did not let us copy, and what to do about it.

process_vm_readv and writev ask for PTRACE_MODE_ATTACH_REALCREDS: same real, effective and saved user and group
ids, a target that is dumpable and has no capability that we lack; or CAP_SYS_PTRACE.  Yama and seccomp may forbid
more.  The kernel answers EPERM to all of it; /proc tells the cases apart.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["explain"]

_CAP_SYS_PTRACE = 1 << 19
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def explain(error: OSError, pid: int) -> str:
    """One sentence or more: what failed, the likely cause, what to do."""
    if error.errno == errno.EPERM:
        return f"{error.strerror} (process {pid}): " + "; ".join(_causes(pid))
    if error.errno == errno.ESRCH:
        return f"{error.strerror}: process {pid} has ended"
    if error.errno == errno.EFAULT:
        return (
            f"{error.strerror}: memory that was registered is not mapped (any more) here or in process {pid}; "
            "keep registered memory until the transport is closed"
        )
    if error.errno == errno.ENOSYS:
        return f"{error.strerror}: this kernel is built without CONFIG_CROSS_MEMORY_ATTACH; use another backend"
    return f"{error.strerror} (process {pid})"


def _status(pid: int | str) -> dict[str, list[str]]:
    """Fields of /proc/PID/status; empty where it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.splitlines())
    return {name: value.split() for name, _, value in fields}


def _causes(pid: int) -> list[str]:
    ours, theirs = _status("self"), _status(pid)
    if not theirs:
        return [f"/proc/{pid} is hidden from this process: run both in one PID namespace and without hidepid"]
    causes = [*_id_causes(ours, theirs), *_target_causes(pid, ours, theirs), *_yama_causes(ours)]
    return causes or [
        "ids and capabilities agree, so a seccomp filter or security module forbids it: in containers use a runtime "
        "that allows process_vm_writev (its default for Linux 4.8 and later) or give CAP_SYS_PTRACE"
    ]


def _has_ptrace(status: dict[str, list[str]]) -> bool:
    return bool(int(status.get("CapEff", ["0"])[0], 16) & _CAP_SYS_PTRACE)


def _id_causes(ours: dict[str, list[str]], theirs: dict[str, list[str]]) -> list[str]:
    if _has_ptrace(ours):
        return []
    causes = []
    for field, kind in (("Uid", "user"), ("Gid", "group")):
        own, other = ours[field][0], theirs[field][:3]  # real, effective, saved
        if other != [own] * 3:
            causes.append(
                f"the peer runs with {kind} ids {'/'.join(other)} (real/effective/saved) and we with {own}: "
                f"run both with the same {kind}, or give this process CAP_SYS_PTRACE"
            )
    return causes


def _target_causes(pid: int, ours: dict[str, list[str]], theirs: dict[str, list[str]]) -> list[str]:
    if _has_ptrace(ours):
        return ["this process has CAP_SYS_PTRACE, but perhaps not in the peer's user namespace: run both in one"]
    causes = []
    more = int(theirs.get("CapPrm", ["0"])[0], 16) & ~int(ours.get("CapPrm", ["0"])[0], 16)
    if more:
        causes.append(f"the peer has capabilities that we lack ({more:#x}): start both with the same")
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return causes
    if str(owner) != theirs["Uid"][1]:
        causes.append("the peer is not dumpable (it changed its user, or called PR_SET_DUMPABLE): it must set it to 1")
    return causes


def _yama_causes(ours: dict[str, list[str]]) -> list[str]:
    try:
        scope = int(_YAMA.read_text(encoding="utf-8"))
    except OSError:
        return []
    if scope == 2 and not _has_ptrace(ours):
        return [f"{_YAMA} is 2: give this process CAP_SYS_PTRACE, or set it to 1 or 0"]
    if scope == 3:
        return [f"{_YAMA} is 3, which forbids every copy until the next boot: use another backend"]
    if scope == 1 and os.geteuid() != 0:
        return [f"{_YAMA} is 1: the peer must allow us with PR_SET_PTRACER, as every open loopback transport does"]
    return []
