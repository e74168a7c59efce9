"""Checks of single values that came from a client, a router or a sidecar."""

from __future__ import annotations

import re

from moriio_proto.errors import ParameterError

__all__ = ["MAX_HOST_CHARS", "MAX_PORT", "check_host", "check_number", "check_port", "refuse"]

MAX_PORT = 65535
MAX_HOST_CHARS = 255  # of a DNS name; addresses are shorter

_HOST = re.compile(r"[0-9A-Za-z_.:%-]{1,255}")


def refuse(key: str, value: object, expected: str) -> ParameterError:
    """The error to raise, whatever the value: one too deep or too long to be shown is named by its type."""
    try:
        return ParameterError(key, value, expected)
    except (RecursionError, ValueError):  # repr() of a deep list; of an integer of thousands of digits
        return ParameterError(key, type(value).__name__, expected)


def check_host(key: str, value: object) -> str:
    """A host name, IPv4 or IPv6 address without brackets.

    Raises:
        ParameterError: not a string, or with a character that no host has.
    """
    if not isinstance(value, str) or not _HOST.fullmatch(value):
        raise refuse(key, value, f"a host name or IP address of at most {MAX_HOST_CHARS} characters")
    return value


def check_port(key: str, value: object) -> int:
    """A TCP port.

    Raises:
        ParameterError: not an integer, or outside 1..65535.
    """
    return check_number(key, value, 1, MAX_PORT)


def check_number(key: str, value: object, low: int, high: int) -> int:
    """An integer within `[low, high]`; a bool, a float or a string is none.

    Raises:
        ParameterError: anything else.
    """
    if type(value) is not int or not low <= value <= high:
        raise refuse(key, value, f"an integer within {low}..{high}")
    return value
