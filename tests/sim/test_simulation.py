"""The protocol under faults: real cores, drivers, plans and scheduler halves in a simulated cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import attrs
import pytest

from moriio_proto.testing.schedule import shrink
from moriio_proto.wire.messages import Mode
from tests.sim.campaign import campaign, explain, run_episode
from tests.sim.mutants import MUTANTS, caught_after
from tests.sim.plan import FAULT_KINDS, make_jobs, make_options
from tests.sim.world import World

# What each needs is measured with `python -m tests.sim.mutants`; the others take minutes.
QUICK_MUTANTS = {
    "free_early_on_timeout", "forget_who_is_bound", "forget_the_second_reader", "say_done_too_early",
    "ignore_what_runs", "forget_the_offset", "keep_tombstones", "lose_the_last_parts",
}  # fmt: skip


@pytest.mark.slow
def test_ten_thousand_transfers_under_faults_break_nothing() -> None:
    """Every oracle holds over 10,000 transfers, and every kind of fault and of ending was among them."""
    report = campaign(10_000, seed=1)
    assert not report.failures, explain(report.failures[0].seed)
    missing = [kind for kind in FAULT_KINDS if not report.counts[f"fault {kind} (times)"]]
    assert not missing, f"faults that never happened: {missing}"
    endings = ["D done", "D failed", "D aborted", "P done", "P failed", "D killed", "P killed", "D FINISHED_ERROR"]
    assert not [e for e in endings if not report.counts[e]]
    assert report.counts["preemptions"]


@pytest.mark.parametrize("mode", list(Mode))
def test_without_faults_every_request_is_loaded(mode: Mode) -> None:
    """A healthy cluster never fails a load: each disaggregated request is answered from transferred KV."""
    options = attrs.evolve(make_options(3), mode=mode, decodes=3)
    jobs = [
        attrs.evolve(job, kind="both", leaves_after=None, retry_after=None, prompt=(n, *job.prompt))
        for n, job in enumerate(make_jobs(3, options, 200))  # each prompt its own, so that no cache spares a load
    ]
    world = World(3, options, jobs, [])
    world.run()
    counts = world.summary()
    assert counts["D FINISHED_LENGTH_CAPPED"] == 200
    assert counts["D done"] == sum(len(job.prompt) > 1 for job in jobs)
    assert counts["D failed"] == counts["P failed"] == counts["illegal messages"] == 0


def test_the_same_seed_gives_the_same_trace() -> None:
    """Nothing but the seed decides: not the run before, not the hash seed of the process."""
    first = run_episode(12, jobs=120)
    assert run_episode(12, jobs=120).digest == first.digest
    assert run_episode(13, jobs=120).digest != first.digest
    script = "from tests.sim.campaign import run_episode; print(run_episode(12, jobs=120).digest)"
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    again = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert again.stdout.strip() == first.digest


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(QUICK_MUTANTS))
def test_a_seeded_bug_is_found(name: str) -> None:
    """The oracles are not blind: each of these bugs is found within 5,000 transfers."""
    transfers, problem = caught_after(name, 5_000)
    assert problem, f"{MUTANTS[name].__doc__} was not found in {transfers} transfers"


@pytest.mark.slow
def test_a_failure_is_shown_with_a_short_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed names the seed, and needs fewer faults and requests than the run had."""
    MUTANTS["say_done_too_early"](monkeypatch)
    seed = campaign(5_000, seed=1, max_failures=1).failures[0].seed
    text = explain(seed)
    assert text.startswith(f"seed {seed} ")
    assert 1 <= text.count("  Job(") <= 5
    assert "landed 'done' with wrong bytes" in text


def test_shrink_keeps_what_matters() -> None:
    """Of 100 items those three remain without which it does not fail."""
    assert shrink(range(100), lambda items: {7, 50, 93} <= set(items)) == [7, 50, 93]


def test_shrink_stops_after_its_runs() -> None:
    """With few runs the result is longer, and fails all the same."""
    kept = shrink(range(100), lambda items: {7, 93} <= set(items), max_runs=3)
    assert {7, 93} <= set(kept)
