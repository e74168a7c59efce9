"""The suite that every transport must pass, for plugins of this project and of others.

    from moriio_transport.conformance import PeerProcessConformance, TransportConformance

    class TestInOneProcess(TransportConformance):
        backend = "mine"

    class TestBetweenProcesses(PeerProcessConformance):
        backend = "mine"

pytest collects the classes; nothing here imports it, and each method can be called by itself.  The rules are those
of `moriio_transport.base`.  No test depends on speed: the only time in here is how long a hang is waited for.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from moriio_transport._pair import (
    Listener,
    LocalTarget,
    Memory,
    Pair,
    ProcessTarget,
    Target,
    allocate,
    open_transport,
    plan_of,
)
from moriio_transport.base import (
    Completed,
    Description,
    Direction,
    Outcome,
    PeerRefusedError,
    Region,
    Session,
    SessionLost,
    Transport,
    TransportError,
)
from moriio_transport.registry import load_transport

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moriio_proto.geometry import TransferPlan

__all__ = [
    "Listener",
    "LocalTarget",
    "Pair",
    "PeerProcessConformance",
    "ProcessTarget",
    "Target",
    "TransportConformance",
    "plan_of",
]

_MIB = 1 << 20


class TransportConformance:
    """Rules 1 to 7 with a target in the same process.

    Attributes:
        backend: name of the plugin in the registry.
        options: beside the plugin's defaults.
    """

    backend: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    def make_target(self, sizes: Sequence[int]) -> Target:
        """A target with zeroed regions of these sizes."""
        return LocalTarget(self.backend, self.options, sizes)

    def make_initiator(self, memory: Memory) -> Transport:
        """A transport under test with this memory registered."""
        return open_transport(self.backend, "conformance-initiator", self.options, memory)

    @contextlib.contextmanager
    def pair(self, *sizes: int) -> Iterator[Pair]:
        """Both sides with regions of these sizes: random bytes in ours, zeros in the target's; closed at the end."""
        memory = allocate(sizes)
        for index, array in enumerate(memory):
            array[:] = np.random.default_rng(index).integers(1, 256, len(array), np.uint8)
        with contextlib.ExitStack() as stack:
            target = self.make_target(sizes)
            stack.callback(target.close)
            initiator = self.make_initiator(memory)
            stack.callback(initiator.close)
            yield Pair(initiator, memory, target, Listener(initiator))

    def test_write_moves_the_runs_and_nothing_else(self) -> None:
        """A scattered write over two regions changes exactly the target bytes of its runs (rule 3)."""
        rng = np.random.default_rng(1)
        with self.pair(4 * _MIB, 3 * _MIB) as pair:
            sources, places = rng.permutation(512)[:300], rng.permutation(512)[:300]
            runs = [
                (0, int(s) * 4096, 1, int(p) * 4096 + 7, 1000 + i)
                for i, (s, p) in enumerate(zip(sources, places, strict=True))
            ]
            expected = np.zeros(3 * _MIB, np.uint8)
            for _, source, _, place, nbytes in runs:
                expected[place : place + nbytes] = pair.memory[0][source : source + nbytes]
            end = pair.copy(pair.connect(), plan_of(runs))
            assert (end.outcome, end.nbytes) == (Outcome.DONE, sum(run[4] for run in runs)), end
            assert np.array_equal(pair.remote(1), expected)
            assert not pair.remote(0).any()

    def test_read_moves_the_runs_and_nothing_else(self) -> None:
        """A scattered read changes exactly our bytes of its runs (rule 3)."""
        with self.pair(_MIB) as pair:
            data = np.random.default_rng(2).integers(0, 256, _MIB, np.uint8)
            pair.target.write(0, 0, data.tobytes())
            expected = pair.memory[0].copy()
            runs = [(0, i * 8192 + 1, 0, (127 - i) * 8192 + 3, 5000) for i in range(128)]
            for _, ours, _, theirs, nbytes in runs:
                expected[ours : ours + nbytes] = data[theirs : theirs + nbytes]
            assert pair.copy(pair.connect(), plan_of(runs), Direction.READ).outcome is Outcome.DONE
            assert np.array_equal(pair.memory[0], expected)
            assert pair.remote().tobytes() == data.tobytes()

    def test_many_small_runs(self) -> None:
        """A post of 5,000 runs of 24 bytes arrives: more than any vector of a system call holds."""
        with self.pair(5000 * 32) as pair:
            runs = [(0, i * 32, 0, (4999 - i) * 32, 24) for i in range(5000)]
            assert pair.copy(pair.connect(), plan_of(runs)).nbytes == 5000 * 24
            ours, theirs = pair.memory[0].reshape(5000, 32), pair.remote().reshape(5000, 32)
            assert np.array_equal(theirs[::-1, :24], ours[:, :24])
            assert not theirs[:, 24:].any()

    def test_large_contiguous_copy(self) -> None:
        """Runs of the longest operation, up to 8 MiB, cover a region from first to last byte."""
        with self.pair(32 * _MIB) as pair:
            step = min(pair.initiator.capabilities.max_op_bytes, 8 * _MIB)
            starts = range(0, 32 * _MIB, step)
            runs = [(0, at, 0, at, min(step, 32 * _MIB - at)) for at in starts]
            assert pair.copy(pair.connect(), plan_of(runs)).nbytes == 32 * _MIB
            assert np.array_equal(pair.remote(), pair.memory[0])

    def test_empty_plan(self) -> None:
        """A plan without runs ends as DONE with no byte (rule 3)."""
        with self.pair(4096) as pair:
            end = pair.copy(pair.connect(), plan_of([]))
            assert (end.outcome, end.nbytes) == (Outcome.DONE, 0)

    def test_every_post_ends_once(self) -> None:
        """Forty posts at once, small and large, in both directions, end as DONE once each (rules 1 and 3)."""
        with self.pair(40 * _MIB, 40 * _MIB) as pair:
            session = pair.connect()
            for i in range(40):
                nbytes = (_MIB if i % 3 else 4096) - i
                direction, region = (Direction.READ, 1) if i % 2 else (Direction.WRITE, 0)
                pair.post(i, session, plan_of([(region, i * _MIB, region, i * _MIB, nbytes)]), direction)
            assert {end.outcome for end in pair.listener.ends(*range(40))} == {Outcome.DONE}
            theirs = pair.remote()
            for i in range(0, 40, 2):
                part = slice(i * _MIB, i * _MIB + (_MIB if i % 3 else 4096) - i)
                assert np.array_equal(theirs[part], pair.memory[0][part])

    def test_nothing_moves_after_release(self) -> None:
        """Released posts end once each, and no byte of them moves after that (rules 3 and 4)."""
        with self.pair(64 * _MIB, 4096) as pair:
            session = pair.connect()
            pair.initiator.release(77)  # unknown: ignored
            for token in range(6):
                pair.post(token, session, _whole(64 * _MIB, pair))
            for token in range(6):
                pair.initiator.release(token)
            ends = pair.listener.ends(*range(6))
            assert {end.outcome for end in ends} <= {Outcome.DONE, Outcome.CANCELLED}
            self._assert_quiet(pair, session)
            pair.initiator.release(0)  # ended: ignored

    def test_expired_post_moves_nothing(self) -> None:
        """A post whose `not_after` has come ends as EXPIRED with no byte moved (rule 6)."""
        with self.pair(2 * _MIB) as pair:
            session = pair.connect()
            for token, nbytes in enumerate((100, 2 * _MIB)):
                pair.initiator.post(
                    token, session, Direction.WRITE, plan_of([(0, 0, 0, 0, nbytes)]), time.monotonic() - 1
                )
            ends = pair.listener.ends(0, 1)
            assert [(end.outcome, end.nbytes) for end in ends] == [(Outcome.EXPIRED, 0)] * 2
            assert not pair.remote().any()

    def test_nothing_moves_after_expiry(self) -> None:
        """A queue of posts that may expire on the way ends as DONE or EXPIRED, and is quiet then (rules 3 and 6)."""
        with self.pair(64 * _MIB, 4096) as pair:
            session = pair.connect()
            for token in range(4):
                plan = _whole(64 * _MIB, pair)
                pair.initiator.post(token, session, Direction.WRITE, plan, time.monotonic() + 0.005)
            for end in pair.listener.ends(*range(4)):
                assert end.outcome in {Outcome.DONE, Outcome.EXPIRED}
                assert (end.nbytes == 64 * _MIB) or end.outcome is Outcome.EXPIRED
            self._assert_quiet(pair, session)

    def test_disconnect_with_posts_in_flight(self) -> None:
        """Disconnecting ends every post of the session once, leaves other sessions alone, and is quiet (rule 5)."""
        with self.pair(64 * _MIB, 4096) as pair:
            session, other = pair.connect(), pair.connect()
            assert session != other
            for token in range(4):
                pair.post(token, session, _whole(64 * _MIB, pair))
            pair.initiator.disconnect(session)
            pair.initiator.disconnect(session)  # unknown by now: ignored
            ends = pair.listener.ends(*range(4))
            assert {end.outcome for end in ends} <= {Outcome.DONE, Outcome.CANCELLED}
            self._assert_quiet(pair, other)
            assert pair.copy(session, plan_of([(1, 0, 1, 0, 10)])).outcome is Outcome.FAILED
            assert not any(isinstance(event, SessionLost) for event in pair.listener.events)

    def test_runs_outside_the_regions_move_nothing(self) -> None:
        """One bad run fails its post, of which no byte moves, and the session lives on (rule 7)."""
        size = 2 * _MIB
        top = 2**64 - 1
        bad_runs = [
            (0, size - 9, 0, 0, 10),
            (0, 0, 0, size - 9, 10),
            (0, 0, 0, size + 1, 1),
            (0, 0, 0, top, 1),
            (0, 0, 0, 8, top),
            (0, top, 0, 0, 8),
            (0, 0, 1, 0, 1),
            (1, 0, 0, 0, 1),
            (0, 0, -1, 0, 1),
            (-1, 0, 0, 0, 1),
        ]
        with self.pair(size) as pair:
            session = pair.connect()
            for bad in bad_runs:
                end = pair.copy(session, plan_of([(0, 0, 0, 0, 4096), bad]))
                assert (end.outcome, end.nbytes) == (Outcome.FAILED, 0), (bad, end)
                assert end.reason
            assert not pair.remote().any()
            assert pair.copy(session, plan_of([(0, size - 9, 0, size - 9, 9)])).outcome is Outcome.DONE

    def test_malformed_descriptions_are_refused(self) -> None:
        """What is not a description never becomes a session, and harms no other (rule 7)."""
        with self.pair(4096) as pair:
            good = pair.target.description
            for bad in (
                Description(b"", good.regions),
                Description(good.engine[:-1], good.regions),
                Description(b"\xc1" + good.engine, good.regions),
                Description(bytes(range(256)), good.regions),
                Description(good.engine, (b"",)),
                Description(good.engine, (good.regions[0][:-1],)),
            ):
                with contextlib.suppress(PeerRefusedError):
                    assert not pair.connected(pair.initiator.connect(bad)), bad
            assert pair.copy(pair.connect(), plan_of([(0, 0, 0, 0, 4096)])).outcome is Outcome.DONE

    def test_bad_regions_are_refused(self) -> None:
        """A region without bytes, or of a device that is not the transport's, is refused by register."""
        memory = allocate([4096])
        for bad in (Region(memory[0].ctypes.data, 0), Region(memory[0].ctypes.data, 4096, "abacus", 0)):
            plugin = load_transport(self.backend)
            options = {**plugin.options, **self.options}
            transport = plugin.create(engine_key="conformance-bad", host="127.0.0.1", options=options)
            refused = False
            with contextlib.closing(transport), contextlib.suppress(TransportError):
                refused = True
                transport.register([Region(memory[0].ctypes.data, 4096), bad])
                refused = False
            assert refused, f"{bad} was registered"

    def test_close_is_quiet_and_idempotent(self) -> None:
        """After close every post has ended, once, and no byte moves; closing again does nothing."""
        with self.pair(64 * _MIB, 4096) as pair:
            session = pair.connect()
            for token in range(4):
                pair.post(token, session, _whole(64 * _MIB, pair))
            pair.initiator.close()
            before = pair.remote()
            ends = [event for event in pair.initiator.poll() if isinstance(event, Completed)]
            assert sorted(end.token for end in ends) == list(range(4))
            pair.memory[0][:] = 0
            pair.initiator.close()
            assert np.array_equal(pair.remote(), before)

    def _assert_quiet(self, pair: Pair, session: Session) -> None:
        """Later changes of our first region do not arrive, while another copy does."""
        before = pair.remote()
        pair.memory[0][:] = 0
        assert pair.copy(session, plan_of([(1, 0, 1, 0, 4096)])).outcome is Outcome.DONE
        assert np.array_equal(pair.remote(), before)


