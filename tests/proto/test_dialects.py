"""Peers without our extension: what their hello says of their caches, and what is never sent to them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import attrs
import msgpack
import pytest
from tests.upstream import strict

from moriio_proto.core import Core, CoreConfig, Role, Timing
from moriio_proto.dialects import (
    Dialect,
    descriptors,
    dialect_of,
    plain_addresses,
    read_memory,
    remote_geometry,
)
from moriio_proto.effects import Connect, Dial, Disconnect, Post, Reply, Send
from moriio_proto.errors import RemoteProtocolError
from moriio_proto.events import (
    AbortTransfer,
    Connected,
    Disconnected,
    Endpoint,
    Expect,
    Finish,
    HelloReceived,
    Load,
    OpEnded,
    Preempt,
    Progress,
    Received,
    Skip,
    StartOffer,
)
from moriio_proto.geometry import CacheGeometry, LayerLayout, Piece
from moriio_proto.geometry.plan import plan_blocks
from moriio_proto.testing.transcript import small_geometry
from moriio_proto.wire.addresses import ZmqAddress, rank_ports
from moriio_proto.wire.codec import decode_hello, encode
from moriio_proto.wire.messages import Hello, LayerDescriptors, Mode, Release, RemoteBlocks, WriteDone

FRAMES = json.loads((Path(__file__).parents[1] / "testdata" / "wire" / "frames.json").read_text())
BASE = 0x7F00_0000_0000


def recorded_hello():
    """The answer of a real node of vLLM 0.32: 30 layers of 1,456 blocks of 24,576 bytes in one allocation."""
    first, second = (
        next(bytes.fromhex(f["frame"]) for f in FRAMES if f["kind"] == f"handshake_reply_{part}") for part in (1, 2)
    )
    return decode_hello(first, second)


def our_caches(blocks=100, *, lead=0, layers=30, nbytes=24576, content="float32[H=3,N=16,C=128]"):
    """Ours of the same model: another number of blocks, another place in the region."""
    made = tuple(
        LayerLayout(
            f"model.layers.{i}.self_attn.attn", (Piece(0, lead + i * blocks * nbytes, nbytes, nbytes),), content
        )
        for i in range(layers)
    )
    return CacheGeometry(made, (lead + layers * blocks * nbytes,), blocks, 16)


def blob(address, nbytes, key="engine"):
    """A packed memory descriptor."""
    return msgpack.packb([key, 0, -1, "", address, nbytes, 1, bytes(64), 0, 0, bytes(64), -1, "", 0, 0])


def plain_hello(bases, num_blocks=10, block_len=64, **newer):
    """A hello without our extension."""
    return Hello("h:1", b"engine", tuple(bases), num_blocks, block_len, "ATTN", **newer)


def test_recorded_hello_of_0_32_is_laid_out():
    """Each recorded layer begins where its address is, in the one region that its descriptor names."""
    hello, layers = recorded_hello()
    geometry = remote_geometry(hello, layers, our_caches(lead=4096))
    assert dialect_of(hello) is Dialect.VLLM_032
    memory = read_memory(layers.layers["model.layers.0.self_attn.attn"][0])
    assert (geometry.num_blocks, geometry.region_bytes) == (1456, (memory.nbytes,))
    assert len(descriptors(hello, layers)) == 1
    for layer, address in zip(geometry.layers, hello.kv_caches_base_addr, strict=True):
        assert layer.pieces == (Piece(0, address - memory.address, 24576, 24576),)


@pytest.mark.parametrize(
    ("ours", "factor"),
    [
        (our_caches(layers=29), "layer names differs: ours is 'nothing more', the peer's is 'model.layers.29"),
        (our_caches(nbytes=12288), "block_len differs: ours is '12288', the peer's is 24576"),
        (our_caches(nbytes=49152), "block_len differs"),
    ],
)
def test_other_caches_are_refused_by_factor(ours, factor):
    """A recorded hello does not fit a model with other layers or other blocks, and the error names what differs."""
    with pytest.raises(ValueError, match=factor):
        remote_geometry(*recorded_hello(), ours)


@pytest.mark.parametrize(
    ("hello", "blobs", "problem"),
    [
        (plain_hello([BASE]), {"a": [blob(BASE, 639)]}, "its region has 639 bytes"),
        (plain_hello([BASE - 64]), {"a": [blob(BASE, 640)]}, "no negative number"),
        (plain_hello([BASE, BASE + 1, BASE + 2]), {"a": [blob(BASE, 640)]}, "addresses differs: .*1 or 2.* is 3"),
        (plain_hello([]), {}, "addresses differs"),
        (plain_hello([BASE]), {"a": []}, "memory descriptors of layer 'a' differs: ours is 1, the peer's is 0"),
        (plain_hello([BASE]), {"a": [b"\x80"]}, "memory descriptor"),
        (plain_hello([BASE]), {"a": [blob(0, 640)]}, "memory descriptor"),
        (plain_hello([BASE], num_blocks=0), {"a": [blob(BASE, 640)]}, "num_blocks=0"),
        (plain_hello([BASE], recurrent_state=True), {"a": [blob(BASE, 640)]}, "recurrent state"),
        (plain_hello([BASE], attention_block_sizes={"a": 32}), {"a": [blob(BASE, 640)]}, "block_tokens of layer 'a'"),
    ],
)
def test_a_hello_that_contradicts_itself_is_refused(hello, blobs, problem):
    """Whatever a peer says, no geometry is made that leaves the memory it described."""
    ours = CacheGeometry((LayerLayout("a", (Piece(0, 0, 64, 64),), "x[N=16,C=4]"),), (640,), 10, 16)
    with pytest.raises(ValueError, match=problem):
        remote_geometry(hello, LayerDescriptors(blobs), ours)


def test_split_halves_are_found_by_their_two_addresses():
    """K and V halves of another length, as with another number of blocks, begin where the peer's two addresses say."""
    pieces = (Piece(0, 0, 32, 32), Piece(0, 320, 32, 32))
    ours = CacheGeometry((LayerLayout("a", pieces, "x[KV=2,N=16,C=2]"),), (640,), 10, 16)
    layers = LayerDescriptors({"a": [blob(BASE, 1280)]})
    theirs = remote_geometry(plain_hello([BASE, BASE + 640], num_blocks=20, block_len=32), layers, ours)
    assert [p.offset for p in theirs.layers[0].pieces] == [0, 640]
    with pytest.raises(ValueError, match=r"number of blocks .* differs: ours is 10, the peer's is 20"):
        remote_geometry(plain_hello([BASE], num_blocks=20, block_len=32), layers, ours)


