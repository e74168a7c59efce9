"""Faults of card, peer and engine: each ends as the contract says, and this process lives on."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing

import attrs
import numpy as np
import pytest
from tests.transport.mori.engine import card

from moriio_transport._pair import LocalTarget, ProcessTarget, plan_of
from moriio_transport.base import (
    Completed,
    Outcome,
    SessionLost,
)
from moriio_transport.conformance import TransportConformance
from moriio_transport.mori import _lifeline

MIB = 1 << 20


class Rdma(TransportConformance):
    """For its pairs; not collected."""

    __test__ = False
    backend = "rdma"

    def __init__(self, **options):
        self.options = options


class RdmaProcess(Rdma):
    """With the target in a process of its own."""

    __test__ = False

    def make_target(self, sizes):
        return ProcessTarget(self.backend, self.options, sizes)


def stop(target):
    """SIGSTOP, and wait until no thread of it runs any more."""
    os.kill(target._process.pid, signal.SIGSTOP)
    os.waitpid(target._process.pid, os.WUNTRACED)


def go_on(target):
    os.kill(target._process.pid, signal.SIGCONT)


def scattered(count, nbytes=8, step=512):
    """A plan of runs that the engine cannot merge."""
    return plan_of([(0, i * step, 0, i * step, nbytes) for i in range(count)])


def losses(pair):
    return [(event.session, event.proven) for event in pair.listener.events if isinstance(event, SessionLost)]


def wait_lost(pair, session):
    pair.listener.until(lambda events: any(isinstance(e, SessionLost) and e.session == session for e in events))


@pytest.mark.parametrize("queue_pairs", [1, 4])
def test_access_error_ends_the_session_and_the_next_one_works(queue_pairs):
    """A failed work request fails its post and the session; a new one to the same living peer works at once."""
    with Rdma(qp_per_transfer=queue_pairs).pair(MIB) as pair:
        described = pair.initiator.describe(), pair.target.description
        session = pair.connect()
        card.set("fail_next", card.ACCESS_ERROR)
        end = pair.copy(session, scattered(64))
        assert end.outcome is Outcome.FAILED
        assert end.reason
        wait_lost(pair, session)
        assert losses(pair) == [(session, False)]
        assert pair.copy(session, scattered(1)).outcome is Outcome.FAILED
        for _ in range(3):  # the engine alone gives the dead queue pair for ever
            assert pair.copy(pair.connect(), scattered(64)).outcome is Outcome.DONE
        assert described == (pair.initiator.describe(), pair.target.description)


def test_a_replacement_engine_goes_with_its_last_session():
    """Every engine costs a busy thread: one that replaced another for a peer is destroyed when nobody uses it."""
    with Rdma().pair(MIB) as pair:
        for _ in range(3):
            session = pair.connect()
            card.set("fail_next", card.ACCESS_ERROR)
            pair.copy(session, scattered(1))
            wait_lost(pair, session)
        last = pair.connect()
        pairs = card.get("n_qp")
        assert pair.copy(last, scattered(64)).outcome is Outcome.DONE
        pair.initiator.disconnect(last)
        for link in pair.initiator._all:
            assert link.join(20)
        assert not pair.initiator._engines._replacements
        assert card.get("n_qp") < pairs


def test_other_peers_do_not_notice_a_broken_connection():
    """An error with one peer leaves the sessions and running posts with another alone."""
    with Rdma().pair(MIB) as pair, closing(LocalTarget("rdma", {}, [MIB], "other")) as other:
        session = pair.connect()
        healthy = pair.initiator.connect(other.description)
        assert pair.connected(healthy)
        card.set("fail_next", card.ACCESS_ERROR)
        pair.copy(session, scattered(1))
        with card.turned("delay_us", 200):
            pair.post(1, healthy, scattered(100))
            wait_lost(pair, session)
            assert pair.listener.ends(1)[0].outcome is Outcome.DONE
        assert [lost for lost, _ in losses(pair)] == [session]


def test_a_failed_post_is_quiet_on_every_queue_pair():
    """Where one of four queue pairs fails, the end is told only after the other three have stopped writing."""
    with Rdma(qp_per_transfer=4).pair(MIB) as pair:
        session = pair.connect()
        before = card.get("n_write")
        with card.turned("delay_us", 2000):
            card.set("fail_next", card.ACCESS_ERROR)
            assert pair.copy(session, scattered(64)).outcome is Outcome.FAILED
        written = card.get("n_write") - before
        assert 0 < written < 70
        image = pair.remote()
        pair.memory[0][:] = 0
        assert pair.copy(pair.connect(), plan_of([(0, MIB - 8, 0, MIB - 8, 8)])).outcome is Outcome.DONE
        assert np.array_equal(pair.remote()[: MIB - 8], image[: MIB - 8])


def test_description_of_a_restarted_peer():
    """A peer killed and started anew, even with the same engine key, costs one session, proven lost, and no more."""
    with RdmaProcess().pair(MIB) as pair:
        session = pair.connect()
        pair.target.kill()
        wait_lost(pair, session)
        assert losses(pair) == [(session, True)]
        with closing(ProcessTarget("rdma", {}, [MIB])) as restarted:
            again = pair.initiator.connect(restarted.description)
            assert pair.connected(again)
            assert pair.copy(again, scattered(64)).outcome is Outcome.DONE


def test_dead_peer_is_noticed_without_traffic():
    """The engine sees a dead peer only when a transfer fails; the lifeline sees it at once."""
    with RdmaProcess().pair(4096) as pair:
        session = pair.connect()
        pair.target.kill()
        wait_lost(pair, session)
        assert losses(pair) == [(session, True)]


def test_another_process_under_the_same_key_replaces_the_first():
    """An upstream peer restarts under its old engine key: its new description ends the old session and works."""
    with RdmaProcess().pair(MIB) as pair, closing(ProcessTarget("rdma", {}, [MIB])) as restarted:
        session = pair.connect()
        again = pair.initiator.connect(restarted.description)
        assert pair.connected(again)
        assert losses(pair) == [(session, False)]
        assert pair.copy(again, scattered(64)).outcome is Outcome.DONE
        assert restarted.read(0, 0, 8) == pair.memory[0][:8].tobytes()


def test_peer_without_lifeline_is_proven_dead_by_its_port():
    """A peer that describes only its engine, as upstream does, is served; after an error its closed port is proof."""
    with RdmaProcess().pair(MIB) as pair:
        engine, _ = _lifeline.separate(pair.target.description.engine)
        bare = attrs.evolve(pair.target.description, engine=engine)
        session = pair.initiator.connect(bare)
        assert pair.connected(session)
        assert pair.copy(session, scattered(64)).outcome is Outcome.DONE
        pair.target.kill()
        pair.target._process.join()
        assert pair.copy(session, scattered(64)).outcome is Outcome.FAILED
        wait_lost(pair, session)
        assert losses(pair) == [(session, True)]


def test_stopped_peer_takes_writes_and_delays_nobody():
    """One-sided writes reach a stopped process; a first connection to it fails unproven while others copy on."""
    with RdmaProcess().pair(MIB) as pair, closing(ProcessTarget("rdma", {}, [MIB], "stopped")) as stopped:
        session = pair.connect()
        stop(stopped)
        try:
            hopeless = pair.initiator.connect(stopped.description)
            for _ in range(20):
                assert pair.copy(session, scattered(64)).outcome is Outcome.DONE
            assert not losses(pair)
            wait_lost(pair, hopeless)
            assert losses(pair) == [(hopeless, False)]
        finally:
            go_on(stopped)
        stop(pair.target)
        try:
            assert pair.copy(session, scattered(64)).outcome is Outcome.DONE
        finally:
            go_on(pair.target)
        assert pair.connected(pair.initiator.connect(stopped.description))


def test_error_of_a_doorbell_is_refused_and_may_be_repeated():
    """When the card takes no work request, the post ends as REFUSED, and the same post works on the same session."""
    with Rdma().pair(MIB) as pair:
        session = pair.connect()
        card.set("post_errno", errno.ENOMEM)
        end = pair.copy(session, scattered(64))
        assert (end.outcome, end.nbytes) == (Outcome.REFUSED, 0), end
        assert pair.copy(session, scattered(64)).outcome is Outcome.DONE
        assert not losses(pair)


def test_full_send_queue_is_refused_when_quiet(monkeypatch):
    """A send queue that stays full refuses the post, but only when what it had taken of it is quiet."""
    monkeypatch.setenv("MORI_IO_SQ_BACKOFF_TIMEOUT_US", "50000")
    with Rdma(max_send_wr=16).pair(MIB) as pair:
        limits = pair.initiator._setup.limits
        pair.initiator._setup = attrs.evolve(pair.initiator._setup, limits=attrs.evolve(limits, queue_ops=1000))
        session = pair.connect()
        with card.turned("hang", 1):
            pair.post(1, session, scattered(64))
            assert not pair.listener._poll.poll(200)
        end = pair.listener.ends(1)[0]
        assert end.outcome is Outcome.REFUSED
        assert "SQ full" in end.reason
        image = pair.remote()
        pair.memory[0][:] = 0
        assert pair.copy(session, plan_of([(0, MIB - 8, 0, MIB - 8, 8)])).outcome is Outcome.DONE
        assert np.array_equal(pair.remote()[: MIB - 8], image[: MIB - 8])


def test_window_keeps_the_send_queue_from_filling(monkeypatch):
    """Posts beyond the depth of the send queue wait on our side, and each ends as DONE."""
    monkeypatch.setenv("MORI_IO_SQ_BACKOFF_TIMEOUT_US", "50000")
    with Rdma(max_send_wr=16).pair(MIB) as pair:
        session = pair.connect()
        with card.turned("hang", 1):
            for token in range(8):
                pair.post(token, session, scattered(100))
            assert pair.initiator._by_session[session.id]._ops <= 16
        assert {end.outcome for end in pair.listener.ends(*range(8))} == {Outcome.DONE}


def test_queued_posts_end_at_once_when_released():
    """Behind a card that executes nothing, a queued post is cancelled at once; what is under way ends when quiet."""
    with Rdma(max_send_wr=16).pair(MIB) as pair:
        session = pair.connect()
        with card.turned("hang", 1):
            for token in range(3):
                pair.post(token, session, scattered(16))
            for token in range(3):
                pair.initiator.release(token)
            assert {end.outcome for end in pair.listener.ends(1, 2)} == {Outcome.CANCELLED}
            gc.collect()  # the status of token 0 must not go with it
            assert not any(isinstance(e, Completed) and e.token == 0 for e in pair.listener.events)
        assert pair.listener.ends(0)[0].outcome is Outcome.DONE
        assert pair.copy(session, scattered(64)).outcome is Outcome.DONE


def test_delayed_card_expires_what_was_not_submitted():
    """Of a post that takes too long, what was not submitted by `not_after` ends as EXPIRED, and nothing moves later."""
    with Rdma(max_send_wr=16).pair(MIB) as pair:
        session = pair.connect()
        with card.turned("delay_us", 1000):
            pair.initiator.post(1, session, pair_write(), scattered(1000), time.monotonic() + 0.1)
            end = pair.listener.ends(1)[0]
        assert end.outcome is Outcome.EXPIRED
        assert 0 < end.nbytes < 8000
        image = pair.remote()
        pair.memory[0][:] = 0
        assert pair.copy(session, plan_of([(0, MIB - 8, 0, MIB - 8, 8)])).outcome is Outcome.DONE
        assert np.array_equal(pair.remote()[: MIB - 8], image[: MIB - 8])


def pair_write():
    from moriio_transport.base import Direction

    return Direction.WRITE


def test_port_that_goes_down_while_in_use():
    """The event of a lost port ends nothing: the engine carries on, and so do we."""
    with Rdma().pair(MIB) as pair:
        session = pair.connect()
        assert card.raise_event(card.PORT_ERROR) > 0
        assert pair.copy(session, scattered(64)).outcome is Outcome.DONE
        assert card.raise_event(card.PORT_ACTIVE) > 0
        assert pair.copy(session, scattered(64)).outcome is Outcome.DONE
        assert not losses(pair)


def test_fatal_event_of_a_queue_pair():
    """A queue pair that the card declares dead fails posts and session, and the next session works."""
    with Rdma().pair(MIB) as pair:
        session = pair.connect()
        with card.turned("hang", 1):
            pair.post(1, session, scattered(16))
            assert card.raise_event(card.QP_FATAL) > 0
        assert pair.listener.ends(1)[0].outcome is Outcome.FAILED
        wait_lost(pair, session)
        assert pair.copy(pair.connect(), scattered(64)).outcome is Outcome.DONE


def test_runs_longer_than_a_message_are_split():
    """Neighbouring runs are not merged beyond the longest message of the port, nor is any run longer."""
    with card.turned("max_msg_sz", MIB), Rdma().pair(8 * MIB) as pair:
        assert pair.initiator.capabilities.max_op_bytes == MIB
        runs = [(0, at, 0, at, MIB // 2) for at in range(0, 8 * MIB, MIB // 2)]
        assert pair.copy(pair.connect(), plan_of(runs)).outcome is Outcome.DONE
        assert np.array_equal(pair.remote(), pair.memory[0])


def test_memory_of_all_pairs_of_regions():
    """Regions need not be paired in order: a session for another pair is made when a post needs it."""
    with RdmaProcess().pair(4096, 8192, 4096) as pair:
        session = pair.connect()
        plan = plan_of([(i, 0, j, 1024 * i, 1000) for i in range(3) for j in range(3)])
        assert pair.copy(session, plan).outcome is Outcome.DONE
        for i in range(3):
            for j in range(3):
                assert np.array_equal(pair.remote(j)[1024 * i :][:1000], pair.memory[i][:1000])


def test_process_ends_though_a_transfer_never_does():
    """Closing with a transfer that never ends takes its bounded time, and the process ends with its own status."""
    script = """
        import sys
        from moriio_transport.mori import transport
        from tests.transport.mori.engine import card
        from tests.transport.mori.engine.test_faults import Rdma, scattered
        transport._QUIET_S = 0.2
        with Rdma().pair(1 << 20) as pair:
            session = pair.connect()
            card.set("hang", 1)
            pair.post(1, session, scattered(4))
        assert not pair.initiator.poll()
        sys.exit(7)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stdout + done.stderr


def test_engine_made_while_address_vanished_loses_only_the_session(monkeypatch):
    """A replacement engine that cannot be made is a lost session, not the end of the process."""
    with Rdma().pair(MIB) as pair:
        session = pair.connect()
        card.set("fail_next", card.ACCESS_ERROR)
        pair.copy(session, scattered(1))
        wait_lost(pair, session)
        monkeypatch.setattr(pair.initiator, "_host", "10.99.99.99")
        assert not pair.connected(pair.initiator.connect(pair.target.description))
        monkeypatch.setattr(pair.initiator, "_host", "127.0.0.1")
        assert pair.copy(pair.connect(), scattered(64)).outcome is Outcome.DONE
