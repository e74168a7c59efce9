"""Fault injection: it does what it is told, keeps the contract, and the protocol survives it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tests.transport.nodes import Node, eventually, pair
from tests.transport.test_reactor import read, write

from moriio_proto.core import Timing
from moriio_proto.wire.messages import Mode
from moriio_transport.faulty import FaultPlan, FaultyTransport
from moriio_transport.trace import TraceWriter, check_trace, main

QUICK = Timing(lease=1.0, margin=0.1, transfer_timeout=1.0, drain=0.2, retry=0.05)


def run(mode: Mode, faults: FaultPlan, count: int = 24) -> tuple[dict[str, str], Node, Node]:
    """Transfers under faults; the bytes of each that D calls done are compared."""
    rng = random.Random(3)
    ids = list(range(2 * count))
    rng.shuffle(ids)
    with pair(mode, wrap=lambda t: FaultyTransport(t, faults), timing=QUICK) as (p, d):
        for i in range(count):
            (write if mode is Mode.WRITE else read)(p, d, f"t{i}", ids[2 * i : 2 * i + 2], ids[2 * i : 2 * i + 2])
        verdicts = d.wait_settled(count)
        assert len(p.wait_settled(count)) == count
        for i in range(count):
            if verdicts[f"t{i}"] == "done":
                blocks = ids[2 * i : 2 * i + 2]
                np.testing.assert_array_equal(p.blocks(blocks), d.blocks(blocks))
        accessor = p if mode is Mode.WRITE else d
        eventually(lambda: not any(t.pending for t in accessor.core.transfers.values()))
    return verdicts, p, d


@pytest.mark.parametrize("mode", list(Mode))
def test_refused_posts_are_tried_again(mode: Mode) -> None:
    """A full queue is back-pressure: every transfer succeeds all the same."""
    verdicts, *_ = run(mode, FaultPlan(refuse_every=2, seed=1))
    assert set(verdicts.values()) == {"done"}


@pytest.mark.parametrize("mode", list(Mode))
def test_failed_posts_fail_their_transfer(mode: Mode) -> None:
    """Every k-th post fails: some transfers fail, the others are exact, and all end."""
    verdicts, *_ = run(mode, FaultPlan(fail_every=5, seed=2))
    assert set(verdicts.values()) == {"done", "failed"}


@pytest.mark.parametrize("mode", list(Mode))
def test_lost_completions_end_in_time(mode: Mode) -> None:
    """Every k-th post never completes: its transfer fails within its deadline, nothing hangs."""
    verdicts, *_ = run(mode, FaultPlan(lose_every=7, seed=3))
    assert "failed" in verdicts.values()
    assert "done" in verdicts.values()


@pytest.mark.parametrize("mode", list(Mode))
def test_late_completions_are_waited_for(mode: Mode) -> None:
    """A delay shorter than the lease changes nothing but the time."""
    verdicts, *_ = run(mode, FaultPlan(delay_ms=20))
    assert set(verdicts.values()) == {"done"}


def test_the_same_seed_gives_the_same_faults() -> None:
    """Which post is hit first is the seed's choice alone."""
    plans = [FaultPlan(fail_every=7, seed=s) for s in range(20)]
    assert plans[3] == FaultPlan(fail_every=7, seed=3)
    with pytest.raises(ValueError, match="fail_every=-1"):
        FaultPlan(fail_every=-1)


def test_traces_of_real_runs_are_rows_of_the_tables(tmp_path: Path) -> None:
    """What two nodes did under faults is checked, line by line, against the declared tables."""
    path = tmp_path / "trace-{pid}.jsonl"
    writers: list[TraceWriter] = []
    with pair(Mode.WRITE, wrap=lambda t: FaultyTransport(t, FaultPlan(fail_every=4)), timing=QUICK) as (p, d):
        for node, name in ((p, "p"), (d, "d")):
            node.core._trace = TraceWriter(str(path).replace("{pid}", name))
            writers.append(node.core._trace)
        for i in range(10):
            write(p, d, f"t{i}", [2 * i, 2 * i + 1], [2 * i, 2 * i + 1])
        d.wait_settled(10)
        p.wait_settled(10)
    for writer in writers:
        writer.close()
    files = sorted(map(str, tmp_path.glob("*.jsonl")))
    assert len(files) == 2
    assert main(files) == 0


def test_a_step_that_no_table_has_is_found() -> None:
    """An undeclared step, a jump and garbage are each named with their line."""
    head = '{"t": 1, "pid": 1, "machine": "offer", "id": "t", '
    lines = [
        head + '"from": "NEW", "on": "cmd_offer", "to": "COMPUTING"}',
        head + '"from": "COMPUTING", "on": "cmd_offer", "to": "LEASED"}',
        head + '"from": "PUSHING", "on": "cq_done", "to": "PUSHING"}',
        "nonsense",
    ]
    findings = list(check_trace(lines))
    assert [f.split(":")[0] for f in findings] == ["line 2", "line 3", "line 4"]
    assert "no row COMPUTING --cmd_offer--> LEASED" in findings[0]
    assert "stood in LEASED" in findings[1]
