"""Plausible bugs, seeded one at a time: what the simulator is worth.  `python -m tests.sim.mutants [NAME ...]`.

Each mutant replaces one method of one record (and compiles the table again), or one function of the driver.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest

import moriio_proto.core as core_module
from moriio_proto.machines import landing, offer, peer
from moriio_proto.machines._table import compile_machine
from moriio_proto.progress import Watermark
from moriio_transport.driver import Driver
from tests.sim import plan
from tests.sim.campaign import campaign

__all__ = ["MUTANTS", "caught_after"]

Patch = pytest.MonkeyPatch

_MODULES = {"Offer": offer, "Landing": landing, "Peer": peer}


def _replace(patch: Patch, record: str, **methods: Callable[..., Any]) -> None:
    """Give a record other methods, in its table too."""
    module = _MODULES[record]
    mutant = type(record, (getattr(module, record),), methods)
    patch.setattr(core_module, record, mutant)
    patch.setattr(module, "TABLE", compile_machine(module.MACHINE, mutant))


def _never(*_: Any) -> bool:
    return False


def _always(*_: Any) -> bool:
    return True


def _nothing(*_: Any) -> None:
    pass


def free_early_on_timeout(patch: Patch) -> None:
    """D gives its blocks back at its deadline or an abort, whatever it has granted."""
    _replace(patch, "Landing", may_be_written=_never)


def forget_not_after(patch: Patch) -> None:
    """Posts have no time limit."""
    for record in ("Offer", "Landing"):
        _replace(patch, record, not_after=lambda self, core: math.inf)


def drop_the_margin(patch: Patch) -> None:
    """The owner counts its lease as the accessor does, without the margin."""
    make = plan.make_options
    patch.setattr(
        "tests.sim.campaign.make_options",
        lambda seed: attrs.evolve(make(seed), timing=attrs.evolve(make(seed).timing, margin=0.0)),
    )


def count_lease_from_receipt(patch: Patch) -> None:
    """The accessor counts its lease from when the grant came, not from when its claim left."""

    def extend_lease(self: Any, core: Any, event: Any) -> None:
        self.lease_until = core.now + event.message.lease_ms / 1e3
        self.resends = 0
        core.arm(self, "due_lease", self.lease_until)
        core.arm(self, "due_retry", core.now + core.timing.lease / 3)

    for record in ("Offer", "Landing"):
        _replace(patch, record, extend_lease=extend_lease, fresh=_always)


def do_not_wait_for_stale_posts(patch: Patch) -> None:
    """After a preemption P posts again while old posts are under way, and takes their ends for new ones."""

    def start_over(self: Any, core: Any, event: Any) -> None:
        self.computed, self.posted, self.blocks = Watermark(), Watermark(), []
        self.parked.clear()

    _replace(patch, "Offer", start_over=start_over)


def use_data_after_the_lease(patch: Patch) -> None:
    """READ: what was read counts, whenever the read ended."""
    _replace(patch, "Landing", in_time=_always, not_after=lambda self, core: math.inf)


def forget_who_is_bound(patch: Patch) -> None:
    """A transfer takes whatever process answers at an address for the one that it is bound to."""
    _replace(patch, "Peer", suits=_always)


def forget_the_second_reader(patch: Patch) -> None:
    """READ: the first release frees, though another process reads under a lease."""
    _replace(patch, "Offer", all_released=_always)


def say_done_too_early(patch: Patch) -> None:
    """WRITE: the end is told when no post is under way, though not all was posted."""
    _replace(patch, "Offer", all_landed=lambda self, core, event: len(self.pending) == 1)


def ignore_what_runs(patch: Patch) -> None:
    """An abort does not wait for posts that are under way."""
    for record in ("Offer", "Landing"):
        _replace(patch, record, idle=_always)


def keep_the_old_verdict(patch: Patch) -> None:
    """A request that uses an id again inherits that the first one was aborted."""

    def settle_again(self: Any, core: Any, event: Any) -> None:
        self.owner, self.settled = event.owner, False
        self.settle_over(core, event)

    _replace(patch, "Landing", settle_again=settle_again)


def forget_the_offset(patch: Patch) -> None:
    """P takes D's first block for the first of the prompt, though D has a cached prefix."""
    note = offer.Offer.note_blocks

    def note_blocks(self: Any, core: Any, event: Any) -> None:
        note(self, core, event)
        self.announced = attrs.evolve(self.announced, first_block=0)

    _replace(patch, "Offer", note_blocks=note_blocks)


def keep_tombstones(patch: Patch) -> None:
    """Records of ended transfers stay."""
    _replace(patch, "Offer", forget=_nothing)


def lose_the_last_parts(patch: Patch) -> None:
    """The driver takes the first completed part of a split post for the end of all."""
    completed = Driver._completed

    @functools.wraps(completed)
    def first_only(self: Driver, event: Any, now: float) -> None:
        parts = self._parts.get(event.token)
        if parts is None:
            return
        for token in parts.tokens:
            if token != event.token:
                self._parts.pop(token, None)
        parts.left = 1
        completed(self, event, now)

    patch.setattr(Driver, "_completed", first_only)


def clocks_too_different(patch: Patch) -> None:
    """Not a bug but the limit of the lease: clock rates that differ by more than margin / lease."""
    make = plan.make_options
    patch.setattr("tests.sim.campaign.make_options", lambda seed: attrs.evolve(make(seed), rates=(0.85, 1.15)))


MUTANTS: dict[str, Callable[[Patch], None]] = {
    mutate.__name__: mutate
    for mutate in (
        free_early_on_timeout, forget_not_after, drop_the_margin, count_lease_from_receipt,
        do_not_wait_for_stale_posts, use_data_after_the_lease, forget_who_is_bound, forget_the_second_reader,
        say_done_too_early, ignore_what_runs, keep_the_old_verdict, forget_the_offset,
        keep_tombstones, lose_the_last_parts, clocks_too_different,
    )
}  # fmt: skip


def caught_after(name: str, transfers: int, seed: int = 1) -> tuple[int, str]:
    """Transfers until an oracle found the mutant, and what it said; ("" when none did)."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch)
        report = campaign(transfers, seed, max_failures=1)
    return report.transfers, report.failures[0].problem if report.failures else ""


def main() -> None:
    """The command: a table of all mutants, or of those named."""
    for name in sys.argv[1:] or MUTANTS:
        began = time.monotonic()
        transfers, problem = caught_after(name, 40_000)
        print(f"{name:30} {transfers:6} {time.monotonic() - began:6.1f} s  {problem[:110] or 'NOT CAUGHT'}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
