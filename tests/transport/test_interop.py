"""Our node and one that behaves as vLLM's built-in connector: both directions and modes, real ports, real memory."""

from __future__ import annotations

from contextlib import contextmanager

import msgpack
import numpy as np
import pytest
from tests.transport.nodes import HOST, eventually, free_ports, make_node
from tests.upstream import strict
from tests.upstream.node import LAYERS, UpstreamNode

from moriio_proto.core import Role, Timing
from moriio_proto.events import AbortTransfer, Endpoint, Expect, Finish, Load, Progress, Skip, StartOffer
from moriio_proto.testing.transcript import small_geometry
from moriio_proto.wire.messages import Mode

NULL = 0


@contextmanager
def ours_and_upstream(role, mode, *, timing=None, **upstream):
    """Our running node of `role` with an upstream peer of the other one, whose listener must survive the test."""
    a, b, c, d = free_ports(4)
    names = {Role.PREFILL: "P", Role.DECODE: "D"}
    peer = UpstreamNode("D" if role is Role.PREFILL else "P", (c, d), **upstream)
    options = {"mori_compat": True, "num_workers": 1}
    ours = make_node(role, mode, token=f"{names[role]}1", ports=(a, b), timing=timing, options=options)
    ours.reactor.start()
    try:
        yield ours, peer, Endpoint(HOST, c, d)
        assert peer.ended_by is None
        assert all(strict.is_plain(frame) for frame in peer.frames)
    finally:
        ours.reactor.close()
        peer.close()


def untouched(before, node, touched):
    """Every block but `touched` and the null block has the bytes of `before`."""
    rest = sorted(set(range(node.geometry.num_blocks)) - {NULL, *touched})
    np.testing.assert_array_equal(before.reshape(LAYERS, node.geometry.num_blocks, -1)[:, rest], node.blocks(rest))


def announce(peer, ours, name, blocks):
    """Upstream's D tells our P its blocks."""
    where = {"transfer_id": name, "block_notify_list": blocks, "decode_rank": 0}
    peer.send(ours.endpoint, {"req_id": "r", **where, "type": "remote_blocks"})


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_write_to_upstream_decode(newer, early):
    """Our P fills exactly the blocks of the prompt and says `write_done` once, in upstream's bytes."""
    with ours_and_upstream(Role.PREFILL, Mode.WRITE, newer=newer) as (p, d, endpoint):
        source, target = [7, 3, 9], [20, 21, 22, 23]
        before = d.memory.copy()
        if early:
            announce(d, p, "t", target)
        p.tell(StartOffer("t", "r", (endpoint,), 3))
        for start, end in ((0, 2), (2, 3)):
            for layer in range(1, LAYERS + 1):
                p.tell(Progress("t", start, end, layer, source[:end]))
        p.tell(Finish("t"))
        if not early:
            announce(d, p, "t", target)
        d.wait("t")
        assert d.frames == [msgpack.dumps({"type": "write_done", "transfer_id": "t"})]
        assert p.wait_settled(1) == {"r": "done"}
        np.testing.assert_array_equal(p.blocks(source), d.memory[:, target[:3]])
        rest = sorted(set(range(256)) - set(target[:3]))
        np.testing.assert_array_equal(before[:, rest], d.memory[:, rest])


@pytest.mark.parametrize("first", [0, 2])
def test_write_from_upstream_prefill(first):
    """Our D announces the whole prompt in upstream's bytes; what it has already is written to the null block only."""
    with ours_and_upstream(Role.DECODE, Mode.WRITE) as (d, p, endpoint):
        source, target = [5, 6, 7, 8], [40, 41, 42, 43]
        before = d.memory.copy()
        d.tell(Expect("t", endpoint), Load("t", "r", endpoint, target[first:], first))
        announced = p.wait("t")["block_notify_list"]
        wanted = {
            "req_id": "", "transfer_id": "t", "block_notify_list": [NULL] * first + target[first:] + [NULL],
            "decode_rank": 0, "type": "remote_blocks",
        }  # fmt: skip
        assert p.frames == [msgpack.dumps(wanted)]
        p.move(d.endpoint, source, announced, write=True)
        p.send(d.endpoint, {"type": "write_done", "transfer_id": "t"})
        assert d.wait_settled(1) == {"r": "done"}
        np.testing.assert_array_equal(d.blocks(target[first:]), p.memory[:, source[first:]])
        untouched(before, d, target[first:])


