"""Limits of this process: memory that may be locked, and whether peers on this host may copy from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moriio_vllm.doctor._report import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moriio_vllm.doctor._host import Host
    from moriio_vllm.doctor._plan import Plan

__all__ = ["check"]

_CAP_IPC_LOCK = 14


def check(host: Host, plan: Plan) -> Iterator[Finding]:
    """memlock, and for loopback the tracing policy."""
    limit = host.memlock()
    if limit is None:
        yield Finding("memlock limit", Level.OK, "unlimited")
    elif _may_lock_anyway(host):
        yield Finding("memlock limit", Level.OK, f"{limit} bytes, but CAP_IPC_LOCK lifts it")
    else:
        yield Finding(
            "memlock limit", plan.unless_needed("rdma"), f"{limit} bytes, too few to pin the KV cache: MoRI-IO aborts",
            "docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity; login shells: /etc/security/limits.conf",
        )  # fmt: skip
    scope = host.read("/proc/sys/kernel/yama/ptrace_scope")
    if plan.backend == "loopback" and scope in ("2", "3"):
        yield Finding(
            "ptrace_scope", Level.FAIL, f"{scope}: no process may copy from or to another",
            "set kernel.yama.ptrace_scope to 1 or 0, or give the containers CAP_SYS_PTRACE",
        )  # fmt: skip


def _may_lock_anyway(host: Host) -> bool:
    for line in host.read("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
