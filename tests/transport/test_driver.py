"""The driver: posts that are split, refused, or have no session, and effects that cannot be carried out."""

from __future__ import annotations

import pytest

from moriio_proto import effects
from moriio_proto.core import Core, CoreConfig, Role
from moriio_proto.events import Endpoint, Finish, Load, Progress, StartOffer
from moriio_proto.testing.transcript import small_geometry
from moriio_proto.wire.codec import encode
from moriio_proto.wire.messages import Claim, Mode
from moriio_transport.driver import Driver, collapse

FAR = Endpoint("far", 7301, 62005)


class Control:
    """Keeps what was asked of it."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *args: self.asked.append((name, *args))


class Transport:
    """Never called here: no session is ever made."""


def make_driver(role=Role.DECODE, mode=Mode.READ):
    """A driver without a peer."""
    geometry = small_geometry()
    return Driver(Core(CoreConfig(role, mode, "token", geometry)), Transport(), Control(), geometry)


def test_every_effect_has_a_carrier():
    """No effect of the core is without somebody who carries it out."""
    kinds = set(effects.Effect.__args__)
    assert set(make_driver()._carriers) == kinds


def test_a_post_without_a_session_fails_its_transfer_only():
    """A post to a peer whose session has gone is answered as failed, within the same call."""
    driver = make_driver()
    driver.on_commands([Load("t", "r", FAR, [1], 0, [1])], 0.0)
    record = driver.core.transfers["t"]
    record.lease_until = 100.0
    post = effects.Post(7, FAR, False, 0, 4, [1], [1], 100.0)
    driver.core._ops[7] = record
    record.pending[7] = post
    record.state = type(record.state).PULLING
    driver._carry_out([post])
    driver._pay(0.0)
    assert [(s.owner, s.verdict, s.reason) for s in driver.settled] == [("r", "failed", "no session with the peer")]


@pytest.mark.parametrize("frame", [b"", b"\x00" * 100, b"\xc1", encode(Claim("t", token="x"))[:-3]])
def test_a_frame_that_is_no_message_is_counted_and_dropped(frame):
    """Garbage from a peer raises nothing and opens nothing."""
    driver = make_driver(Role.PREFILL)
    driver.on_notify(frame, "route", 0.0)
    driver.on_hello(FAR, frame, frame, 0.0)
    assert driver.refused_frames >= 1
    assert not driver.core.transfers


def test_a_command_without_an_answer_is_dropped():
    """A command that the state has no row for is logged; those after it are carried out."""
    driver = make_driver(Role.PREFILL)
    driver.on_commands([Finish("nothing"), StartOffer("t", "r", (FAR,), 1), Finish("t")], 0.0)
    assert driver.core.transfers["t"].state.name == "OFFERED"


def test_one_command_is_not_collapsed():
    """A single command is handed on as it is."""
    progress = Progress("t", 0, 1, 1, [1])
    assert collapse([progress]) == [progress]
    assert collapse([]) == []


def test_lost_peers_connections_are_closed():
    """When the core gives a peer up, the control channel hears of it."""
    driver = make_driver()
    driver.on_commands([Load("t", "r", FAR, [1], 0, [1])], 0.0)
    while (deadline := driver.core.next_deadline()) is not None:
        driver.tick(deadline)
    assert ("forget", FAR) in driver.control.asked
    assert [s.verdict for s in driver.settled] == ["failed"]
