"""The software card of this process: its fault knobs, counters and events (see `softverbs/verbs.h`)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

PORT_ERROR, PORT_ACTIVE, QP_FATAL, DEVICE_FATAL = 10, 9, 1, 8  # enum ibv_event_type
ACCESS_ERROR = 10  # enum ibv_wc_status

_library = ctypes.CDLL("libibverbs.so")
_library.softverbs_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
_library.softverbs_get.argtypes = [ctypes.c_char_p]
_library.softverbs_get.restype = ctypes.c_long


def get(name: str) -> int:
    """Value of a knob or counter."""
    value = int(_library.softverbs_get(name.encode()))
    assert value >= 0, name
    return value


def set(name: str, value: int) -> None:  # noqa: A001 - card.set(...) is how it is used
    """Turn a knob."""
    assert _library.softverbs_set(name.encode(), value) == 0, name


@contextlib.contextmanager
def turned(name: str, value: int) -> Iterator[None]:
    """A knob turned within a block."""
    before = get(name)
    set(name, value)
    try:
        yield
    finally:
        set(name, before)


def raise_event(kind: int) -> int:
    """An asynchronous event; how many receivers it had."""
    return int(_library.softverbs_event(kind))
