"""`moriio doctor`: looks at this machine, and at a configuration, for what keeps prefill and decode apart.

Each check is a function `(Host, Plan) -> findings`.  A `Host` reads sysfs, procfs and /dev under a root, so that
recorded trees are looked at as machines are; what can only be asked in a process (libibverbs, amd_mori) is asked in one
of its own, as both may end it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from moriio_vllm.doctor import _accelerator, _configuration, _limits, _nic, _rdma
from moriio_vllm.doctor._configuration import default_host
from moriio_vllm.doctor._host import Host
from moriio_vllm.doctor._plan import Plan
from moriio_vllm.doctor._report import Finding, Level, as_json, as_text, exit_code

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Finding", "Host", "Level", "Plan", "as_json", "as_text", "default_host", "examine", "exit_code"]


def examine(host: Host, plan: Plan) -> list[Finding]:
    """All findings, in the order in which they should be read; a note has no advice.

    Args:
        host: the machine, or a recorded one.
        plan: what is to run on it.
    """

    def checks() -> Iterator[Finding]:
        yield from _rdma.check(host, plan)
        yield from _nic.check(host)
        yield from _limits.check(host, plan)
        yield from _accelerator.check(host, plan)
        yield from _configuration.check(host, plan)

    return [attrs.evolve(found, advice="") if found.level is Level.NOTE else found for found in checks()]
