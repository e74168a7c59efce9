"""Field cases of the protocol: both cores under a network, a transport and a caller that misbehave."""

# ruff: noqa: N802 - tests are named after their cases

from __future__ import annotations

import itertools

import pytest

from moriio_proto.core import Role
from moriio_proto.events import Disconnected
from moriio_proto.geometry import GeometryMismatchError
from moriio_proto.geometry.layout import check_compatible
from moriio_proto.testing.transcript import small_geometry
from moriio_proto.wire.messages import Mode
from moriio_transport.base import Outcome
from moriio_transport.driver import _OUTCOME
from tests.field.story import Story

both_modes = pytest.mark.parametrize("mode", ["WRITE", "READ"])


def once(story: Story, node: str, owner: str = "req-t") -> str:
    """The one verdict on a request."""
    (verdict,) = [v for n, o, v in story.settled if (n, o) == (node, owner)]
    return verdict


@both_modes
def test_W_LEG_ID_DRIFT(mode):
    """Legs with different ids never meet: each side gives up within its deadline and says which side never came."""
    story = Story(mode)
    story.play("P start x goal=2", "D load y 7,8 remote=10,11", *story.prefill("x"))
    for _ in range(200):
        story.play("deliver", "wait 0.5")
    assert once(story, "P", "req-x") == once(story, "D", "req-y") == "failed"
    assert any("req-x failed (no progress in time while offered" in line for line in story.said)


@pytest.mark.parametrize("order", list(itertools.permutations(["finish", "release", "release"])), ids=str)
@both_modes
def test_W_EARLY_RELEASE(mode, order):
    """A release before P's own end is kept: P frees when vLLM hands the blocks over, at once, and once."""
    story = Story(mode)
    story.play("P start t goal=2", "D skip t", "deliver 1")
    for what in order:
        if what == "finish":
            story.play(*story.prefill())
        elif any(kind == "Release" for kind, _, _ in story.flying):
            story.play("again Release")
    story.play("deliver")
    assert once(story, "P") in {"done", "failed"}
    assert story.now == 0.0, "no timer was needed"


def test_W_FORCE_FREE_UNDER_READ():
    """READ: no byte of a read starts after P may free, and a read that ends too late is never used."""
    story = Story("READ")
    story.begin()
    story.play("deliver")
    (post,) = story.nodes["D"].ops
    hold = story.nodes["P"].core.transfers["t"].timers["due_lease"]
    assert post.not_after + story.nodes["P"].core.timing.margin <= hold
    story.play("wait 12")
    assert once(story, "P") == "failed", "the lease ended without a word from D"
    story.play("ops D done")
    assert once(story, "D") == "failed"
    story.calm()
    story.works("next")
    late = Story("READ")
    late.begin()
    late.play("deliver")
    late.now = late.nodes["D"].core.transfers["t"].lease_until  # the end of the read comes with that of the lease
    late.play("ops D done")
    assert once(late, "D") == "failed"


@both_modes
def test_W_ABORT_DOUBLE_SIGNAL(mode):
    """Whatever comes twice or after the end, vLLM hears of a request once per side."""
    for moment in range(12):
        story = Story(mode)
        story.begin()
        for _ in range(moment):
            story.play("deliver 1")
        story.play("D abort t", "ops P done", "ops D done")
        while story.flying:
            kind = story.flying[0][0]
            story.play(f"again {kind}", "deliver 1", "ops P done", "ops D done")
            assert len(story.said) < 2_000, "an exchange that never ends"
        story.play("D abort t")
        story.calm()
        once(story, "P")
        once(story, "D")


@both_modes
def test_W_ABORT_BEFORE_SCHED(mode):
    """A request that ends on D before it has blocks releases P's with one message, long before any lease ends."""
    story = Story(mode)
    story.play("P start t goal=2", *story.prefill(), "D expect t", "deliver", "D abort t", "deliver")
    assert once(story, "P") in {"done", "failed"}
    assert story.count("Release") == 1
    assert story.now == 0.0


