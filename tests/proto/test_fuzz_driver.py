"""A driver takes anything: from the network, and from its transport."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moriio_proto.core import Core, CoreConfig, Role
from moriio_proto.events import AbortTransfer, Endpoint, Finish, Load, Progress, StartOffer
from moriio_proto.testing.clock import EventQueue
from moriio_proto.testing.transcript import LAYERS, small_geometry
from moriio_proto.wire import messages as m
from moriio_proto.wire.codec import encode, encode_hello
from moriio_transport.base import Region
from moriio_transport.driver import Driver
from moriio_transport.testing import MemoryFabric, MemoryTransport

PEER = Endpoint("peer", 1, 2)
GEOMETRY = small_geometry()
ids, tokens, stamps = st.sampled_from(["t", "u"]), st.sampled_from(["", "peer", "x"]), st.integers(0, 2**40)
blocks = st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=4), min_size=1, max_size=2).map(tuple)
MESSAGES = st.one_of(
    st.builds(m.RemoteBlocks, ids, st.just(""), blocks, st.integers(0, 3), st.integers(0, 9), tokens),
    st.builds(m.WriteDone, ids, st.booleans(), token=tokens),
    st.builds(m.Release, ids, st.integers(1, 8), tokens),
    st.builds(m.BareId, ids),
    st.builds(m.Claim, ids, tokens, stamps),
    st.builds(m.Granted, ids, tokens, st.integers(0, 10**6), stamps),
    st.builds(m.Refused, ids, tokens),
    st.builds(m.Abort, ids, tokens),
    st.builds(m.Released, ids, tokens),
)


class Silent:
    """A control channel that leads nowhere."""

    def dial(self, endpoint: Endpoint) -> None:
        """Nobody answers."""

    def forget(self, endpoint: Endpoint) -> None:
        """Nothing to close."""

    def send(self, endpoint: Endpoint, frame: bytes) -> None:
        """Lost."""

    def reply(self, route: object, frame: bytes) -> None:
        """Lost."""


class Lone:
    """A driver whose peer is whatever the test says, in fake time."""

    def __init__(self, role: Role, mode: m.Mode) -> None:
        self.queue = EventQueue()
        self.fabric = MemoryFabric(self.queue, random.Random(1))
        self.memory = [bytearray(GEOMETRY.region_bytes[0]) for _ in range(2)]
        self.ours, self.theirs = (self._transport(i) for i in range(2))
        self.driver = Driver(Core(CoreConfig(role, mode, "own", GEOMETRY)), self.ours, Silent(), GEOMETRY)
        self.hello = self._hello()

    def _transport(self, i: int) -> MemoryTransport:
        import ctypes

        transport = MemoryTransport(self.fabric, ["own", "peer"][i], lambda: self.queue.now)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(self.memory[i]))
        transport.register([Region(address, len(self.memory[i]))])
        return transport

    def _hello(self) -> tuple[bytes, bytes]:
        own = self.theirs.describe()
        extension = m.HelloExtension("peer", 0, 0, 1, 1, 1, m.CAPABILITIES, 2, "memory", own.regions, GEOMETRY)
        return encode_hello(m.Hello("peer", own.engine, (0,), 64, 256, "fake", extension), m.LayerDescriptors({}))

    def meet(self) -> None:
        """The peer answers the dial."""
        self.driver.on_hello(PEER, *self.hello, self.queue.now)

    def wait(self, seconds: float) -> None:
        """Time passes, for the transport and for timers."""
        self.queue.run(self.queue.now + seconds)
        self.driver.on_transport(self.queue.now)
        deadline = self.driver.core.next_deadline()
        if deadline is not None and deadline <= self.queue.now:
            self.driver.tick(self.queue.now)

    def say(self, message: m.NotifyMessage) -> None:
        """The peer says something."""
        self.driver.on_notify(encode(message), "route", self.queue.now)

    def tell(self, *events: object) -> None:
        """Our vLLM says something."""
        self.driver.on_commands(events, self.queue.now)  # type: ignore[arg-type]


def load(lone: Lone, t: str) -> None:
    """D asks for two blocks."""
    lone.tell(Load(t, f"req-{t}", PEER, [7, 8], 0, [10, 11]))


def offer(lone: Lone, t: str) -> None:
    """P computes two blocks."""
    lone.tell(StartOffer(t, f"req-{t}", (PEER,), 2), Progress(t, 0, 2, LAYERS, [10, 11]), Finish(t))


def disturb(lone: Lone, what: str, data: st.DataObject) -> None:
    """Something from the network, or time."""
    now = lone.queue.now
    if what in {"good", "mutant"}:
        frame = bytearray(encode(data.draw(MESSAGES)))
        if what == "mutant":
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        lone.driver.on_notify(bytes(frame), "route", now)
    elif what == "bytes":
        lone.driver.on_notify(data.draw(st.binary(max_size=40)), None, now)
        lone.driver.on_hello(PEER, data.draw(st.binary(max_size=40)), lone.hello[1], now)
    elif what == "hello":
        lone.meet()
    else:
        lone.wait(data.draw(st.sampled_from([0.01, 1.0, 11.0, 40.0])))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(list(Role)), st.sampled_from(list(m.Mode)), st.data())
def test_no_frame_gets_an_exception_out_of_a_driver(role: Role, mode: m.Mode, data: st.DataObject) -> None:
    """Good, mutated and arbitrary frames at any moment: one settlement per promise, and no exception."""
    lone = Lone(role, mode)
    kinds = st.sampled_from(["good", "good", "good", "mutant", "bytes", "hello", "wait", "vllm"])
    promised = 0
    for what in data.draw(st.lists(kinds, min_size=1, max_size=25)):
        if what != "vllm":
            disturb(lone, what, data)
        elif not promised:
            promised = 1
            (offer if role is Role.PREFILL else load)(lone, "t")
        elif role is Role.DECODE:
            lone.tell(AbortTransfer("t"))
    for _ in range(60):
        lone.wait(5.0)
    assert [s.owner for s in lone.driver.settled] == ["req-t"] * promised
    assert not lone.driver.core._ops


def pushing(fault: str) -> Lone:
    """A WRITE whose post meets this fault."""
    lone = Lone(Role.PREFILL, m.Mode.WRITE)
    if fault:
        setattr(lone.ours.faults, fault, 1.0)
    offer(lone, "t")
    lone.meet()
    lone.wait(0.1)
    lone.say(m.RemoteBlocks("t", "", ([7, 8],), token="peer"))
    lone.say(m.Granted("t", "peer", 10_000, int(lone.queue.now * 1e6)))
    lone.wait(0.1)
    return lone


def pulling(fault: str) -> Lone:
    """A READ whose post meets this fault."""
    lone = Lone(Role.DECODE, m.Mode.READ)
    if fault:
        setattr(lone.ours.faults, fault, 1.0)
    load(lone, "t")
    lone.meet()
    lone.wait(0.1)
    lone.say(m.Granted("t", "peer", 10_000, int(lone.queue.now * 1e6)))
    lone.wait(0.1)
    return lone


@pytest.mark.parametrize("begin", [pushing, pulling])
@pytest.mark.parametrize(("fault", "verdict"), [("", "done"), ("fail", "failed"), ("hang", None), ("wedge", None)])
def test_each_outcome_of_a_post_has_its_verdict(begin: object, fault: str, verdict: str | None) -> None:
    """Done is done, failed is failed, and what never ends is neither until it is quiet: then it is failed."""
    lone = begin(fault)  # type: ignore[operator]
    settled = [s.verdict for s in lone.driver.settled]
    assert settled == ([verdict] if verdict else [])
    if verdict is None:
        for _ in range(20):
            lone.wait(5.0)
        assert [s.verdict for s in lone.driver.settled] == ["failed"]
        assert not lone.ours.under_way


@pytest.mark.parametrize("begin", [pushing, pulling])
def test_a_refused_post_is_posted_again(begin: object) -> None:
    """A full queue costs time, not the transfer."""
    lone = begin("refuse")  # type: ignore[operator]
    assert not lone.driver.settled
    lone.ours.faults.refuse = 0.0
    for _ in range(3):
        lone.wait(0.05)
    assert [s.verdict for s in lone.driver.settled] == ["done"]


@pytest.mark.parametrize("begin", [pushing, pulling])
def test_a_dead_peer_fails_its_posts(begin: object) -> None:
    """What was under way when the peer died ends as failed, once."""
    lone = begin("late")  # type: ignore[operator]
    lone.fabric.kill("peer")
    for _ in range(6):
        lone.wait(5.0)
    assert [s.verdict for s in lone.driver.settled] == ["failed"]
