"""Posts of the loopback transport while its copy thread is held in the middle of a slice: no timing involved."""

import contextlib
import threading

import numpy as np
import pytest

from moriio_transport.base import Completed, Outcome, Region, SessionLost, TransportError
from moriio_transport.conformance import PeerProcessConformance, TransportConformance, plan_of
from moriio_transport.loopback import INLINE_BYTES, LoopbackTransport

LARGE = plan_of([(0, 0, 0, 0, INLINE_BYTES + 1)])
SMALL = plan_of([(0, INLINE_BYTES, 0, 0, INLINE_BYTES)])


class Within(TransportConformance):
    backend = "loopback"


class Between(PeerProcessConformance):
    backend = "loopback"


class Held:
    """A pair whose copy thread stops before it copies, until `let_go`; token 1 is in the thread, 2 waits."""

    def __init__(self, pair):
        self.pair, self.session = pair, pair.connect()
        peer = pair.initiator._peers[self.session.id]
        entered, self._open, move = threading.Event(), threading.Event(), peer.move
        main = threading.current_thread()

        def hold(*args, **kwargs):
            if threading.current_thread() is not main:
                entered.set()
                assert self._open.wait(60)
            return move(*args, **kwargs)

        peer.move = hold
        pair.post(1, self.session, LARGE)
        pair.post(2, self.session, LARGE)
        assert entered.wait(60)

    def let_go(self):
        """The thread goes on."""
        self._open.set()

    def ended(self):
        """Outcomes by token of what has ended by now, without waiting."""
        self.pair.listener.events += self.pair.initiator.poll()
        return {e.token: e.outcome for e in self.pair.listener.events if isinstance(e, Completed)}


@pytest.fixture
def held():
    """A held pair within one process; let go at the end."""
    with Within().pair(4 * INLINE_BYTES) as pair:
        held = Held(pair)
        try:
            yield held
        finally:
            held.let_go()


def test_release(held):
    """A waiting post ends at once; a running one only when its slice is over."""
    held.pair.initiator.release(1)
    held.pair.initiator.release(2)
    assert held.ended() == {2: Outcome.CANCELLED}
    held.let_go()
    assert [end.outcome for end in held.pair.listener.ends(1, 2)] == [Outcome.CANCELLED] * 2


def test_disconnect(held):
    """Disconnecting returns at once, ends what waits, and ends what runs when it is quiet."""
    held.pair.initiator.disconnect(held.session)
    assert held.ended() == {2: Outcome.CANCELLED}
    held.let_go()
    assert held.pair.listener.ends(1)[0].outcome is Outcome.CANCELLED


def test_close_waits_for_the_running_slice(held):
    """close() is over only after the running slice, and every post then has its end."""
    closer = threading.Thread(target=held.pair.initiator.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    held.let_go()
    closer.join(60)
    assert not closer.is_alive()
    assert held.ended() == {1: Outcome.CANCELLED, 2: Outcome.CANCELLED}


def test_small_posts_pass_large_ones(held):
    """A post of at most `inline_bytes` is over when post() returns, whatever the threads do."""
    assert held.pair.initiator.capabilities.inline_bytes == INLINE_BYTES
    held.pair.post(3, held.session, SMALL)
    assert held.ended() == {3: Outcome.DONE}
    assert np.array_equal(held.pair.remote()[:INLINE_BYTES], held.pair.memory[0][INLINE_BYTES : 2 * INLINE_BYTES])


def test_token_in_use_is_refused(held):
    """A token of a post that has not ended is refused by name; afterwards it may be used again."""
    with pytest.raises(TransportError, match="token 2 is in use"):
        held.pair.post(2, held.session, SMALL)
    held.let_go()
    held.pair.listener.ends(1, 2)
    held.pair.post(2, held.session, SMALL)
    assert held.pair.initiator.poll() == [Completed(2, Outcome.DONE, INLINE_BYTES)]


def test_dead_peer_ends_waiting_posts_at_once():
    """With the thread held, the death of the peer is told, what waits fails at once, and what runs fails later."""
    with Between().pair(4 * INLINE_BYTES) as pair:
        held = Held(pair)
        try:
            pair.target.kill()
            pair.listener.until(lambda events: any(isinstance(e, SessionLost) for e in events))
            assert held.ended() == {2: Outcome.FAILED}
        finally:
            held.let_go()
        assert pair.listener.ends(1)[0].outcome is Outcome.FAILED
        assert sum(isinstance(e, SessionLost) for e in pair.listener.events) == 1


def test_order_of_registration():
    """describe() before register(), and a second register(), are refused with what is expected."""
    memory = np.zeros(4096, np.uint8)
    region = Region(memory.ctypes.data, memory.nbytes)
    with contextlib.closing(LoopbackTransport()) as transport:
        with pytest.raises(TransportError, match=r"expected register\(\) before"):
            transport.describe()
        transport.register([region])
        with pytest.raises(TransportError, match="called twice"):
            transport.register([region])
