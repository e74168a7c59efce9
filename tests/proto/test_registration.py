"""The registration machine, with time as an argument."""

from __future__ import annotations

import math

import pytest

from moriio_proto.errors import IllegalEventError
from moriio_proto.machines.registration import (
    TABLE,
    AwaitRouter,
    Entered,
    Probe,
    R,
    Registration,
    SendPing,
)


def make(ranks: int = 1) -> Registration:
    """A registration that nothing happened to."""
    return Registration.of(ranks, ping_interval=1.5, probe_interval=5.0, forget_after=6.0)


def registered(ranks: int = 1) -> Registration:
    """One whose first ping left at time 0."""
    machine = make(ranks)
    machine.due(0.0)
    for rank in range(ranks):
        machine.handle("recv_listening", 0.0, rank)
    machine.handle("cq_sent", 0.0)
    return machine


def test_first_ping_waits_for_every_rank_in_any_order_and_despite_repeats():
    """No ping is tried before each rank answered, however often one of them answers."""
    machine = make(3)
    assert machine.due(0.0) == [Probe(0), Probe(1), Probe(2)]
    for rank in (2, 2, 0, 2):
        assert machine.handle("recv_listening", 1.0, rank) == []
    assert machine.handle("recv_listening", 2.0, 1) == [SendPing()]
    assert machine.state is R.UNREGISTERED
    assert machine.handle("cq_sent", 2.0) == [Entered(R.REGISTERED)]


def test_only_silent_ranks_are_asked_again_for_ever():
    """A rank that answered is left alone; one that never does is asked every probe interval without limit."""
    machine = make(2)
    machine.due(0.0)
    machine.handle("recv_listening", 0.1, 0)
    for turn in range(1, 1000):
        assert machine.deadline == turn * 5.0
        assert machine.due(turn * 5.0) == [Probe(1)]


def test_due_does_nothing_before_the_deadline():
    """The caller may call `due` as often as it likes."""
    machine = make()
    machine.due(0.0)
    assert machine.due(math.nextafter(5.0, 0.0)) == []


def test_pings_follow_the_clock_from_the_last_ping_that_left():
    """One ping per interval, none while the fate of the last is unknown."""
    machine = registered()
    assert machine.deadline == 1.5
    assert machine.due(1.7) == [SendPing()]
    assert machine.deadline == math.inf
    assert machine.handle("cq_sent", 1.7) == []
    assert machine.deadline == pytest.approx(3.2)


def test_w_router_restart_waits_for_the_router_without_pings_and_without_limit():
    """W-ROUTER-RESTART: during an outage nothing is sent by the clock; each return of the router costs one ping."""
    machine, now = registered(), 1.5
    for _ in range(50):
        assert machine.due(now) == [SendPing()]
        assert machine.handle("cq_refused", now) == [AwaitRouter(), Entered(R.UNREGISTERED)]
        assert machine.deadline == math.inf
        assert machine.due(now + 1e6) == []
        now += 1e6
        assert machine.handle("cq_writable", now) == [SendPing()]
        assert machine.handle("cq_sent", now) == [Entered(R.REGISTERED)]
        now += 1.5


def test_router_that_comes_before_the_ranks_hears_nothing_yet():
    """A writable socket alone is no reason to ping."""
    machine = make(2)
    machine.due(0.0)
    assert machine.handle("cq_writable", 0.0) == []


def test_router_that_comes_last_is_registered_with_at_once():
    """A first ping that is refused is tried when the socket turns writable."""
    machine = make()
    machine.due(0.0)
    assert machine.handle("recv_listening", 1.0, 0) == [SendPing()]
    assert machine.handle("cq_refused", 1.0) == [AwaitRouter()]
    assert machine.handle("cq_writable", 90.0) == [SendPing()]


def test_draining_ends_when_the_router_has_forgotten():
    """The router's patience counts from the last ping, not from the wish to drain."""
    machine = registered()
    assert machine.handle("cmd_drain", 1.0) == [Entered(R.DRAINING)]
    assert machine.deadline == 6.0
    assert machine.due(5.9) == []
    assert machine.due(6.0) == [Entered(R.CLOSED)]


def test_ping_on_its_way_while_draining_begins_prolongs_it():
    """What the router heard last decides, also when the outcome of that ping is reported late."""
    machine = registered()
    machine.due(1.5)
    machine.handle("cmd_drain", 1.5)
    assert machine.handle("cq_sent", 2.0) == []
    assert machine.deadline == 8.0


def test_draining_an_instance_that_never_pinged_closes_at_once():
    """There is nothing to forget."""
    machine = make()
    machine.due(0.0)
    assert machine.handle("cmd_drain", 0.0) == [Entered(R.CLOSED)]


@pytest.mark.parametrize("drained", [False, True])
def test_close_is_final_and_absorbs_everything(drained):
    """After CLOSED no trigger has an effect or sets a timer."""
    machine = registered()
    if drained:
        machine.handle("cmd_drain", 0.0)
    assert machine.handle("cmd_close", 0.0) == [Entered(R.CLOSED)]
    for trigger in TABLE.table:
        assert machine.handle(trigger, 1.0, 0) == []
    assert machine.state is R.CLOSED
    assert machine.deadline == math.inf


def test_every_trigger_has_an_answer_in_every_state():
    """No event, however late, is an error; only an unknown trigger is."""
    assert {(trigger, state) for trigger, by in TABLE.table.items() for state in by} == {
        (trigger, state) for trigger in TABLE.table for state in R
    }
    with pytest.raises(IllegalEventError, match="recv_pong"):
        make().handle("recv_pong", 0.0)
