"""Two whole nodes over real ports and real memory: both modes, many at once, and what must not kill a listener."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import zmq
from tests.transport.nodes import HOST, Node, eventually, free_ports, make_node, pair

from moriio_proto.core import Role
from moriio_proto.errors import ConfigurationError
from moriio_proto.events import AbortTransfer, Finish, Load, Preempt, Progress, StartOffer
from moriio_proto.wire.messages import Mode
from moriio_transport.control import ZmqControl
from moriio_transport.driver import collapse
from moriio_transport.reactor import ReactorDiedError

LAYERS = 4


def write(p: Node, d: Node, name: str, source: list[int], target: list[int]) -> None:
    """One WRITE in two chunks, layer by layer; D has nothing of it."""
    half = len(source) // 2
    p.tell(StartOffer(name, name, (d.endpoint,), len(source)))
    d.tell(Load(name, name, p.endpoint, target, 0))
    for start, end in ((0, half), (half, len(source))):
        for layer in range(1, LAYERS + 1):
            p.tell(Progress(name, start, end, layer, source[:end]))
    p.tell(Finish(name))


def read(p: Node, d: Node, name: str, source: list[int], target: list[int]) -> None:
    """One READ."""
    p.tell(StartOffer(name, name, (d.endpoint,), len(source)), Finish(name))
    d.tell(Load(name, name, p.endpoint, target, 0, source))


@pytest.mark.parametrize("mode", list(Mode))
def test_many_transfers_at_once_are_exact(mode: Mode) -> None:
    """Every byte of 40 concurrent transfers lands where it belongs, and both sides settle each once."""
    rng = random.Random(1)
    with pair(mode) as (p, d):
        ids = list(range(240))
        rng.shuffle(ids)
        places = [ids[6 * i : 6 * i + 6] for i in range(40)]
        targets = [places[(i + 7) % 40] for i in range(40)]
        before = d.memory.copy()
        for i, (source, target) in enumerate(zip(places, targets, strict=True)):
            (write if mode is Mode.WRITE else read)(p, d, f"t{i}", source, target)
        assert set(d.wait_settled(40).values()) == {"done"}
        assert set(p.wait_settled(40).values()) == {"done"}
        for source, target in zip(places, targets, strict=True):
            np.testing.assert_array_equal(p.blocks(source), d.blocks(target))
        untouched = sorted(set(range(256)) - set(ids))
        shape = (LAYERS, 256, -1)
        np.testing.assert_array_equal(before.reshape(shape)[:, untouched], d.blocks(untouched))


def test_garbage_kills_no_listener() -> None:
    """Frames that are no message, on both ports, are dropped; the next transfer works."""
    with pair(Mode.WRITE) as (p, d), zmq.Context() as context:
        junk = [b"", b"\xc1", b"\x81\xa4type\xa1x", b"\x93\x01\x02", b"\xff" * 5000, b"get_meta_msg"]
        for node in (p, d):
            for port in (node.endpoint.handshake_port, node.endpoint.notify_port):
                with context.socket(zmq.DEALER) as socket:
                    socket.setsockopt(zmq.LINGER, 1000)
                    socket.connect(f"tcp://{HOST}:{port}")
                    for frame in junk:
                        socket.send(frame)
                        socket.send_multipart([frame, b"", frame])
        eventually(lambda: p.driver.refused_frames >= 5 and d.driver.refused_frames >= 5)
        write(p, d, "after", [1, 2], [3, 4])
        assert d.wait_settled(1) == {"after": "done"}


def test_dead_peer_costs_others_nothing() -> None:
    """A load whose peer does not answer fails in its own time; loads from a live peer go through meanwhile."""
    nobody = free_ports(2)
    with pair(Mode.READ) as (p, d):
        dead = type(p.endpoint)(HOST, *nobody)
        d.tell(Load("dead", "dead", dead, [1], 0, [1]))
        for i in range(10):
            read(p, d, f"t{i}", [10 + i], [20 + i])
        verdicts = d.wait_settled(10)
        assert all(verdicts[f"t{i}"] == "done" for i in range(10))
        assert "dead" not in verdicts
        assert d.wait_settled(11)["dead"] == "failed"


def test_blocks_that_do_not_exist_fail_their_transfer_only() -> None:
    """A block id beyond the peer's cache never becomes an address."""
    with pair(Mode.READ) as (p, d):
        before = d.memory.copy()
        d.tell(Load("bad", "bad", p.endpoint, [1], 0, [10_000]))
        p.tell(StartOffer("bad", "bad", (d.endpoint,), 1), Finish("bad"))
        read(p, d, "good", [1], [2])
        assert d.wait_settled(2) == {"bad": "failed", "good": "done"}
        np.testing.assert_array_equal(before.reshape(LAYERS, 256, -1)[:, 1], d.blocks([1])[:, 0])


