"""The long exploration: `python -m moriio_proto.testing.explore_campaign [--worlds N] [--only TEXT] [--quick]`.

`--mutants DIR` seeds bugs instead and says who notices them; DIR holds the transcripts.

Prints one line per setting and ends with the sums; exit status 1 with the shortest trace of the first violation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from moriio_proto.machines import landing, offer, peer
from moriio_proto.machines._table import Row
from moriio_proto.testing.explore import Violation
from moriio_proto.testing.explore_mutants import MUTANTS, killed_by_explorer, killed_by_transcripts
from moriio_proto.testing.explore_pair import Pair, explore_setting, rows_taken
from moriio_proto.testing.explore_settings import CAMPAIGN, QUICK, UNREACHED
from moriio_proto.testing.explore_story import Setting

__all__ = ["main", "mutant_table", "unexplained"]


def unexplained(taken: set[Row]) -> Iterator[str]:
    """Rows that were neither taken nor excused, and excuses of rows that were taken."""
    for table in (offer.TABLE, landing.TABLE, peer.TABLE):
        for row in table.rows():
            excused = _excuse(table.name, row)
            name = f"{table.name}: {row.trigger} in {row.source.name} {list(row.guard_names)}"
            if row not in taken and not excused:
                yield f"{name} is never taken"
            elif row in taken and excused:
                yield f"{name} is taken, though excused: {excused}"


def _excuse(machine: str, row: Row) -> str:
    for name, trigger, sources, guard, why in UNREACHED:
        if (name, trigger) == (machine, row.trigger) and row.source.name in sources and _fits(guard, row):
            return why
    return ""


def _fits(guard: str | None, row: Row) -> bool:
    return guard is None or (guard in row.guard_names if guard else not row.guard_names)


def mutant_table(folder: Path) -> Iterator[str]:
    """A markdown table: each seeded bug, and which tool notices it."""
    yield "| seeded bug | explorer | transcripts |"
    yield "|---|---|---|"
    for mutant in MUTANTS:
        found = killed_by_explorer(mutant)
        said = f"{found.what} ({len(found.trace)} moves)" if found else "-"
        yield f"| {mutant.bug} | {said} | {killed_by_transcripts(mutant, folder) or '-'} |"


def run(settings: Iterable[Setting], limit: int) -> tuple[int, int, set[Row]]:
    """Explore each setting, up to `limit` worlds; returns worlds, moves and the rows taken."""
    worlds = moves = 0
    taken: set[Row] = set()
    for setting in settings:
        pair = Pair(setting)
        seen = explore_setting(pair, limit=limit)
        worlds, moves, taken = worlds + seen.worlds, moves + seen.moves, taken | rows_taken(pair)
        end = "complete" if seen.complete else f"cut off at depth {seen.depth}"
        sys.stdout.write(f"{setting.name:<52}{seen.worlds:>10,} worlds {seen.moves:>12,} moves  {end}\n")
        sys.stdout.flush()
    return worlds, moves, taken


def main(argv: list[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(description="Explore every order of moves of a prefill and a decode node.")
    parser.add_argument("--worlds", type=int, default=2_000_000, help="most worlds of each setting")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--quick", action="store_true", help="only what the tests run")
    parser.add_argument("--mutants", type=Path, metavar="DIR", help="seed bugs instead; DIR: the transcripts")
    args = parser.parse_args(argv)
    if args.mutants is not None:
        for line in mutant_table(args.mutants):
            sys.stdout.write(line + "\n")
        return 0
    settings = [s for s in (QUICK if args.quick else [*QUICK, *CAMPAIGN]) if args.only in s.name]
    try:
        worlds, moves, taken = run(settings, args.worlds)
    except Violation as found:
        sys.stdout.write(f"VIOLATION: {found}\n")
        return 1
    sys.stdout.write(f"{worlds:,} worlds, {moves:,} moves, no violation\n")
    missing = [] if args.only else list(unexplained(taken))
    sys.stdout.writelines(f"{line}\n" for line in missing)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