def test_our_own_addresses_are_counted_as_upstream_counts_them():
    """Two addresses for split K/V halves, one for everything else."""
    split = LayerLayout("a", (Piece(0, 0, 32, 32), Piece(0, 320, 32, 32)), "x")
    heads = LayerLayout("b", (Piece(1, 0, 64, 16), Piece(1, 32, 64, 16)), "x")
    whole = LayerLayout("c", (Piece(1, 640, 64, 64),), "x")
    assert plain_addresses([split, heads, whole], [1000, 5000]) == (1000, 1320, 5000, 5640)


def test_strides_of_0_33_come_from_the_peer():
    """A peer of 0.33 whose blocks lie further apart than ours is laid out as it says, head by head."""
    ours = CacheGeometry((LayerLayout("a", (Piece(0, 0, 64, 64),), "x[H=2,N=4,C=8]"),), (640,), 10, 4)
    told = {"head_layouts": {"a": [2, 4, 8, 256, 32, 8, 0]}, "attention_block_sizes": {"a": 4}, "since_033": True}
    hello = plain_hello([BASE + 128], **told)
    assert dialect_of(hello) is Dialect.VLLM_033
    theirs = remote_geometry(hello, LayerDescriptors({"a": [blob(BASE, 2560 + 128)]}), ours)
    assert theirs.layers[0].pieces == (Piece(0, 128, 256, 64),)
    plan = plan_blocks(ours, theirs, slice(None), [1, 2], [3, 4])
    assert plan.remote_offset.tolist() == [128 + 3 * 256, 128 + 4 * 256]


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ([2, 4, 8, 64, 8, 16, 0], "order in a block of layer 'a' differs: ours is 'H=2,N=4', the peer's is 'N=4,H=2'"),
        ([4, 2, 8, 64, 16, 8, 0], "order in a block"),
        ([2, 4, 8, 64, 40, 8, 0], "piece lengths"),
        ([2, 4, 8, 64, 32, 0, 0], "order in a block|piece lengths|must not be zero"),
        ([2, 4, 2**62, 64, 32, 8, 0], "piece lengths|pieces|overlap"),
    ],
)
def test_other_orders_of_0_33_are_refused(layout, problem):
    """Heads before tokens is not tokens before heads, and a layout that cannot be is no layout."""
    ours = CacheGeometry((LayerLayout("a", (Piece(0, 0, 64, 64),), "x[H=2,N=4,C=8]"),), (640,), 10, 4)
    hello = plain_hello([BASE], head_layouts={"a": layout}, since_033=True)
    with pytest.raises(ValueError, match=problem):
        remote_geometry(hello, LayerDescriptors({"a": [blob(BASE, 4096)]}), ours)


