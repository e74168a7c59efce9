"""Which hosts a request may send us to: what a client puts into its parameters decides whom we dial.

    allowed_peers: ["10.1.0.0/16", "fd00::/8", "decode-0.example"]     or one text, separated by commas

Without the key every host is allowed.  With it an address must lie in a listed network, and a name must be listed as it
is: nothing is resolved, because a name may mean another host by the time it is dialled.
"""

from __future__ import annotations

import ipaddress
from typing import TypeAlias

import attrs

from moriio_proto.errors import ParameterError

__all__ = ["AllowedPeers"]

_Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"
_Network: TypeAlias = "ipaddress.IPv4Network | ipaddress.IPv6Network"


@attrs.frozen
class AllowedPeers:
    """Networks and names."""

    networks: tuple[_Network, ...]
    names: frozenset[str]

    @classmethod
    def parse(cls, value: object) -> AllowedPeers:
        """Read a list of networks, addresses and names, or a text of them separated by commas.

        Raises:
            TypeError: something else.
            ValueError: an empty list or entry, or a network that is none.
        """
        entries = value.split(",") if isinstance(value, str) else value
        if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
            raise TypeError
        networks, names = [], set()
        for entry in (entry.strip() for entry in entries):
            if "/" in entry or _address(entry) is not None:
                networks.append(ipaddress.ip_network(entry))
            else:
                names.add(entry.lower())
        if "" in names or not entries:
            raise ValueError
        return cls(tuple(networks), frozenset(names))

    def check(self, host: str) -> None:
        """Let an allowed host pass.

        Raises:
            ParameterError: any other.
        """
        address = _address(host)
        if address is None:
            allowed = host.lower() in self.names
        else:
            allowed = any(address in network for network in self.networks)
        if not allowed:
            raise ParameterError("remote_host", host, "a host that allowed_peers lists")


def _address(host: str) -> _Address | None:
    """The address that a text is, an IPv4 one where IPv6 only wraps it; None when it is a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