def test_read_from_upstream_prefill():
    """Our D reads what it needs from upstream's P and releases it in upstream's bytes."""
    with ours_and_upstream(Role.DECODE, Mode.READ) as (d, p, endpoint):
        before = d.memory.copy()
        d.tell(Expect("t", endpoint), Load("t", "r", endpoint, [50, 51], 1, [7, 8, 9, 10]))
        assert d.wait_settled(1) == {"r": "done"}
        np.testing.assert_array_equal(d.blocks([50, 51]), p.memory[:, [8, 9]])
        untouched(before, d, [50, 51])
        p.wait("t")
        assert p.frames == [msgpack.dumps({"type": "release", "transfer_id": "t", "consumer_tp_size": 1})]


@pytest.mark.parametrize("fast", [False, True])
def test_read_by_upstream_decode(fast):
    """Upstream's D reads our P's blocks and its release frees them, even one that comes before vLLM's handing over."""
    with ours_and_upstream(Role.PREFILL, Mode.READ) as (p, d, _endpoint):
        p.tell(StartOffer("t", "r", (), 2))
        if not fast:
            p.tell(Finish("t"))
        d.move(p.endpoint, [1, 2], [30, 31], write=False)
        np.testing.assert_array_equal(d.memory[:, [1, 2]], p.blocks([30, 31]))
        d.send(p.endpoint, {"type": "release", "transfer_id": "t", "consumer_tp_size": 1})
        if fast:
            eventually(lambda: p.core.transfers["t"].releases)
            p.tell(Finish("t"))
        assert p.wait_settled(1) == {"r": "done"}
        assert d.frames == []


def test_an_empty_announcement_releases():
    """Upstream's D of 0.32 announces no blocks when it has the whole prompt: our P takes that for a release."""
    with ours_and_upstream(Role.PREFILL, Mode.WRITE) as (p, d, endpoint):
        p.tell(StartOffer("t", "r", (endpoint,), 1), Progress("t", 0, 1, LAYERS, [3]), Finish("t"))
        announce(d, p, "t", [])
        assert p.wait_settled(1) == {"r": "done"}
        assert d.frames == []


def test_two_consumers_release_before_the_blocks_are_free():
    """With D's TP twice ours, the first release frees nothing and the second one frees."""
    with ours_and_upstream(Role.PREFILL, Mode.READ) as (p, d, _endpoint):
        p.tell(StartOffer("t", "r", (), 1), Finish("t"))
        release = {"type": "release", "transfer_id": "t", "consumer_tp_size": 2}
        d.send(p.endpoint, release)
        eventually(lambda: "t" in p.core.transfers and len(p.core.transfers["t"].releases) == 1)
        assert p.reactor.take_settled() == []
        d.send(p.endpoint, release)
        assert p.wait_settled(1) == {"r": "done"}


def test_what_is_not_needed_is_released():
    """A request that needs no transfer, or ends in the queue, releases upstream's P with upstream's bytes."""
    with ours_and_upstream(Role.DECODE, Mode.WRITE) as (d, p, endpoint):
        d.tell(Expect("a", endpoint), Skip("a", endpoint), Expect("b", endpoint), AbortTransfer("b"))
        for name in "ab":
            p.wait(name)
        assert sorted(p.frames) == [
            msgpack.dumps({"type": "release", "transfer_id": name, "consumer_tp_size": 1}) for name in "ab"
        ]


def test_an_aborted_landing_waits_for_upstreams_word():
    """Blocks lent to upstream's P come back with its `write_done`, and not before."""
    with ours_and_upstream(Role.DECODE, Mode.WRITE) as (d, p, endpoint):
        d.tell(Load("t", "r", endpoint, [4], 0))
        announced = p.wait("t")["block_notify_list"]
        d.tell(AbortTransfer("t"))
        eventually(lambda: d.core.transfers["t"].state.name == "FENCING")
        assert d.reactor.take_settled() == []
        p.move(d.endpoint, [1], announced, write=True)
        p.send(d.endpoint, {"type": "write_done", "transfer_id": "t"})
        assert d.wait_settled(1) == {"r": "aborted"}
        assert len(p.frames) == 1


def test_an_aborted_landing_without_word_ends_with_the_hold():
    """A P that never says a word keeps our blocks for `upstream_hold`, and then they are ours again."""
    timing = Timing(upstream_hold=0.3)
    with ours_and_upstream(Role.DECODE, Mode.WRITE, timing=timing) as (d, p, endpoint):
        d.tell(Load("t", "r", endpoint, [4], 0))
        p.wait("t")
        d.tell(AbortTransfer("t"))
        assert d.wait_settled(1) == {"r": "aborted"}