@both_modes
def test_W_NO_CONSUMER(mode):
    """P holds finished blocks for a bounded time: for nobody, and for a D that died after it had asked."""
    nobody = Story(mode)
    nobody.play("P start t goal=2", *nobody.prefill())
    patience = nobody.nodes["P"].core.transfers["t"].timers["due_lease"]
    assert patience <= 60
    nobody.play(f"wait {patience - 1}")
    assert not nobody.settled
    nobody.play("wait 2")
    assert once(nobody, "P") == "failed"
    vanished = Story(mode)
    vanished.begin()
    vanished.play("deliver 3", "restart D")
    vanished.silence(80)
    assert once(vanished, "P") == "failed"


@both_modes
@pytest.mark.parametrize("heard", range(8))
def test_W_DECODE_WAITS_FOREVER(mode, heard):
    """Whatever the last word from P was, D's wait ends in time with a cause, and the next request works."""
    story = Story(mode)
    story.begin()
    story.play(f"deliver {heard}")
    story.silence(150)
    assert once(story, "D") == "failed"
    story.calm()
    story.works("next")


@both_modes
@pytest.mark.parametrize("seconds", [0, 1, 10, 25])
def test_W_PRODUCER_MAP_DROPPED(mode, seconds):
    """P knows its transfer until its blocks are free: a release long after the end still frees, at once."""
    story = Story(mode)
    story.play("P start t goal=2", *story.prefill(), f"wait {seconds}", "D skip t", "deliver")
    once(story, "P")
    assert story.now == seconds


@both_modes
@pytest.mark.parametrize("outcome", ["done", "failed", "refused"])
def test_W_FAILED_STATUS_STUCK(mode, outcome):
    """Every way in which a copy can end, repeated for ever, ends the transfer; every status of a transport is one."""
    assert set(_OUTCOME) == set(Outcome)
    assert set(_OUTCOME.values()) == {"done", "failed", "refused"}
    story = Story(mode)
    story.begin()
    for _ in range(400):
        story.play("deliver", f"ops P {outcome}", f"ops D {outcome}", "wait 0.5")
    assert once(story, "D") == ("done" if outcome == "done" else "failed")
    once(story, "P")
    assert story.quiet("P")
    assert story.quiet("D")


@both_modes
@pytest.mark.parametrize("rejected", [1, 5, 40])
def test_W_SQ_FULL(mode, rejected):
    """A full queue is no failure: the post is tried again, off the forward pass, and the transfer is done."""
    story = Story(mode)
    story.begin()
    story.play("deliver")
    side = "P" if mode == "WRITE" else "D"
    for _ in range(rejected):
        assert story.nodes[side].ops, "the refused post comes again"
        story.play(f"ops {side} refused", "wait 0.01", "deliver")
    story.calm()
    assert once(story, "D") == once(story, "P") == "done"


@pytest.mark.parametrize("data", ["done", "failed"])
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_W_NOTIF_POISON(data, lost):
    """WRITE: the end is told until it is acknowledged; both sides come to the verdict of the data, whatever is lost."""
    story = Story("WRITE")
    story.begin()
    story.play("deliver", f"ops P {data}")
    for _ in range(lost):
        story.play("drop WriteDone", "wait 1")
    story.calm()
    assert once(story, "D") == data
    assert once(story, "P") == data


def test_W_ROUTER_PREFILL_FAIL():
    """WRITE: P never gets its leg: D's wait ends in well under a minute, and P keeps nothing of it."""
    story = Story("WRITE")
    story.play("D expect t", "D load t 7,8")
    for _ in range(100):
        story.play("deliver", "wait 0.4")
    assert once(story, "D") == "failed"
    for _ in range(100):
        story.play("deliver", "wait 1")
    assert not story.nodes["P"].core.transfers
    assert not story.nodes["D"].core.transfers


