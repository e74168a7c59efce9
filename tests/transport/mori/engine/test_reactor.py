"""Whole nodes in two processes over the real engine: both modes, many transfers, an engine error, a killed peer."""

from __future__ import annotations

import contextlib
import multiprocessing
import random

import numpy as np
import pytest
from tests.transport.mori.engine import card
from tests.transport.nodes import free_ports, make_node

from moriio_proto.core import Role, Timing
from moriio_proto.events import Finish, Load, Progress, StartOffer
from moriio_proto.wire.messages import Mode

LAYERS = 4
TIMING = Timing(lease=3.0, transfer_timeout=5.0, handshake_timeout=3.0, defer_timeout=5.0, recv_abort_timeout=10.0)


def serve(pipe, role, mode, ports, token):
    """A node in a child process: answers (method, arguments) until None."""
    node = make_node(role, mode, token=token, ports=ports, backend="rdma", timing=TIMING)
    node.reactor.start()
    pipe.send((node.endpoint, node.memory.tobytes()))
    while (order := pipe.recv()) is not None:
        method, arguments = order
        answer = getattr(node, method)(*arguments)
        pipe.send(answer)
    node.reactor.close()


class Child:
    """A node in another process."""

    def __init__(self, role, mode, ports, token):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, role, mode, ports, token), daemon=True)
        self.process.start()
        theirs.close()
        self.endpoint, self.memory = self.pipe.recv()

    def __call__(self, method, *arguments):
        self.pipe.send((method, arguments))
        return self.pipe.recv()

    def tell(self, *events):
        self("tell", *events)

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self.process.join(30)
        assert self.process.exitcode is not None


@contextlib.contextmanager
def nodes(mode):
    """The node that moves the bytes, here, so that its card can be made to fail, and its peer in a child process."""
    a, b, c, d = free_ports(4)
    ours, theirs = (Role.PREFILL, Role.DECODE) if mode is Mode.WRITE else (Role.DECODE, Role.PREFILL)
    child = Child(theirs, mode, (a, b), "child")
    node = make_node(ours, mode, token="ours", ports=(c, d), backend="rdma", timing=TIMING)
    node.reactor.start()
    try:
        yield node, child
    finally:
        node.reactor.close()
        child.close()


def start(mode, node, child, name, source, target):
    """One transfer of all layers."""
    prefill, decode = (node, child) if mode is Mode.WRITE else (child, node)
    prefill.tell(StartOffer(name, name, (decode.endpoint,), len(source)))
    if mode is Mode.WRITE:
        decode.tell(Load(name, name, prefill.endpoint, target, 0))
        for layer in range(1, LAYERS + 1):
            prefill.tell(Progress(name, 0, len(source), layer, source))
        prefill.tell(Finish(name))
    else:
        prefill.tell(Finish(name))
        decode.tell(Load(name, name, prefill.endpoint, target, 0, source))


def check(mode, node, child, places):
    """Every block of D holds P's bytes."""
    for source, target in places:
        prefill, decode = (source, target)
        ours, theirs = (prefill, decode) if mode is Mode.WRITE else (decode, prefill)
        np.testing.assert_array_equal(node.blocks(ours), child("blocks", theirs))


def draw(count, each=6):
    """Places in P and D of `count` transfers, which do not overlap."""
    ids = list(range(count * each))
    random.Random(3).shuffle(ids)
    parts = [ids[each * i : each * (i + 1)] for i in range(count)]
    return list(zip(parts, parts[5:] + parts[:5], strict=True))


@pytest.mark.parametrize("mode", list(Mode))
def test_two_processes_move_blocks(mode):
    """Forty transfers at once between two processes are exact, and both sides settle each once."""
    with nodes(mode) as (node, child):
        places = draw(40)
        for i, (source, target) in enumerate(places):
            start(mode, node, child, f"t{i}", source, target)
        assert set(child("wait_settled", 40).values()) == {"done"}
        assert set(node.wait_settled(40).values()) == {"done"}
        check(mode, node, child, places)


@pytest.mark.parametrize("mode", list(Mode))
def test_transfers_after_an_engine_error_are_exact(mode):
    """An engine error costs the transfers it hit; later ones go through a new session of the same processes."""
    with nodes(mode) as (node, child):
        places = draw(8)
        start(mode, node, child, "before", *places[0])
        assert child("wait_settled", 1)["before"] == node.wait_settled(1)["before"] == "done"
        card.set("fail_next", card.ACCESS_ERROR)
        start(mode, node, child, "hit", *places[1])
        assert child("wait_settled", 2).keys() == node.wait_settled(2).keys() == {"before", "hit"}
        for i, (source, target) in enumerate(places[2:]):
            start(mode, node, child, f"t{i}", source, target)
        theirs, ours = child("wait_settled", 8), node.wait_settled(8)
        assert {verdict for name, verdict in (theirs | ours).items() if name != "hit"} == {"done"}
        check(mode, node, child, places[2:])


@pytest.mark.parametrize("mode", list(Mode))
def test_killed_peer_settles_everything(mode):
    """When the other process dies amid transfers, each of ours settles, and a new process is served."""
    with nodes(mode) as (node, child):
        places = draw(10)
        with card.turned("delay_us", 20_000):
            for i, (source, target) in enumerate(places):
                start(mode, node, child, f"t{i}", source, target)
            child.process.kill()
            child.process.join()
        assert len(node.wait_settled(10, timeout=60)) == 10
        role = Role.DECODE if mode is Mode.WRITE else Role.PREFILL
        restarted = Child(role, mode, free_ports(2), "restarted")
        start(mode, node, restarted, "after", *places[0])
        assert restarted("wait_settled", 1)["after"] == node.wait_settled(11)["after"] == "done"
        check(mode, node, restarted, places[:1])
        restarted.close()
