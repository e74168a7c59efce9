"""Field cases on whole nodes without vLLM: real ports, real memory, and a network that can go deaf."""

# ruff: noqa: N802 - tests are named after their cases

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading

import attrs
import numpy as np
import pytest
import zmq

from moriio_proto.core import Role, Timing
from moriio_proto.errors import ConfigurationError, ParameterError
from moriio_proto.events import AbortTransfer, Endpoint, Finish, Load, Progress, StartOffer
from moriio_proto.wire.addresses import handshake_port, local_dp_rank
from moriio_proto.wire.messages import Mode
from moriio_proto.wire.params import parse_decode_params, parse_prefill_params
from moriio_transport import control as control_module
from moriio_transport.control import Frame, HelloAnswer, ZmqControl
from moriio_vllm.endpoints import check, decode_endpoints, prefill_endpoint
from tests.transport.nodes import HOST, Node, eventually, free_ports, make_node, pair

LAYERS = 4
both_modes = pytest.mark.parametrize("mode", list(Mode))
QUICK = Timing(handshake_timeout=1.0, redial=0.1, lease=1.0, margin=0.1, retry=0.05, forget=1.0)


def move(p: Node, d: Node, name: str, source: list[int], target: list[int], owners: tuple[str, str] = ("", "")) -> None:
    """One transfer as the router begins it: both legs at once, or, in READ, D's after P's; `owners`: their own ids."""
    offer = StartOffer(name, owners[0] or name, (d.endpoint,), len(source))
    load = Load(name, owners[1] or name, p.endpoint, target, 0, source if p.core.mode is Mode.READ else [])
    if p.core.mode is Mode.READ:
        p.tell(offer, Finish(name))
        eventually(lambda: name in p.core.transfers)
        d.tell(load)
    else:
        d.tell(load)
        p.tell(offer, *(Progress(name, 0, len(source), layer, source) for layer in range(1, LAYERS + 1)), Finish(name))


@both_modes
def test_W_ID_SUFFIX(mode):
    """Each side has ids of its own, one even a prefix of another: legs meet on the transfer id and nothing else."""
    with pair(mode) as (p, d):
        move(p, d, "x1", [1, 2], [11, 12], ("cmpl-1", "cmpl-1-9f3c"))
        move(p, d, "x2", [3, 4], [13, 14], ("cmpl-1-9f3c", "cmpl-1"))
        assert d.wait_settled(2) == {"cmpl-1-9f3c": "done", "cmpl-1": "done"}
        assert p.wait_settled(2) == {"cmpl-1-9f3c": "done", "cmpl-1": "done"}
        np.testing.assert_array_equal(p.blocks([1, 2, 3, 4]), d.blocks([11, 12, 13, 14]))


@both_modes
def test_W_CANCEL_STORM(mode):
    """150 transfers, clients leaving at random: each settles once a side, no post stays, the next one is right."""
    rng = random.Random(7)
    with pair(mode) as (p, d):
        for i in range(150):
            move(p, d, f"t{i}", [i, i + 1], [200 - i, 201 - i])
            for node in rng.sample([p, d], rng.randrange(2)):
                if node is d:
                    node.tell(AbortTransfer(f"t{i}"))
            if rng.random() < 0.3:
                d.tell(AbortTransfer(f"t{max(0, i - rng.randrange(5))}"))
        assert len(p.wait_settled(150)) == 150
        assert len(d.wait_settled(150)) == 150
        over = ("FREED", "CLOSED")
        for node in (p, d):
            eventually(lambda node=node: all(t.state.name in over for t in list(node.core.transfers.values())))
            assert not node.driver._posts
        move(p, d, "next", [5, 6, 7], [9, 8, 3])
        assert d.wait_settled(151)["next"] == "done"
        assert p.wait_settled(151)["next"] == "done"
        assert len(p.settled) == len(d.settled) == 151
        np.testing.assert_array_equal(p.blocks([5, 6, 7]), d.blocks([9, 8, 3]))


@both_modes
@pytest.mark.parametrize(("max_op_bytes", "max_ops"), [(300, 1_000_000), (1 << 30, 3), (64, 2)])
def test_W_MAX_MSG(mode, max_op_bytes, max_ops):
    """A transport with tiny limits gets posts within them, and every byte still arrives."""
    seen = []

    def limited(transport):
        transport.capabilities = attrs.evolve(
            transport.capabilities, max_op_bytes=max_op_bytes, max_ops_per_post=max_ops
        )
        post = transport.post

        def watched(token, session, direction, plan, not_after):
            seen.append((len(plan), int(plan.nbytes.max())))
            post(token, session, direction, plan, not_after)

        transport.post = watched
        return transport

    with pair(mode, wrap=limited) as (p, d):
        move(p, d, "t", [1, 2, 9, 4], [8, 3, 2, 6])
        assert d.wait_settled(1) == {"t": "done"}
        np.testing.assert_array_equal(p.blocks([1, 2, 9, 4]), d.blocks([8, 3, 2, 6]))
    assert seen
    assert max(ops for ops, _ in seen) <= max_ops
    assert max(nbytes for _, nbytes in seen) <= max_op_bytes


