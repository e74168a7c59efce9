"""The public fake transport keeps the contract, in fake time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moriio_proto.testing.clock import EventQueue
from moriio_transport._pair import plan_of
from moriio_transport.base import Completed, Connected, Direction, Outcome, Region, Session, SessionLost, TransportError
from moriio_transport.testing import MemoryFabric, MemoryTransport


class Two:
    """An initiator and a target."""

    def __init__(self) -> None:
        self.queue = EventQueue()
        self.fabric = MemoryFabric(self.queue, random.Random(1))
        self.memory = [np.arange(64, dtype=np.uint8) + 100 * i for i in range(2)]
        self.a, self.b = (MemoryTransport(self.fabric, key, lambda: self.queue.now) for key in "ab")
        for transport, memory in zip((self.a, self.b), self.memory, strict=True):
            transport.register([Region(memory.ctypes.data, memory.nbytes)])
        self.session = self.a.connect(self.b.describe())
        self.queue.run(1.0)
        assert self.a.poll() == [Connected(self.session)]

    def post(
        self, token: int = 1, runs: list[tuple[int, int, int, int, int]] | None = None, limit: float = 1e9
    ) -> None:
        """Post runs of (local region, offset, remote region, offset, bytes)."""
        self.a.post(token, self.session, Direction.WRITE, plan_of(runs or [(0, 0, 0, 32, 16)]), limit)

    def ends(self) -> list[tuple[int, Outcome]]:
        """Run until nothing happens, and say how posts ended."""
        self.queue.run(self.queue.now + 1000)
        return [(e.token, e.outcome) for e in self.a.poll() if isinstance(e, Completed)]


def test_a_post_moves_its_bytes_and_takes_time() -> None:
    """Nothing has moved when `post` returns; all has when the post is done."""
    two = Two()
    two.post()
    assert two.memory[1][32] == 132
    assert two.ends() == [(1, Outcome.DONE)]
    np.testing.assert_array_equal(two.memory[1][32:48], two.memory[0][:16])


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("refuse", Outcome.REFUSED), ("fail", Outcome.FAILED), ("hang", None), ("wedge", None), ("late", Outcome.DONE)],
)
def test_each_fault_has_its_outcome(fault: str, outcome: Outcome | None) -> None:
    """What is injected ends as the contract says, or does not end by itself."""
    two = Two()
    setattr(two.a.faults, fault, 1.0)
    two.post()
    assert two.ends() == ([(1, outcome)] if outcome else [])


def test_release_ends_what_hangs_and_the_session_what_is_wedged() -> None:
    """A post that no release ends is quiet when its session is over."""
    two = Two()
    two.a.faults.hang = 1.0
    two.post(1)
    two.ends()
    two.a.release(1)
    assert two.ends() == [(1, Outcome.CANCELLED)]
    two.a.faults.hang, two.a.faults.wedge = 0.0, 1.0
    two.post(2)
    two.ends()
    two.a.release(2)
    assert two.ends() == []
    two.a.disconnect(two.session)
    assert two.ends() == [(2, Outcome.CANCELLED)]


def test_nothing_starts_after_its_limit() -> None:
    """A post whose time is over expires with no byte moved; so does one whose process was stopped meanwhile."""
    two = Two()
    two.post(1, limit=two.queue.now)
    two.a.stop()
    two.post(2, limit=two.queue.now + 5)
    two.queue.run(two.queue.now + 10)
    two.a.resume()
    assert two.ends() == [(1, Outcome.EXPIRED), (2, Outcome.EXPIRED)]
    assert two.memory[1][32] == 132


def test_runs_outside_and_unknown_sessions_fail_whole() -> None:
    """The contract's bounds: nothing moves, and the end is FAILED."""
    two = Two()
    before = two.memory[1].copy()
    two.post(1, [(0, 0, 0, 0, 16), (0, 0, 0, 60, 16)])
    two.post(2, [(0, 0, 1, 0, 16)])
    two.a.post(3, Session(5), Direction.WRITE, plan_of([(0, 0, 0, 0, 1)]), 1e9)
    assert two.ends() == [(1, Outcome.FAILED), (2, Outcome.FAILED), (3, Outcome.FAILED)]
    np.testing.assert_array_equal(two.memory[1], before)


def test_a_token_in_use_is_refused() -> None:
    """Two posts never share a token."""
    two = Two()
    two.post(1)
    with pytest.raises(TransportError, match="token 1 is in use"):
        two.post(1)


def test_a_death_ends_posts_and_is_proven() -> None:
    """Whoever copies to a dead process hears that its post failed, and that the peer is dead."""
    two = Two()
    two.post(1)
    two.fabric.kill("b")
    two.queue.run(two.queue.now + 1000)
    first, second = two.a.poll()
    assert isinstance(first, Completed)
    assert first.outcome is Outcome.FAILED
    assert second == SessionLost(two.session, "the peer process is dead", proven=True)
