"""Backend `loopback`: one-sided copies between processes of one host, without any device or library.

Within one process bytes are copied with memmove; between processes with process_vm_readv and writev, which need
the permission to trace the peer (the same user is enough on most systems) and one PID namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from moriio_transport.base import TransportPlugin
from moriio_transport.loopback.transport import INLINE_BYTES, LoopbackTransport

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["INLINE_BYTES", "LoopbackPlugin", "LoopbackTransport", "plugin"]


class LoopbackPlugin(TransportPlugin):
    """Makes loopback transports.  Option `num_workers`: threads that copy large posts, default 1."""

    name: ClassVar[str] = "loopback"
    options: ClassVar[Mapping[str, Any]] = {"num_workers": 1}

    def create(self, *, engine_key: str, host: str, options: Mapping[str, Any]) -> LoopbackTransport:
        """See `TransportPlugin.create`.  Neither key nor host is needed: the description proves itself."""
        return LoopbackTransport(num_workers=options["num_workers"])


plugin = LoopbackPlugin()