@both_modes
@pytest.mark.parametrize("before", range(10))
@pytest.mark.parametrize("twice", [False, True])
def test_W_ABORT_MSG_DROPPED(mode, before, twice):
    """D's abort is heard in every state of P, also when it comes twice or is lost once: both sides end soon."""
    story = Story(mode)
    story.begin()
    story.play(f"deliver {before}", "D abort t")
    for kind in ("Abort", "Release"):
        if any(k == kind for k, _, _ in story.flying):
            story.play(f"again {kind}" if twice else f"drop {kind}")
    story.calm(rounds=60)
    once(story, "D")
    once(story, "P")
    assert not any("Error" in line for line in story.said)


@both_modes
def test_W_DECODE_RESTART_by_identity(mode):
    """W-DECODE-RESTART: a new process at D's address is another peer: the old one's transfers end, new ones work."""
    story = Story(mode)
    story.begin()
    story.play("deliver 4", "restart D")
    story.works("next")
    for _ in range(150):
        story.play("deliver", "ops P done", "wait 0.5")
    once(story, "P")


@both_modes
def test_W_STALE_ENGINE_EVICT(mode):
    """A session that broke is not kept: the next transfer dials and connects again, with the same pair."""
    story = Story(mode)
    story.works("first")
    side = story.nodes["P" if mode == "WRITE" else "D"]
    (known,) = side.core.peers.values()
    story._give(side, Disconnected(known.endpoint, known.epoch, "queue pair error"))
    assert known.state.name == "LOST"
    story.works("second")
    assert known.epoch == 2


@both_modes
def test_W_IPC_LIMIT(mode):
    """A handshake without a session is no success: READ fails with the reason, WRITE asks again and then is done."""
    story = Story(mode)
    story.begin()
    while not any(kind == "Connected" for kind, _, _ in story.flying):
        story.play("deliver 1")
    story.play("drop Connected")
    side = story.nodes["P" if mode == "WRITE" else "D"]
    (known,) = side.core.peers.values()
    story._give(side, Disconnected(known.endpoint, known.epoch, "too many handles"))
    story.said += story.lines
    story.calm()
    assert once(story, "D") == ("done" if mode == "WRITE" else "failed")
    assert mode == "WRITE" or "D SETTLED req-t failed (too many handles)" in story.said
    once(story, "P")
    story.works("next")


@pytest.mark.parametrize("theirs", [1, 2, 4, 8])
@pytest.mark.parametrize("ours", [1, 2, 4, 8])
def test_W_HEAD_SPLIT_GUARD(ours, theirs):
    """Heads are not split over ranks: another TP size is refused at the handshake, by name, and fails the load."""
    story = Story("READ")
    for name, size in (("P", theirs), ("D", ours)):
        story.nodes[name].core.tp_size = size
    story.begin()
    story.play("deliver")
    refused = [line for line in story.said if "req-t failed" in line]
    assert bool(refused) is (ours != theirs)
    assert all("tp_size" in line for line in refused)


def test_W_REMOTE_RATIO():
    """Blocks of another number of tokens are refused by name; nothing of the peer is computed from our own ratio."""
    import attrs

    ours = small_geometry()
    with pytest.raises(GeometryMismatchError, match="block_tokens"):
        check_compatible(ours, attrs.evolve(ours, block_tokens=32))


def test_W_PP_PAIRING():
    """Layers pair by name: a peer that lacks one of ours (a pipeline stage) is refused."""
    ours, part = small_geometry(layers=4), small_geometry(layers=3)
    with pytest.raises(GeometryMismatchError, match=r"layer\.3"):
        check_compatible(ours, part)


def test_W_ENGINE_ID_LOCALRANK():
    """Two processes at one address are two peers by their tokens, whatever engine id they claim."""
    story = Story("READ")
    story.works("first")
    tokens = {story.nodes["D"].core.peers[story.nodes["P"].endpoint].token}
    story.play("restart P")
    story.play("D load u 7,8 remote=10,11", "deliver")
    story.calm()
    story.works("second")
    tokens.add(story.nodes["D"].core.peers[story.nodes["P"].endpoint].token)
    assert len(tokens) == 2
    assert story.nodes["P"].core.role is Role.PREFILL
    assert story.mode is Mode.READ