class PeerProcessConformance(TransportConformance):
    """The same rules with a target in a process of its own, and what happens when it dies."""

    def make_target(self, sizes: Sequence[int]) -> Target:
        """A target in a child process, with zeroed regions of these sizes."""
        return ProcessTarget(self.backend, self.options, sizes)

    def test_killed_peer_is_reported_once(self) -> None:
        """A peer killed amid posts gives one proven SessionLost, one end per post, and FAILED later (rules 3, 7)."""
        with self.pair(64 * _MIB) as pair:
            session = pair.connect()
            for token in range(16):
                pair.post(token, session, _whole(64 * _MIB, pair))
            self._kill(pair)
            pair.listener.until(lambda events: any(isinstance(e, SessionLost) for e in events))
            ends = pair.listener.ends(*range(16))
            assert {end.outcome for end in ends} <= {Outcome.DONE, Outcome.FAILED}
            assert pair.copy(session, plan_of([(0, 0, 0, 0, 10)])).outcome is Outcome.FAILED
            lost = [event for event in pair.listener.events if isinstance(event, SessionLost)]
            assert [(event.session, event.proven) for event in lost] == [(session, True)]

    def test_description_of_a_dead_peer(self) -> None:
        """Connecting to a process that has ended never becomes a session (rule 7)."""
        with self.pair(4096) as pair:
            session = pair.connect()
            self._kill(pair)
            pair.listener.until(lambda events: any(isinstance(e, SessionLost) for e in events))
            again = pair.initiator.connect(pair.target.description)
            assert again != session
            assert not pair.connected(again)

    @staticmethod
    def _kill(pair: Pair) -> None:
        assert isinstance(pair.target, ProcessTarget)
        pair.target.kill()


def _whole(nbytes: int, pair: Pair) -> TransferPlan:
    """All of region 0, in runs of at most 4 MiB."""
    step = min(pair.initiator.capabilities.max_op_bytes, 4 * _MIB)
    return plan_of([(0, at, 0, at, min(step, nbytes - at)) for at in range(0, nbytes, step)])
