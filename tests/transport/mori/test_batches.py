"""Cutting plans into batches, against a byte-by-byte reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moriio_transport._pair import plan_of
from moriio_transport.base import TransportError
from moriio_transport.mori._batches import cut

SIZES = (512, 300, 4096)
RUNS = st.tuples(st.integers(0, 2), st.integers(0, 250), st.integers(0, 2), st.integers(0, 250), st.integers(1, 50))


@given(st.lists(RUNS, max_size=60), st.integers(1, 9), st.integers(1, 120))
def test_batches_are_the_plan(runs, max_ops, max_bytes):
    """Every run is in one batch of its pair, once; no batch exceeds a limit, save one that is a single run."""
    batches = cut(plan_of(runs), SIZES, SIZES, max_ops, max_bytes)
    found = []
    for batch in batches:
        assert 1 <= batch.ops <= max_ops
        assert batch.nbytes == int(batch.sizes.sum())
        assert batch.nbytes <= max_bytes or batch.ops == 1
        columns = (batch.local, batch.remote, batch.sizes)
        for local, remote, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            found.append((batch.pair[0], local, batch.pair[1], remote, nbytes))
    assert sorted(found) == sorted(runs)


@given(RUNS, st.integers(1, 2**64 - 1), st.sampled_from(range(5)))
def test_runs_that_leave_a_region_are_refused(run, value, column):
    """A run with one number too large, or a region that does not exist, is refused with its index."""
    bad = list(run)
    bad[column] = value if column not in (0, 2) else 3
    inside = all(bad[at + 1] + bad[4] <= SIZES[bad[at]] for at in (0, 2) if bad[at] < 3) and max(bad[0], bad[2]) < 3
    plan = plan_of([(0, 0, 0, 0, 1), tuple(bad)])
    if inside:
        assert sum(batch.ops for batch in cut(plan, SIZES, SIZES, 10, 10**6)) == 2
    else:
        with pytest.raises(TransportError, match="run 1: "):
            cut(plan, SIZES, SIZES, 10, 10**6)


def test_a_long_run_is_a_batch_of_its_own():
    """Runs longer than a batch are neither cut nor joined with others."""
    runs = [(2, 0, 2, 0, 10), (2, 100, 2, 100, 1000), (2, 2000, 2, 2000, 10)]
    assert [batch.nbytes for batch in cut(plan_of(runs), SIZES, SIZES, 10, 100)] == [10, 1000, 10]


def test_a_plan_without_runs_has_no_batch():
    """Zero is a case of its own."""
    assert cut(plan_of([]), SIZES, SIZES, 10, 100) == []
    assert np.array_equal(plan_of([]).nbytes, [])
