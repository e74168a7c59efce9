"""Backends `rdma` and `xgmi`: AMD's MoRI-IO engine (package amd_mori) behind the transport contract.

The library is imported only by `create`, hence only when one of the two is chosen.  What is particular to the engine:

- `not_after` cannot be enforced inside it.  A post is cut into batches of at most `WINDOW_BYTES / 4` bytes (or one run
  that is longer), of which at most `WINDOW_BYTES` are under way to one peer; the clock is looked at before each
  submission.  So what was submitted in time, at most a window, may still move after `not_after`.
- `release` and `disconnect` take back what was not submitted; the batches under way end by themselves, by the card's
  own timeouts at the latest.
- The engine's statuses and sessions live until they are final, whatever the caller was told meanwhile.
- Opening a session holds the interpreter lock, up to 5 s where the peer's process is stopped.  It happens once a peer,
  in a thread of the connection, and only after the peer's process has answered on its lifeline (`_lifeline`), so that
  a stopped or dead process costs nobody else anything.  A peer without a lifeline (the connector built into vLLM)
  gives no such proof: with it alone the pause remains possible.
- An engine error other than a full queue ends the connection to that peer.  The engine never repairs a queue pair, and
  identifies pairs by both engines' keys, so the next connection to the same peer uses another engine of ours, under
  the same token with a counter.  Peers need not hear of it: only the side that posts needs a new key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from moriio_transport.base import TransportPlugin
from moriio_transport.mori import _options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moriio_transport.base import Transport

__all__ = ["RdmaPlugin", "XgmiPlugin", "rdma", "xgmi"]


class RdmaPlugin(TransportPlugin):
    """Makes transports over RDMA devices.  Options and their ranges: `_options.RDMA`."""

    name: ClassVar[str] = "rdma"
    options: ClassVar[Mapping[str, Any]] = _options.defaults(_options.RDMA)

    def create(self, *, engine_key: str, host: str, options: Mapping[str, Any]) -> Transport:
        """See `TransportPlugin.create`.

        Raises:
            ConfigurationError: an option out of range.
            TransportUnavailableError: library, device, port or address missing; what was found and what to do.
        """
        from moriio_transport.mori.transport import open_rdma  # noqa: PLC0415 - only when chosen

        return open_rdma(engine_key, host, options)


class XgmiPlugin(TransportPlugin):
    """Makes transports over the GPU fabric of one host.  Options and their ranges: `_options.XGMI`."""

    name: ClassVar[str] = "xgmi"
    options: ClassVar[Mapping[str, Any]] = _options.defaults(_options.XGMI)

    def create(self, *, engine_key: str, host: str, options: Mapping[str, Any]) -> Transport:
        """See `TransportPlugin.create`; raises as `RdmaPlugin.create`."""
        from moriio_transport.mori.transport import open_xgmi  # noqa: PLC0415 - only when chosen

        return open_xgmi(engine_key, host, options)


rdma = RdmaPlugin()
xgmi = XgmiPlugin()