def test_a_layout_of_very_many_pieces_is_refused_before_it_is_made():
    """A peer cannot make us enumerate more pieces than any cache has."""
    ours = CacheGeometry((LayerLayout("a", (Piece(0, 0, 64, 64),), "opaque"),), (640,), 10, 4)
    hello = plain_hello([BASE], head_layouts={"a": [2**40, 2**20, 1, 64, 4, 2, 0]}, since_033=True)
    with pytest.raises(ValueError, match="pieces of a block of layer 'a'"):
        remote_geometry(hello, LayerDescriptors({"a": [blob(BASE, 4096)]}), ours)


# --- capability discipline ----------------------------------------------------------------------------------------

PEER = Endpoint("peer", 6301, 61005)
SMALL = small_geometry(blocks=16, block_bytes=64)


def plain_answer(rng, endpoint, *, newer):
    """What an upstream peer answers to a dial: a process of two, so that restarts happen."""
    names = [layer.name for layer in SMALL.layers]
    first = {
        "engine_id": "peer:6301", "agent_metadata": rng.choice([b"one", b"two"]),
        "kv_caches_base_addr": [BASE + layer.pieces[0].offset for layer in SMALL.layers],
        "num_blocks": 16, "block_len": 64, "attn_backend_name": "ATTN",
        **({"attention_block_sizes": dict.fromkeys(names, 16)} if newer else {}),
    }  # fmt: skip
    second = {name: [blob(BASE, SMALL.region_bytes[0])] for name in names}
    return HelloReceived(endpoint, *decode_hello(msgpack.packb(first), msgpack.packb(second)))


# What vLLM does next with a request, by what it did last; messages of the peer come at any time.
CALLS = {
    Role.PREFILL: {
        "": ["offer"], "offer": ["progress", "progress", "abort"], "preempt": ["progress", "abort"],
        "progress": ["progress", "progress", "preempt", "finish", "abort"], "finish": [], "abort": [],
    },
    Role.DECODE: {
        "": ["expect", "load"], "expect": ["load", "skip", "abort"], "load": ["abort"], "skip": [], "abort": [],
    },
}  # fmt: skip