@both_modes
@pytest.mark.parametrize("who", ["P", "D"])
def test_W_DECODE_RESTART(mode, who):
    """One side is replaced at the same ports: the first transfer after it may be lost, the next 20 are right."""
    ports = dict(zip("PD", (tuple(free_ports(2)), tuple(free_ports(2))), strict=True))
    roles = {"P": Role.PREFILL, "D": Role.DECODE}

    def start(name, token):
        node = make_node(roles[name], mode, token=token, ports=ports[name], timing=QUICK)
        node.reactor.start()
        return node

    nodes = {name: start(name, f"{name}1") for name in "PD"}
    try:
        move(nodes["P"], nodes["D"], "first", [1, 2], [3, 4])
        assert nodes["D"].wait_settled(1) == {"first": "done"}
        other = "D" if who == "P" else "P"
        if other == "D":
            nodes["D"].tell(Load("lost", "lost", nodes["P"].endpoint, [7], 0, [7]))
        nodes[who].reactor.close()
        nodes[who] = start(who, f"{who}2")
        move(nodes["P"], nodes["D"], "second", [1, 2], [3, 4])
        eventually(lambda: "second" in nodes["D"].wait_settled(0))
        ids = list(range(20))
        for i in ids:
            move(nodes["P"], nodes["D"], f"t{i}", [10 + i], [50 + i])
        eventually(lambda: {f"t{i}" for i in ids} <= set(nodes["D"].wait_settled(0)))
        verdicts = nodes["D"].wait_settled(0)
        assert {verdicts[f"t{i}"] for i in ids} == {"done"}
        np.testing.assert_array_equal(
            nodes["P"].blocks([10 + i for i in ids]), nodes["D"].blocks([50 + i for i in ids])
        )
    finally:
        for node in nodes.values():
            node.reactor.close()


def test_W_PORT_TOCTOU():
    """20 nodes start at once on the same ports: one has them, the others name key and port and leave nothing."""
    a, b = free_ports(2)
    made, errors = [], []

    def start(i):
        try:
            made.append(ZmqControl(bind_host=HOST, handshake_port=a, notify_port=b, token=f"n{i}", hello=(b"", b"")))
        except ConfigurationError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=start, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for control in made:
        control.close()
    assert len(made) <= 1
    assert len(made) + len(errors) == 20
    assert all(f"handshake_port={a}" in e or f"notify_port={b}" in e for e in errors)
    start(99)
    assert len(made) > 0, "the ports are free again"
    made[-1].close()


def test_W_DNS_STALE():
    """Names stay names down to the socket, which resolves at every connect; a lost peer's sockets are closed."""
    a, b, c, d = free_ports(4)
    control = ZmqControl(bind_host=HOST, handshake_port=a, notify_port=b, token="x", hello=(b"", b""))
    try:
        peer = Endpoint("localhost", c, d)
        control.send(peer, b"frame")
        control.dial(peer)
        first = control._dealers[peer]
        assert first.getsockopt(zmq.LAST_ENDPOINT).startswith(b"tcp://localhost:")
        control.forget(peer)
        assert first.closed
        assert not control._dealers
        assert not control._dials
        control.send(peer, b"frame")
        assert control._dealers[peer] is not first
    finally:
        control.close()


class Forwarder:
    """A TCP forwarder that can go deaf: what is connected then stays connected, and nothing passes any more."""

    def __init__(self, target: int) -> None:
        self.target, self.pairs = target, {}
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]
        self.wake, self.woken = socket.socketpair()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def go_deaf(self) -> None:
        """Drop everything of the present connections, silently."""
        self.wake.send(b"d")

    def close(self) -> None:
        """End."""
        self.wake.send(b"q")
        self.thread.join()

    def run(self) -> None:
        deaf: set[socket.socket] = set()
        with contextlib.ExitStack() as opened:
            for each in (self.listener, self.wake, self.woken):
                opened.enter_context(each)
            while True:
                watched = [s for s in self.pairs if s not in deaf]
                for ready in select.select([self.listener, self.woken, *watched], [], [])[0]:
                    if ready is self.woken:
                        if ready.recv(1) == b"q":
                            return
                        deaf |= set(self.pairs)
                    elif ready is self.listener:
                        near = opened.enter_context(ready.accept()[0])
                        far = opened.enter_context(socket.create_connection((HOST, self.target)))
                        self.pairs |= {near: far, far: near}
                    elif ready in self.pairs and ready not in deaf:
                        data = b""
                        with contextlib.suppress(OSError):
                            data = ready.recv(65536)
                            self.pairs[ready].sendall(data)
                        if not data:
                            deaf.add(ready)


