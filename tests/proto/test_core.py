"""The core beside its tables: ids used again, strangers, limits, and connections that nobody needs."""

from __future__ import annotations

import pytest
from tests.field.story import Story

from moriio_proto.core import Core, CoreConfig, Role, Timing
from moriio_proto.effects import Dial, Forget, Reply, Settled
from moriio_proto.errors import LocalProtocolError, RemoteProtocolError
from moriio_proto.events import AbortTransfer, Endpoint, Expect, Load, OpEnded, Received, Skip
from moriio_proto.testing.transcript import small_geometry
from moriio_proto.wire.messages import Claim, Mode, Refused, Release, RemoteBlocks

both_modes = pytest.mark.parametrize("mode", ["WRITE", "READ"])
FAR = Endpoint("far", 7301, 62005)


def make_core(role: Role, mode: Mode = Mode.READ, **more: object) -> Core:
    """A core of small caches."""
    return Core(CoreConfig(role, mode, "token", small_geometry(), **more))  # type: ignore[arg-type]


@both_modes
@pytest.mark.parametrize("first", ["skip", "expect, abort"])
def test_an_id_used_again_while_p_is_being_told_settles_the_second_load(mode: str, first: str) -> None:
    """D: the release of the first transfer is not acknowledged yet when a second request loads the same id."""
    story = Story(mode)
    story.play(*(f"D {verb} t" for verb in first.split(", ")))
    assert story.nodes["D"].core.transfers["t"].state.name == "RELEASING"
    said = story.play("D expect t", "D load t 7,8 remote=1,2")
    assert said == ["D SETTLED req-t failed (a transfer with this id is over already)"]
    story.play("D abort t", "D skip t")
    assert len(story.settled) == 1
    assert not any("Error" in line for line in story.said)


def test_an_id_used_again_while_d_is_being_told_settles_the_second_offer() -> None:
    """P, WRITE: the end of the first transfer is not acknowledged yet when a second request has the same id."""
    story = Story("WRITE")
    story.begin()
    story.play("deliver", "ops P done")
    assert story.nodes["P"].core.transfers["t"].state.name == "NOTIFYING"
    story.play("P start t goal=2", "P progress t 0 2 4", "P finish t")
    assert [v for n, _, v in story.settled if n == "P"] == ["done", "failed"]
    story.calm()
    assert story.settled.count(("D", "req-t", "done")) == 1
    assert story.quiet("P")


def test_a_peer_that_never_answers_is_forgotten_with_its_connections() -> None:
    """The dial ends with the handshake's patience, and the address is dropped when nobody has needed it for a while."""
    core = make_core(Role.DECODE, timing=Timing(handshake_timeout=1.0, redial=0.4, forget=5.0))
    effects = core.receive(Load("t", "r", FAR, [1], 0, [1]), 0.0)
    while (deadline := core.next_deadline()) is not None:
        effects += core.tick(deadline)
    kinds = [type(e) for e in effects if isinstance(e, Dial | Forget)]
    assert kinds == [Dial, Dial, Dial, Forget, Forget]
    assert not core.peers
    assert not core.transfers
    assert [e.verdict for e in effects if isinstance(e, Settled)] == ["failed"]


def test_messages_of_unknown_transfers_leave_no_record() -> None:
    """Claims and releases of transfers that nobody offers are answered; they do not fill the table for ever."""
    core = make_core(Role.PREFILL)
    for i in range(50):
        (answer,) = core.receive(Received(Claim(f"t{i}", token="x"), "route"), 0.0)
        assert isinstance(answer, Reply)
        assert isinstance(answer.message, Refused)
    assert not core.transfers
    core.receive(Received(Release("t", token="x"), "route"), 0.0)
    core.tick(1000.0)
    assert not core.transfers


def test_a_full_table_takes_no_new_transfers_from_peers() -> None:
    """A peer cannot open more records than the limit; what is dropped is counted."""
    core = make_core(Role.PREFILL, Mode.WRITE, max_transfers=10)
    for i in range(30):
        core.receive(Received(RemoteBlocks(f"t{i}", "", ([1],), token="x"), "route"), 0.0)
    assert len(core.transfers) == 10
    assert core.stats.dropped == 20


def test_a_message_for_the_other_role_is_refused() -> None:
    """What only a decode node can answer changes nothing on a prefill node, and the other way round."""
    decode = make_core(Role.DECODE, Mode.WRITE)
    with pytest.raises(RemoteProtocolError, match="does not go to a decode node"):
        decode.receive(Received(RemoteBlocks("t", "", ([1],)), "route"), 0.0)
    assert not decode.transfers


def test_commands_that_cannot_be_are_refused_and_change_nothing() -> None:
    """A post that ended twice, and a second load under way, are the caller's errors; an abort of nothing is none."""
    core = make_core(Role.DECODE)
    assert core.receive(AbortTransfer("t"), 0.0) == []
    assert not core.transfers
    with pytest.raises(LocalProtocolError, match="has ended already"):
        core.receive(OpEnded(1, "done"), 0.0)
    core.receive(Load("t", "r", FAR, [1], 0, [1]), 0.0)
    with pytest.raises(LocalProtocolError, match="cmd_load"):
        core.receive(Load("t", "r2", FAR, [2], 0, [2]), 0.0)
    assert core.transfers["t"].owner == "r"
    for event in (Expect("t", FAR), Skip("t", FAR)):
        with pytest.raises(LocalProtocolError):
            core.receive(event, 0.0)


def test_putting_a_timer_off_does_not_grow_the_heap() -> None:
    """A layerwise transfer puts its watchdog off with every completion; the timers stay as many as they are."""
    story = Story("WRITE")
    story.play("P start t goal=2", "D load t 7,8", "deliver")
    core = story.nodes["P"].core
    before = len(core._timers._heap)
    for layer in range(1, 5):
        story.play(f"P progress t 0 2 {layer}")
        for _ in range(100):
            story.play("P progress t 0 2 1")
    assert len(core._timers._heap) <= before + 2
