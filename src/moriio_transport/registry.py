"""Finds transports by name: entry points of the group `moriio.transports`, each naming a `TransportPlugin`.

    [project.entry-points."moriio.transports"]
    mine = "my_package.transport:plugin"

An installed entry point comes before a built-in of the same name.  Nothing is imported but the one asked for.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from moriio_transport.base import TransportError, TransportPlugin

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["API_VERSION", "GROUP", "available_transports", "load_transport"]

GROUP = "moriio.transports"
API_VERSION = TransportPlugin.api_version

# So that a source tree works without installation.
_BUILT_IN = {
    "loopback": "moriio_transport.loopback:plugin",
    "rdma": "moriio_transport.mori:rdma",
    "xgmi": "moriio_transport.mori:xgmi",
}


def available_transports() -> Mapping[str, importlib.metadata.EntryPoint]:
    """Every known transport by name; none is imported."""
    found = {name: importlib.metadata.EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()}
    found.update((point.name, point) for point in importlib.metadata.entry_points(group=GROUP))
    return found


def load_transport(name: str) -> TransportPlugin:
    """Import the plugin of a backend.

    Args:
        name: as in `kv_connector_extra_config.backend`.

    Raises:
        TransportError: no such backend (names those that exist), a plugin that cannot be imported, is not a
            `TransportPlugin`, or speaks another version of the contract.
    """
    known = available_transports()
    point = known.get(name)
    if point is None:
        raise TransportError(f"backend={name!r}: expected one of {', '.join(sorted(known))}")
    try:
        plugin = point.load()
    except Exception as error:  # foreign code: whatever it raises while being imported, its name must be in the text
        raise TransportError(f"backend={name!r}: {point.value} cannot be loaded: {error!r}") from error
    if not isinstance(plugin, TransportPlugin):
        raise TransportError(
            f"backend={name!r}: {point.value} is a {type(plugin).__name__}, expected a TransportPlugin"
        )
    if plugin.api_version != API_VERSION:
        raise TransportError(
            f"backend={name!r}: {point.value} speaks version {plugin.api_version} of the transport contract, "
            f"expected {API_VERSION}"
        )
    return plugin
