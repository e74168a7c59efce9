"""Bugs seeded into the declarations, to see which tool notices them (`explore_campaign --mutants DIR`).

A mutant changes rows of one machine, or one method of its record.  `tool` says who kills it: the explorer, in the named
setting, or the transcripts (a bug that only makes things slower or fail needlessly breaks no invariant).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import attrs

from moriio_proto.core import Role
from moriio_proto.errors import MoriioError
from moriio_proto.machines import landing, offer, peer
from moriio_proto.machines._table import Compiled, compile_machine, declare
from moriio_proto.testing.explore import Violation
from moriio_proto.testing.explore_pair import Pair, explore_setting
from moriio_proto.testing.explore_settings import QUICK
from moriio_proto.testing.explore_snapshot import Recorded, default_tables
from moriio_proto.testing.explore_story import Setting
from moriio_proto.testing.transcript import run_transcript

__all__ = ["MUTANTS", "Mutant", "killed_by_explorer", "killed_by_transcripts", "mutated"]

Rows = list[dict[str, Any]]


@attrs.frozen
class Mutant:
    """One seeded bug."""

    bug: str
    machine: ModuleType
    setting: str  # of QUICK: where the explorer looks for it
    tool: str = "explorer"  # or "transcripts": which one must notice
    rows: Callable[[Rows], Rows] = lambda rows: rows
    methods: dict[str, Callable[..., Any]] = attrs.field(factory=dict)


def _is(row: dict[str, Any], trigger: str, source: str, guard: str | None = None) -> bool:
    sources = row["source"] if isinstance(row["source"], list) else [row["source"]]
    guards = row.get("conditions", [])
    names = [guards] if isinstance(guards, str) else guards
    right = not names if guard is None else guard in names
    return bool(row["trigger"] == trigger and any(s.name == source for s in sources) and right)


def _split(rows: Rows, trigger: str, source: str, guard: str | None, change: dict[str, Any] | None) -> Rows:
    """The one row, for this source only, changed or (None) dropped."""
    out: Rows = []
    hits = 0
    for row in rows:
        if not _is(row, trigger, source, guard) or hits:
            out.append(row)
            continue
        hits += 1
        sources = row["source"] if isinstance(row["source"], list) else [row["source"]]
        rest = [s for s in sources if s.name != source]
        if rest:
            out.append({**row, "source": rest})
        if change is not None:
            mine = next(s for s in sources if s.name == source)
            out.append({**row, "source": mine, **change})
    assert hits, f"no row {trigger} in {source}"
    return out


def _drop(trigger: str, source: str, guard: str | None = None) -> Callable[[Rows], Rows]:
    return lambda rows: _split(rows, trigger, source, guard, None)


def _change(trigger: str, source: str, guard: str | None = None, **change: Any) -> Callable[[Rows], Rows]:
    return lambda rows: _split(rows, trigger, source, guard, change)


def mutated(mutant: Mutant) -> Compiled:
    """The compiled table of a mutant."""
    module = mutant.machine
    original: Compiled = module.TABLE
    record = {"offer": "Offer", "landing": "Landing", "peer": "Peer"}[original.name]
    cls = type(record, (getattr(module, record),), dict(mutant.methods))
    stock = module.MACHINE
    enter = {s.value: str(s.on_enter[0]) for s in stock.states.values() if s.on_enter}
    rows = mutant.rows(list(module.ROWS))
    return compile_machine(
        declare(original.name, type(original.initial), original.initial, list(original.final), rows, enter), cls
    )


def killed_by_explorer(mutant: Mutant) -> Violation | None:
    """What the explorer says of a mutant; None: nothing."""
    setting: Setting = next(s for s in QUICK if s.name == mutant.setting)
    tables = {role: default_tables(role) for role in Role}
    table = Recorded.of(mutated(mutant))
    for role, (own, met) in tables.items():
        if own.name == table.name:
            tables[role] = (table, met)
        elif met.name == table.name:
            tables[role] = (own, table)
    try:
        explore_setting(Pair(setting, tables))
    except Violation as found:
        return found
    return None


def killed_by_transcripts(mutant: Mutant, folder: Path) -> str:
    """The first transcript of `folder` (files *.txt) that a mutant changes; empty: none."""
    module, original = mutant.machine, mutant.machine.TABLE
    module.TABLE = mutated(mutant)  # type: ignore[attr-defined]  # TABLE is Final: replaced for one run
    try:
        for path in sorted(folder.glob("*.txt")):
            text = path.read_text()
            try:
                same = run_transcript(text) == text
            except (AssertionError, LookupError, MoriioError):
                same = False
            if not same:
                return path.stem
    finally:
        module.TABLE = original  # type: ignore[attr-defined]  # and put back
    return ""


# --- methods that are wrong ---------------------------------------------------------------------------------------


class _Wrong:
    """Methods of a record, each with its bug."""

    def lease_from_receipt(self: Any, core: Any, event: Any) -> None:
        self.lease_until = max(self.lease_until, core.now + event.message.lease_ms / 1e3)
        self.resends = 0
        core.arm(self, "due_lease", self.lease_until)
        core.arm(self, "due_retry", core.now + core.timing.lease / 3)

    def hold_without_margin(self: Any, core: Any, event: Any) -> None:
        self.granted_until = core.now + core.timing.lease
        core.arm(self, "due_lease", self.granted_until)

    def keep_without_margin(self: Any, core: Any, event: Any) -> None:
        self.timers.clear()
        core.arm(self, "due_lease", core.now + core.timing.lease)

    def start_over_at_once(self: Any, core: Any, event: Any) -> None:
        self.computed, self.posted = type(self.computed)(), type(self.posted)()
        self.blocks.clear()
        self.parked.clear()

    def yes(self: Any, core: Any, event: Any) -> bool:
        return True

    def nothing(self: Any, core: Any, event: Any) -> None:
        return None


MUTANTS: Final = [
    Mutant(
        "a duplicate announcement was not thought of", offer, "write: the lease", rows=_drop("recv_blocks", "PUSHING")
    ),
    Mutant(
        "a late second cq_lost was not thought of", landing, "write: a process dies", rows=_drop("cq_lost", "CLOSED")
    ),
    Mutant(
        "D frees an aborted landing at once, though P holds a lease",
        landing,
        "write: queueing and aborts",
        rows=_drop("cmd_abort", "ANNOUNCED", "may_be_written"),
    ),
    Mutant(
        "D's time-out frees at once, though P holds a lease",
        landing,
        "write: the lease",
        rows=_drop("due_deadline", "ANNOUNCED", "may_be_written"),
    ),
    Mutant(
        "P answers an abort before its posts are quiet",
        offer,
        "write: queueing and aborts",
        rows=_change("recv_abort", "PUSHING", "idle", conditions="anyhow", after=["acknowledge"]),
        methods={"anyhow": _Wrong.yes},
    ),
    Mutant(
        "P tells a failure while another post is under way",
        offer,
        "write: two blocks, broken sessions",
        rows=_change("cq_failed", "PUSHING", "last_one", conditions="anyhow"),
        methods={"anyhow": _Wrong.yes, "settle_if_owed": _Wrong.nothing},
    ),
    Mutant(
        "a preemption forgets nothing",
        offer,
        "write: preemption",
        rows=_change("cmd_preempt", "PUSHING", after=[]),
    ),
    Mutant(
        "after a preemption posts do not wait for the old ones",
        offer,
        "write: preemption",
        methods={"start_over": _Wrong.start_over_at_once},
    ),
    Mutant(
        "P counts the lease from the grant's receipt",
        offer,
        "write: the lease",
        methods={"extend_lease": _Wrong.lease_from_receipt},
    ),
    Mutant(
        "D counts the lease from the grant's receipt",
        landing,
        "read: queueing and aborts",
        methods={"extend_lease": _Wrong.lease_from_receipt},
    ),
    Mutant("D adds no margin to a lease", landing, "write: the lease", methods={"hold": _Wrong.hold_without_margin}),
    Mutant(
        "P adds no margin to a lease",
        offer,
        "read: queueing and aborts",
        methods={"extend_hold": _Wrong.keep_without_margin},
    ),
    Mutant(
        "D takes a read that ended after the lease",
        landing,
        "read: queueing and aborts",
        rows=_change("cq_done", "PULLING", "in_time", conditions="all_read"),
    ),
    Mutant(
        "guards swapped: P frees when the first of two ends",
        offer,
        "write: two blocks, broken sessions",
        rows=_change("cq_done", "PUSHING", "all_landed", conditions="anyhow"),
        methods={"anyhow": _Wrong.yes},
    ),
    Mutant(
        "P forgets a request that vLLM has not handed over",
        offer,
        "write: the lease",
        rows=_drop("due_forget", "FREED", "owed"),
    ),
    Mutant(
        "draining has no last resort", offer, "write: broken sessions", rows=_change("due_drain", "DRAINING", after=[])
    ),
    Mutant(
        "D claims for ever", landing, "read: queueing and aborts", methods={"enter_claiming": landing.Landing.begin}
    ),
    Mutant(
        "a lost session frees what was being written",
        offer,
        "write: a process dies",
        rows=_change("cq_lost", "PUSHING", "idle", conditions="anyhow"),
        methods={"anyhow": _Wrong.yes},
    ),
    Mutant(
        "P settles twice when finished late",
        offer,
        "write: the lease",
        rows=_change("cq_done", "PUSHING", "all_landed", after=["end_op", "settle_now", "tell"]),
    ),
    Mutant(
        "P claims once and never again",
        offer,
        "write: the lease",
        tool="transcripts",
        rows=_change("due_retry", "CLAIMING", after=[]),
    ),
    Mutant(
        "P tells the end once and never again",
        offer,
        "write: the lease",
        tool="transcripts",
        rows=_change("due_retry", "NOTIFYING", after=[]),
    ),
    Mutant(
        "D does not acknowledge the end",
        landing,
        "write: the lease",
        tool="transcripts",
        rows=_change("recv_done", "ANNOUNCED", after=["settle_done"]),
    ),
    Mutant(
        "a restart at the same address buries nobody",
        peer,
        "write: a process dies",
        tool="transcripts",
        methods={"bury": lambda self, core, event: self.hang_up(core, event)},
    ),
]