@pytest.mark.parametrize("newer", [False, True])
def test_a_failed_write_is_told_only_to_who_understands(newer):
    """0.33 hears `write_failed`; 0.32 hears nothing, because its listener would end."""
    with ours_and_upstream(Role.PREFILL, Mode.WRITE, newer=newer) as (p, d, endpoint):
        p.tell(StartOffer("bad", "r", (endpoint,), 1), StartOffer("good", "g", (endpoint,), 1))
        announce(d, p, "bad", [10_000])
        p.tell(Progress("bad", 0, 1, LAYERS, [1]), Finish("bad"))
        assert p.wait_settled(1) == {"r": "failed"}
        announce(d, p, "good", [9])
        p.tell(Progress("good", 0, 1, LAYERS, [1]), Finish("good"))
        d.wait("good")
        told = [msgpack.loads(frame) for frame in d.frames]
        failed = [{"type": "write_failed", "transfer_id": "bad"}] if newer else []
        assert told == [*failed, {"type": "write_done", "transfer_id": "good"}]


def test_upstreams_failure_fails_the_load():
    """`write_failed` of 0.33's P fails exactly the named load."""
    with ours_and_upstream(Role.DECODE, Mode.WRITE, newer=True) as (d, p, endpoint):
        d.tell(Load("t", "r", endpoint, [4], 0))
        p.wait("t")
        p.send(d.endpoint, {"type": "write_failed", "transfer_id": "t"})
        assert d.wait_settled(1) == {"r": "failed"}


def test_all_writers_must_be_done():
    """0.33 with several writers a rank: the load ends with the last one's word."""
    with ours_and_upstream(Role.DECODE, Mode.WRITE, newer=True) as (d, p, endpoint):
        d.tell(Load("t", "r", endpoint, [4], 0))
        p.wait("t")
        done = {"type": "write_done", "transfer_id": "t", "num_writers": 2}
        p.send(d.endpoint, done)
        eventually(lambda: d.core.transfers["t"].writers == 1)
        assert d.reactor.take_settled() == []
        p.send(d.endpoint, done)
        assert d.wait_settled(1) == {"r": "done"}


def test_other_caches_are_refused_by_factor():
    """An upstream peer whose blocks are of another size is refused before anything moves, and the reason names it."""
    with ours_and_upstream(Role.DECODE, Mode.READ, block_bytes=512) as (d, p, endpoint):
        d.tell(Load("t", "r", endpoint, [4], 0, [5]))
        assert d.wait_settled(1) == {"r": "failed"}
        assert "block_len differs: ours is '1024', the peer's is 512" in d.settled[0].reason
        assert p.frames == []


def test_a_peer_where_upstream_listens_is_found():
    """Where the two formulas give different ports, ours are dialled first and upstream's then."""
    a, b = free_ports(2)
    with ours_and_upstream(Role.DECODE, Mode.READ) as (d, p, endpoint):
        rank = Endpoint(HOST, a, b, other=(endpoint.handshake_port, endpoint.notify_port))
        d.tell(Load("t", "r", rank, [4], 0, [5]))
        assert d.wait_settled(1) == {"r": "done"}
        np.testing.assert_array_equal(d.blocks([4]), p.memory[:, [5]])
        p.wait("t")


def test_an_upstream_rank_at_our_port_is_not_taken_for_the_right_one():
    """A plain hello from the port of our formula is another rank's, where upstream's own formula gives another port."""
    a, b = free_ports(2)
    timing = Timing(redial=0.05, handshake_timeout=0.5)
    with ours_and_upstream(Role.DECODE, Mode.READ, timing=timing) as (d, p, endpoint):
        rank = Endpoint(HOST, endpoint.handshake_port, endpoint.notify_port, other=(a, b))
        d.tell(Load("t", "r", rank, [4], 0, [5]))
        assert d.wait_settled(1) == {"r": "failed"}
        assert p.frames == []


def test_geometry_of_the_helper_is_that_of_our_nodes():
    """The upstream helper lays its caches as our test nodes do, so the tests above compare like with like."""
    geometry = small_geometry(blocks=256, block_bytes=1024)
    assert [layer.name for layer in geometry.layers] == [f"layer.{i}" for i in range(LAYERS)]