def call(rng, verb, t):
    """The event of a call of vLLM's."""
    step = rng.randrange(3)
    return {
        "offer": lambda: StartOffer(t, t, (PEER,), 2), "preempt": lambda: Preempt(t), "finish": lambda: Finish(t),
        "progress": lambda: Progress(t, step // 2, 2, 4 * (step % 2) or 1, [3, 4]), "abort": lambda: AbortTransfer(t),
        "expect": lambda: Expect(t, PEER), "skip": lambda: Skip(t, PEER),
        "load": lambda: Load(t, t, PEER, [3, 4], rng.randrange(2), [5, 6, 7]),
    }[verb]()  # fmt: skip


def message(rng, role, t):
    """Something that an upstream peer says of a transfer."""
    if role is Role.PREFILL:
        return Received(rng.choice([RemoteBlocks(t, "r", ([5, 6, 7],)), Release(t), Release(t, 2)]), "route")
    return Received(rng.choice([WriteDone(t), WriteDone(t, failed=True), WriteDone(t, num_writers=2)]), "route")


class Walk:
    """One core, driven at random against an upstream peer; every frame it sends is judged by that peer's listener."""

    def __init__(self, role, mode, seed, *, newer):
        self.rng, self.role, self.newer, self.now = random.Random(seed), role, newer, 0.0
        self.core = Core(CoreConfig(role, mode, "OURS", SMALL, timing=Timing(lease=3, upstream_hold=5, drain=1)))
        self.owed, self.sent = [], []
        self.last = {}  # transfer id -> vLLM's last call
        self.steps = 0

    def take(self, effects):
        """Judge what leaves; keep what is owed."""
        for effect in effects:
            assert not isinstance(effect, Reply), effect
            if isinstance(effect, Send):
                frame = encode(effect.message)
                strict.notify(frame, "D" if self.role is Role.PREFILL else "P", newer=self.newer)
                assert strict.is_plain(frame), frame
                self.sent.append(frame)
            elif isinstance(effect, (Dial, Connect, Post, Disconnect)):
                self.owed.append(effect)

    def pay(self):
        """Answer one effect in one of the ways that it can be answered."""
        effect = self.owed.pop(self.rng.randrange(len(self.owed)))
        if isinstance(effect, Dial):
            return plain_answer(self.rng, effect.endpoint, newer=self.newer)
        if isinstance(effect, Post):
            return OpEnded(effect.token, self.rng.choice(["done", "done", "failed", "refused"]), 1)
        if isinstance(effect, Connect) and self.rng.random() < 0.8:
            return Connected(effect.endpoint, effect.epoch)
        return Disconnected(effect.endpoint, effect.epoch, "broken", self.rng.random() < 0.3)

    def move(self):
        """An answer, a message of the peer, or a call of vLLM's; a request is followed by others."""
        self.steps += 1
        if self.owed and self.rng.random() < 0.5:
            return self.pay()
        t = f"t{self.steps // 15 + self.rng.randrange(3)}"
        verbs = CALLS[self.role][self.last.get(t, "")]
        if not verbs or self.rng.random() < 0.3:
            return message(self.rng, self.role, t)
        self.last[t] = self.rng.choice(verbs)
        return call(self.rng, self.last[t], t)

    def run(self, steps):
        """Random steps, time among them."""
        for _ in range(steps):
            self.now += self.rng.choice([0.0, 0.01, 0.5, 4.0])
            self.take(self.core.tick(self.now))
            try:
                self.take(self.core.receive(self.move(), self.now))
            except RemoteProtocolError:  # the peer said what nobody says there
                continue
        return len(self.sent)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("role", list(Role))
def test_a_plain_peer_gets_only_what_upstream_sends(role, mode, newer):
    """In 40 random lives of 300 steps, every frame to a peer without the extension is one its listener survives."""
    sent = sum(Walk(role, mode, seed, newer=newer).run(300) for seed in range(40))
    assert (sent > 20) is not (role is Role.PREFILL and mode is Mode.READ)  # there P only listens


def test_recorded_frames_are_what_our_core_sends():
    """Ends and releases that a real node sent are byte for byte what our core sends for the same transfer."""
    hello = attrs.evolve(plain_answer(random.Random(1), PEER, newer=False))
    for frame in (bytes.fromhex(f["frame"]) for f in FRAMES):
        if b"write_done" in frame:
            name = msgpack.loads(frame)["transfer_id"]
            core = Core(CoreConfig(Role.PREFILL, Mode.WRITE, "OURS", SMALL))
            core.receive(StartOffer(name, "r", (PEER,), 1), 0)
            core.receive(hello, 0)
            core.receive(Connected(PEER, 1), 0)
            core.receive(Received(RemoteBlocks(name, "r", ([5],))), 0)
            (post,) = (e for e in core.receive(Progress(name, 0, 1, 4, [3]), 0) if isinstance(e, Post))
            assert [encode(e.message) for e in core.receive(OpEnded(post.token, "done"), 0) if isinstance(e, Send)] == [
                frame
            ]
        elif b"release" in frame:
            name = msgpack.loads(frame)["transfer_id"]
            core = Core(CoreConfig(Role.DECODE, Mode.READ, "OURS", SMALL))
            core.receive(Skip(name, PEER), 0)
            core.receive(hello, 0)
            effects = core.receive(Connected(PEER, 1), 0)
            assert [encode(e.message) for e in effects if isinstance(e, Send)] == [frame]


# --- ports --------------------------------------------------------------------------------------------------------


def test_ports_of_all_ranks_by_both_formulas():
    """Up to 8 x 8 ranks in up to 4 pods: both formulas; ours never gives one port twice."""
    address = ZmqAddress("h", 6000, 7000)
    for tp_size in range(1, 9):
        for local in range(1, 9):
            for pods in range(1, 5):
                taken = {pod: set() for pod in range(pods)}
                for dp in range(local * pods):
                    for tp in range(tp_size):
                        ours, upstreams = rank_ports(address, dp, tp, tp_size, local)
                        inside = dp % local
                        assert ours == (6000 + inside * tp_size + tp, 7000 + inside * tp_size + tp)
                        assert upstreams == (6000 + inside + tp, 7000 + inside + tp)
                        assert (ours == upstreams) is (tp_size == 1 or inside == 0)
                        assert ours not in taken[dp // local]
                        taken[dp // local].add(ours)