def test_aborts_at_any_moment_settle_both_sides() -> None:
    """Whenever D's request ends, D's blocks and P's come back, each exactly once."""
    rng = random.Random(2)
    with pair(Mode.WRITE) as (p, d):
        for i in range(60):
            name = f"t{i}"
            steps = [
                lambda n=name: p.tell(StartOffer(n, n, (d.endpoint,), 2)),
                lambda n=name: p.tell(Progress(n, 0, 2, LAYERS, [4, 5])),
                lambda n=name: p.tell(Finish(n)),
            ]
            d.tell(Load(name, name, p.endpoint, [6, 7], 0))
            when = rng.randrange(4)
            for j, step in enumerate(steps):
                if j == when:
                    d.tell(AbortTransfer(name))
                step()
            if when == 3:
                d.tell(AbortTransfer(name))
        assert len(p.wait_settled(60)) == 60
        assert len(d.wait_settled(60)) == 60


def test_a_taken_port_is_refused_by_name() -> None:
    """The error names the key and the port, at the moment of binding."""
    a, b, c = free_ports(3)
    control = ZmqControl(bind_host=HOST, handshake_port=a, notify_port=b, token="x", hello=(b"", b""))
    try:
        with pytest.raises(ConfigurationError, match=f"notify_port={b}"):
            ZmqControl(bind_host=HOST, handshake_port=c, notify_port=b, token="y", hello=(b"", b""))
    finally:
        control.close()


def test_collapse_keeps_what_no_later_progress_includes() -> None:
    """Only the newest progress of a transfer is kept, but never across a preemption."""
    old, new, other = (Progress("t", 0, 1, n, [1]) for n in (1, 2, 3))
    again = Preempt("t")
    assert collapse([old, new]) == [new]
    assert collapse([old, again, new, other]) == [old, again, other]


def test_a_dead_reactor_is_not_silent() -> None:
    """When the transfer thread dies by a bug, the next hook of the worker raises with the cause."""
    a, b = free_ports(2)
    node = make_node(Role.DECODE, Mode.READ, token="D9", ports=(a, b))
    node.driver.on_commands = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
    node.reactor.start()
    node.tell(AbortTransfer("t"))
    eventually(lambda: not any(t.name == "moriio-reactor" and t.is_alive() for t in threading.enumerate()))
    with pytest.raises(ReactorDiedError, match="ZeroDivisionError"):
        node.reactor.take_settled()
    node.reactor.close()


@pytest.mark.parametrize(("factor", "changes"), [("transfer_mode", {"mode": Mode.WRITE}), ("tp_size", {"tp_size": 2})])
def test_nodes_that_do_not_fit_refuse_each_other_by_name(factor: str, changes: dict) -> None:
    """A prefill node with another mode or size is refused at the handshake; the load fails with the factor's name."""
    a, b, c, e = free_ports(4)
    p = make_node(
        Role.PREFILL, changes.get("mode", Mode.READ), token="P1", ports=(a, b), tp_size=changes.get("tp_size", 1)
    )
    d = make_node(Role.DECODE, Mode.READ, token="D1", ports=(c, e))
    try:
        for node in (p, d):
            node.reactor.start()
        d.tell(Load("t", "t", p.endpoint, [1], 0, [1]))
        assert d.wait_settled(1) == {"t": "failed"}
        assert factor in d.settled[0].reason
    finally:
        for node in (p, d):
            node.reactor.close()
