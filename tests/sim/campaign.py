"""Many simulated clusters: `python -m tests.sim.campaign --transfers 1000000 --seed 1`.

Each episode is one world with its own seed; a failing one is shrunk and printed with what is needed to run it again.
Exit status: 0 nothing found, 1 an oracle does not hold, 2 something raised.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import attrs

from moriio_proto.testing.schedule import Fault, shrink
from tests.sim.plan import Job, Options, make_faults, make_jobs, make_options
from tests.sim.world import Violation, World

__all__ = ["Episode", "Report", "campaign", "explain", "main", "run_episode"]

JOBS = 250  # of an episode


@attrs.frozen
class Episode:
    """What one seed gave."""

    seed: int
    counts: Counter[str]
    digest: str
    problem: str = ""  # of the oracle that does not hold, or of what was raised
    crashed: bool = False


@attrs.define
class Report:
    """What all seeds gave."""

    counts: Counter[str] = attrs.field(factory=Counter)
    episodes: int = 0
    failures: list[Episode] = attrs.field(factory=list)

    @property
    def transfers(self) -> int:
        """Disaggregated requests that the routers sent."""
        return self.counts["transfers"]


def _play(seed: int, options: Options, jobs: Sequence[Job], faults: Sequence[Fault]) -> tuple[World, str, bool]:
    world = World(seed, options, jobs, faults)
    try:
        world.run()
    except Violation as e:
        return world, str(e), False
    except Exception as e:  # noqa: BLE001 - whatever escapes a driver is a finding, and belongs to its seed
        return world, f"{type(e).__name__}: {e}", True
    return world, "", False


@contextmanager
def _quiet() -> Iterator[None]:
    """The code under test warns of every injected fault."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def run_episode(seed: int, jobs: int = JOBS) -> Episode:
    """One world."""
    options = make_options(seed)
    with _quiet():
        world, problem, crashed = _play(seed, options, make_jobs(seed, options, jobs), make_faults(seed, options))
    return Episode(seed, world.summary(), world.digest, problem, crashed)


def explain(seed: int, jobs: int = JOBS, max_runs: int = 60) -> str:
    """The shortest schedule found that still fails, and the end of its trace."""
    options = make_options(seed)
    all_jobs, all_faults = make_jobs(seed, options, jobs), make_faults(seed, options)

    def fails(jobs: Sequence[Job], faults: Sequence[Fault]) -> bool:
        with _quiet():
            return bool(_play(seed, options, jobs, faults)[1])

    faults = shrink(all_faults, lambda fewer: fails(all_jobs, fewer), max_runs)
    fewer_jobs = shrink(all_jobs, lambda fewer: fails(fewer, faults), max_runs)
    world, problem, _ = _play(seed, options, fewer_jobs, faults)
    lines = [f"seed {seed} ({options}): {problem}", f"{len(faults)} faults, {len(fewer_jobs)} requests:"]
    lines += [f"  {item}" for item in (*faults, *fewer_jobs)]
    return "\n".join([*lines, "end of the trace:", *(f"  {line}" for line in list(world.trace)[-60:])])


def _episodes(seeds: Iterator[int], processes: int, jobs: int) -> Iterator[Episode]:
    if processes == 1:
        yield from (run_episode(seed, jobs) for seed in seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        batch = 4 * processes
        while True:  # in batches: an endless iterator would be read ahead without end
            yield from pool.starmap(run_episode, [(next(seeds), jobs) for _ in range(batch)], chunksize=2)


def campaign(transfers: int, seed: int, *, processes: int = 1, jobs: int = JOBS, max_failures: int = 3) -> Report:
    """Episodes from `seed` on until there were so many transfers, or so many failures."""
    report = Report()
    for episode in _episodes(count(seed), processes, jobs):
        report.episodes += 1
        report.counts += episode.counts
        if episode.problem:
            report.failures.append(episode)
        if report.transfers >= transfers or len(report.failures) >= max_failures:
            break
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--transfers", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first episode")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--jobs", type=int, default=JOBS, help="requests of an episode")
    parser.add_argument("--explain", action="store_true", help="shrink and show the one episode of --seed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if args.explain:
        print(explain(args.seed, args.jobs))  # noqa: T201 - a command prints
        return 0
    began = time.monotonic()
    report = campaign(args.transfers, args.seed, processes=args.processes, jobs=args.jobs)
    _show(report, time.monotonic() - began, as_json=args.json)
    for failure in report.failures:
        print(explain(failure.seed, args.jobs))  # noqa: T201
    return max((2 if f.crashed else 1 for f in report.failures), default=0)


def _show(report: Report, seconds: float, *, as_json: bool) -> None:
    totals = {
        "transfers": report.transfers, "episodes": report.episodes, "violations": len(report.failures),
        "seconds": round(seconds, 1), "transfers_per_second": round(report.transfers / seconds, 1),
        "counts": dict(sorted(report.counts.items())),
    }  # fmt: skip
    if as_json:
        print(json.dumps(totals))  # noqa: T201
        return
    for name, value in (*list(totals.items())[:-1], *sorted(report.counts.items())):
        print(f"{name:32} {value}")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