def test_W_IDLE_CONNECTION(monkeypatch):
    """A connection that a middlebox dropped silently is noticed by its heartbeats and made anew; frames pass again."""
    monkeypatch.setattr(control_module, "HEARTBEAT_MS", 50)
    monkeypatch.setattr(control_module, "HEARTBEAT_TIMEOUT_MS", 150)
    a, b, c, d = free_ports(4)
    near = ZmqControl(bind_host=HOST, handshake_port=a, notify_port=b, token="near", hello=(b"1", b"2"))
    far = ZmqControl(bind_host=HOST, handshake_port=c, notify_port=d, token="far", hello=(b"3", b"4"))
    box = Forwarder(d)
    peer = Endpoint(HOST, c, box.port)
    heard: list[bytes] = []

    def pump():
        near.send(peer, b"again")  # as the core does, until it is answered
        for control in (near, far):
            for source, _ in control.poller.poll(20):
                heard.extend(i.data for i in control.receive(source) if isinstance(i, Frame))

    def arrives() -> bool:
        pump()
        return bool(heard)

    try:
        eventually(arrives)
        box.go_deaf()
        for _ in range(10):
            pump()
        heard.clear()
        eventually(arrives)
    finally:
        near.close()
        far.close()
        box.close()


LEG = {
    "transfer_id": "t", "remote_host": "10.0.0.1", "remote_handshake_port": 7301, "remote_notify_port": 62005,
    "remote_dp_size": 4, "remote_dp_size_local": 2, "tp_size": 2, "remote_block_ids": [1],
}  # fmt: skip


def decode_leg(**more):
    """D's parameters, parsed."""
    return parse_decode_params({**LEG, "do_remote_prefill": True, **more}, "", Mode.READ)


def test_W_DP_READ_RANK0():
    """D goes to the data-parallel rank that computed the prompt: every rank has ports of its own in its pod."""
    ends = {(dp, tp): prefill_endpoint(decode_leg(remote_dp_rank=dp), tp, 2) for dp in range(4) for tp in range(2)}
    assert {(e.handshake_port, e.notify_port) for e in ends.values()} == {(7301 + i, 62005 + i) for i in range(4)}
    assert ends[3, 1].handshake_port == 7301 + 1 * 2 + 1
    assert ends[0, 0] != ends[1, 0]


def test_W_DP_HEADER_RANGE():
    """A global rank is folded into its pod wherever a port is made of it; out of the instance it is refused."""
    assert [local_dp_rank(rank, 4) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert handshake_port(6301, 5, 0, 2, 4) == handshake_port(6301, 1, 0, 2, 4)
    with pytest.raises(ParameterError, match="remote_dp_rank=4"):
        decode_leg(remote_dp_rank=4)


@pytest.mark.parametrize("hosts", [["10.0.0.1", "10.0.0.2"], ["10.0.0.1"]])
def test_W_TP_MULTI_HOST(hosts):
    """Hosts come per pod from the parameters; a rank without one is refused at admission, not dialled elsewhere."""
    leg = decode_leg(remote_hosts=hosts, remote_dp_rank=1)
    assert prefill_endpoint(leg, 0, 2).host == "10.0.0.1"
    if len(hosts) == 2:
        assert prefill_endpoint(decode_leg(remote_hosts=hosts, remote_dp_rank=3), 0, 2).host == "10.0.0.2"
    prefill = parse_prefill_params({**LEG, "do_remote_decode": True, "remote_hosts": hosts}, "", Mode.WRITE)
    if len(hosts) == 2:
        assert [e.host for e in decode_endpoints(prefill, 0, 2)] == ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2
    else:
        with pytest.raises(ParameterError, match="remote_hosts"):
            check(prefill, 2, is_producer=True)


def test_W_REG_SCHEMA_hello():
    """W-REG-SCHEMA: a dialler gets exactly two messages, and a frame that is no dial gets none."""
    a, b, c, d = free_ports(4)
    far = ZmqControl(bind_host=HOST, handshake_port=c, notify_port=d, token="far", hello=(b"3", b"4"))
    near = ZmqControl(bind_host=HOST, handshake_port=a, notify_port=b, token="near", hello=(b"1", b"2"))
    answers: list[HelloAnswer] = []

    def answered() -> bool:
        for control in (near, far):
            for source, _ in control.poller.poll(10):
                answers.extend(i for i in control.receive(source) if isinstance(i, HelloAnswer))
        return bool(answers)

    try:
        near.dial(Endpoint(HOST, c, d))
        eventually(answered)
        assert [(i.first, i.second) for i in answers] == [(b"3", b"4")]
    finally:
        near.close()
        far.close()
