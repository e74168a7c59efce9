"""Faults as data: what goes wrong, where, when and for how long; and how to find the few that matter.

A schedule is a tuple of `Fault`; whoever runs it decides what a kind means.  `shrink` takes any list of things (faults,
requests) that makes a test fail, and returns a short one that still does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs

__all__ = ["Fault", "shrink"]

_T = TypeVar("_T")


@attrs.frozen(order=True)
class Fault:
    """One fault; it heals by itself after `seconds`."""

    at: float  # seconds, global time
    kind: str
    seconds: float
    node: str = ""  # whom it hits; "" = all
    peer: str = ""  # the other end, for faults of a link
    amount: float = 1.0  # a probability or a factor


def shrink(items: Sequence[_T], fails: Callable[[Sequence[_T]], bool], max_runs: int = 200) -> list[_T]:
    """Delta debugging: a subsequence for which `fails` still holds, as short as `max_runs` runs allow.

    `fails(items)` must hold.  No single item of the result can be left out, unless the runs were used up.
    """
    kept, parts, runs = list(items), 2, 0
    while len(kept) > 0:
        size = max(1, -(-len(kept) // parts))
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            runs += 1
            if fails(fewer):
                kept, parts = fewer, max(2, parts - 1)
                break
            if runs >= max_runs:
                return kept
        else:
            if size == 1:
                return kept
            parts = min(len(kept), parts * 2)
    return kept
