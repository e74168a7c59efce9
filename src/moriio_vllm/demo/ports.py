"""Ports for servers that will bind them later."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_LOWEST = 10_000
_RANGES_TRIED = 200


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return ``count`` consecutive ports that are free on ``host``.

    All are bound at the same time before any is released, which proves the whole range free. The range lies below the
    kernel's ephemeral ports: an outgoing connection cannot take one of them between now and the server's own bind.

    Raises:
        RuntimeError: no such range was found.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    highest = max(ephemeral, _LOWEST + 10 * count) - count
    for _ in range(_RANGES_TRIED):
        first = random.randrange(_LOWEST, highest)  # noqa: S311
        ports = list(range(first, first + count))
        if _all_bindable(ports, host):
            return ports
    raise RuntimeError(f"no {count} consecutive free ports on {host} between {_LOWEST} and {highest + count}")


def _all_bindable(ports: list[int], host: str) -> bool:
    with ExitStack() as held:
        for port in ports:
            # No SO_REUSEADDR: a port that still has connections in TIME_WAIT is not free for every server.
            listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                listener.bind((host, port))
            except OSError:
                return False
    return True
