"""Backend `loopback`: one-sided copies between processes of one host, without any device or library.

Within one process bytes are copied with memmove; between processes with process_vm_readv and writev, which need
the permission to trace the peer (the same user is enough on most systems) and one PID namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from moriio_transport.base import TransportPlugin
from moriio_transport.loopback._mori import MoriName
from moriio_transport.loopback.transport import INLINE_BYTES, LoopbackTransport

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["INLINE_BYTES", "LoopbackPlugin", "LoopbackTransport", "MoriName", "plugin"]


class LoopbackPlugin(TransportPlugin):
    """Makes loopback transports.

    Options: `num_workers`, threads that copy large posts, default 1; `mori_compat`, describe memory so that a peer
    whose MoRI library stands on process memory can read it, default false (meant for interoperation tests).
    """

    name: ClassVar[str] = "loopback"
    options: ClassVar[Mapping[str, Any]] = {"num_workers": 1, "mori_compat": False}

    def create(self, *, engine_key: str, host: str, options: Mapping[str, Any]) -> LoopbackTransport:
        """See `TransportPlugin.create`.  Key and host only name the engine in the compatibility form."""
        mori = MoriName(engine_key, host) if options["mori_compat"] else None
        return LoopbackTransport(num_workers=options["num_workers"], mori=mori)


plugin = LoopbackPlugin()
