"""One post of the loopback transport: slices, partial calls, early ends, and threads."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moriio_transport.base import Direction, Outcome, TransportError
from moriio_transport.conformance import plan_of
from moriio_transport.loopback import _runs
from moriio_transport.loopback._post import CopyThreads, PeerGoneError, Post
from moriio_transport.loopback._runs import SLICE_BYTES, RegionTable, Runs, resolve


def runs_of(*sizes):
    """Runs of these sizes at made-up addresses: local ones from 0, remote ones from a billion."""
    starts = np.cumsum([0, *sizes[:-1]])
    local = np.array(list(zip(starts, sizes, strict=True)), np.uint64).reshape(-1, 2)
    remote = np.array(list(zip(starts + 10**9, sizes, strict=True)), np.uint64).reshape(-1, 2)
    return Runs(local, remote)


class Mover:
    """Records the byte ranges that it is asked to move, and moves at most `most` bytes a call."""

    def __init__(self, most=2**62, before=lambda call: None):
        self.calls, self.most, self.before = [], most, before

    def move(self, runs, start, stop, *, write):
        self.before(len(self.calls))
        moved = min(self.most, runs.size(start, stop))
        self.calls.append((runs.local[start:stop].tolist(), runs.remote[start:stop].tolist(), moved))
        return moved

    def covered(self):
        """Local bytes moved, in order; checks that the remote ones are their partners."""
        covered = []
        for local, remote, moved in self.calls:
            assert remote == [[at + 10**9, nbytes] for at, nbytes in local]
            covered += [byte for at, nbytes in local for byte in range(at, at + nbytes)][:moved]
        return covered


def post_of(mover, runs, *, clock=lambda: 0.0, not_after=1.0):
    """A post, and the list that it joins when it ends."""
    ended = []
    post = Post(
        mover,
        runs,
        token=1,
        session=1,
        direction=Direction.WRITE,
        not_after=not_after,
        clock=clock,
        on_end=ended.append,
    )
    return post, ended


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12), most=st.integers(1, 40))
def test_partial_calls_are_continued(sizes, most):
    """However few bytes a call moves, every byte moves once, in order, with its partner."""
    mover = Mover(most)
    post, ended = post_of(mover, runs_of(*sizes))
    post.run()
    assert mover.covered() == list(range(sum(sizes)))
    assert [(p.outcome, p.moved) for p in ended] == [(Outcome.DONE, sum(sizes))]


@pytest.mark.parametrize("sizes", [[1] * 3000, [SLICE_BYTES + 1] * 3, [SLICE_BYTES // 2] * 5, [7, SLICE_BYTES, 7]])
def test_slices_keep_both_limits(sizes):
    """A call has at most 1,024 runs, and more than one run only up to the slice size."""
    mover = Mover()
    post, ended = post_of(mover, runs_of(*sizes))
    post.run()
    assert sum(len(local) for local, _, _ in mover.calls) == len(sizes)
    assert all(len(local) <= 1024 for local, _, _ in mover.calls)
    assert all(moved <= SLICE_BYTES or len(local) == 1 for local, _, moved in mover.calls)
    assert ended[0].moved == sum(sizes)


def test_expiry_is_checked_before_every_call():
    """With a clock that reaches `not_after` at the fourth look, three slices move and the post ends as EXPIRED."""
    ticks = iter([0.0, 0.1, 0.2, 1.0])
    mover = Mover()
    post, ended = post_of(mover, runs_of(*[SLICE_BYTES] * 5), clock=lambda: next(ticks))
    post.run()
    assert len(mover.calls) == 3
    assert [(p.outcome, p.moved) for p in ended] == [(Outcome.EXPIRED, 3 * SLICE_BYTES)]


def test_expiry_between_partial_calls():
    """A slice of which a call moved a part is not continued once `not_after` has come."""
    ticks = iter([0.0, 1.0, 2.0])
    mover = Mover(most=10)
    post, ended = post_of(mover, runs_of(100), clock=lambda: next(ticks))
    post.run()
    assert [(p.outcome, p.moved) for p in ended] == [(Outcome.EXPIRED, 10)]


def test_time_over_after_the_last_byte_is_done():
    """A post whose last slice started in time is DONE, though the clock has passed since."""
    ticks = iter([0.0, 5.0])
    post, ended = post_of(Mover(), runs_of(100), clock=lambda: next(ticks))
    post.run()
    assert ended[0].outcome is Outcome.DONE


def test_release_ends_after_the_running_slice():
    """A post that is stopped while its second slice moves ends with two slices moved, not earlier."""
    seen = []

    def before(call):
        if call == 1:
            post.stop(Outcome.CANCELLED, "released")
            seen.append(list(ended))

    mover = Mover(before=before)
    post, ended = post_of(mover, runs_of(*[SLICE_BYTES] * 5))
    post.run()
    assert seen == [[]]
    assert [(p.outcome, p.moved) for p in ended] == [(Outcome.CANCELLED, 2 * SLICE_BYTES)]


def test_release_of_a_waiting_post_ends_at_once():
    """A post that no thread has taken yet ends within `stop`, and never moves a byte after."""
    mover = Mover()
    post, ended = post_of(mover, runs_of(100))
    post.stop(Outcome.CANCELLED, "released")
    assert [p.outcome for p in ended] == [Outcome.CANCELLED]
    post.run()
    post.stop(Outcome.FAILED, "late")
    assert mover.calls == []
    assert [(p.outcome, p.reason) for p in ended] == [(Outcome.CANCELLED, "released")]


@pytest.mark.parametrize(("error", "gone"), [(TransportError("no"), False), (PeerGoneError("no"), True)])
def test_failing_call_ends_the_post(error, gone):
    """A call that fails ends the post as FAILED with its reason and what moved before; nothing moves after."""

    def before(call):
        if call == 1:
            raise error

    mover = Mover(before=before)
    post, ended = post_of(mover, runs_of(*[SLICE_BYTES] * 4))
    post.run()
    assert [(p.outcome, p.reason, p.moved, p.peer_gone) for p in ended] == [(Outcome.FAILED, "no", SLICE_BYTES, gone)]


def test_two_threads_share_a_post():
    """Two threads work on one post at the same time, move each byte once, and end it once, when both are quiet."""
    barrier = threading.Barrier(2, timeout=30)  # a slice returns only while another is moving
    mover = Mover(before=lambda call: barrier.wait())
    over = threading.Event()
    threads = CopyThreads(2)
    post, ended = post_of(mover, runs_of(*[SLICE_BYTES] * 6))
    post._on_end = lambda p: (ended.append(p), over.set())
    threads.submit(post)
    assert over.wait(30)
    threads.close()
    assert [(p.outcome, p.moved) for p in ended] == [(Outcome.DONE, 6 * SLICE_BYTES)]
    assert sorted(local[0][0] for local, _, _ in mover.calls) == [i * SLICE_BYTES for i in range(6)]


def test_offsets_beyond_4_gib():
    """Addresses of runs beyond 4 GiB of a region keep all their bits."""
    base, far = 0x7F00_0000_0000, 5 * 2**40 + 3
    ours, theirs = RegionTable("local", [(base, 2**43)]), RegionTable("remote", [(8, 8), (base, 2**43)])
    runs = resolve(plan_of([(0, far, 1, far + 2**41, 2**33)]), ours, theirs)
    assert runs.local.tolist() == [[base + far, 2**33]]
    assert runs.remote.tolist() == [[base + far + 2**41, 2**33]]


REGIONS = [(4096, 100), (8192, 50)]
fields = st.integers(0, 120) | st.integers(2**64 - 120, 2**64 - 1)


@given(region=st.integers(-2, 3), offset=fields, nbytes=fields)
def test_bounds_agree_with_big_integers(region, offset, nbytes):
    """A run is accepted if and only if it lies within its region by arithmetic that cannot wrap."""
    inside = 0 <= region < len(REGIONS) and offset + nbytes <= REGIONS[region][1]
    plan = plan_of([(0, 0, region, offset, nbytes)])
    ours, theirs = RegionTable("local", [(1, 2**64 - 1)]), RegionTable("remote", REGIONS)
    if inside:
        assert resolve(plan, ours, theirs).remote.tolist() == [[REGIONS[region][0] + offset, nbytes]]
    else:
        with pytest.raises(TransportError, match="run 0: remote"):
            resolve(plan, ours, theirs)


def test_iovec_layout():
    """The arrays are what the kernel reads: 16 bytes a run, address then length, at the address that is told."""
    runs = runs_of(3, 5)
    assert runs.local.flags.c_contiguous
    assert runs.local.itemsize * 2 == _runs.IOVEC_BYTES
    assert runs.iovecs(1) == (runs.local.ctypes.data + 16, runs.remote.ctypes.data + 16)
