"""Two worker halves in one process, with real CPU caches, real ports and the loopback transport."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's and torch's own imports deprecate is not ours to fail for
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

    from moriio_proto.events import Endpoint
    from moriio_proto.wire.params import TransferParams, parse_decode_params, parse_prefill_params
    from moriio_transport.registry import available_transports, load_transport
    from moriio_vllm.config import ConnectorConfig, Ranks
    from moriio_vllm.metadata import Chunk, LoadPlan, OfferPlan, StepPlan
    from moriio_vllm.worker import WorkerHalf

from tests.transport.nodes import HOST, eventually, free_ports

BLOCKS, TOKENS, HEADS, SIZE = 24, 16, 2, 8
LAYERS = [f"model.layers.{i}.attn" for i in range(3)]
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32)
LATENT = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=SIZE, dtype=torch.float32)


def shared() -> dict[str, torch.Tensor]:
    """vLLM's standard layout: `[blocks, heads, tokens, content]` views of one allocation."""
    whole = torch.zeros(len(LAYERS), BLOCKS, HEADS, TOKENS, 2 * SIZE)
    return {name: whole[i] for i, name in enumerate(LAYERS)}


def each(*shape: int) -> Callable[[], dict[str, torch.Tensor]]:
    """A tensor of its own for every layer."""
    return lambda: {name: torch.zeros(shape) for name in LAYERS}


LAYOUTS = {  # name -> how the caches are made, the axis of blocks, the spec
    "standard": (shared, 0, FULL),
    "split": (each(2, BLOCKS, TOKENS, HEADS, SIZE), 1, FULL),
    "interleaved": (each(BLOCKS, 2, TOKENS, HEADS, SIZE), 0, FULL),
    "mla": (each(BLOCKS, TOKENS, SIZE), 0, LATENT),
}


@attrs.define(eq=False)
class Worker:
    """One worker half, and what its caches should hold."""

    half: WorkerHalf
    caches: dict[str, torch.Tensor]
    axis: int
    endpoint: Endpoint
    mode: str
    sent: set[str] = attrs.field(factory=set)
    received: set[str] = attrs.field(factory=set)
    failed: set[str] = attrs.field(factory=set)

    def block(self, layer: str, block: int) -> torch.Tensor:
        """One block of one layer, writable."""
        return self.caches[layer].select(self.axis, block)

    def fill(self, layer: str, blocks: Sequence[int], seed: int) -> None:
        """Compute: values that tell layer, transfer and position."""
        for position, block in enumerate(blocks):
            self.block(layer, block).fill_(seed * 10_000 + LAYERS.index(layer) * 100 + position + 1)

    def holds(self, blocks: Sequence[int], seed: int, first: int = 0) -> bool:
        """Whether blocks hold what `fill` of the same seed wrote at positions from `first` on."""
        return all(
            bool((self.block(layer, block) == seed * 10_000 + i * 100 + first + position + 1).all())
            for i, layer in enumerate(LAYERS)
            for position, block in enumerate(blocks)
        )

    def step(self, plan: StepPlan | None = None, compute: Callable[[str], None] = lambda layer: None) -> None:
        """One forward pass: `compute` is called for each layer, and the half hears of each."""
        self.half.begin_step(plan or StepPlan())
        for layer in LAYERS:
            compute(layer)
            self.half.layer_computed(layer)
        self.half.end_step()
        self.collect()

    def collect(self) -> None:
        """Take what was settled; each request is reported once per direction."""
        results = self.half.results()
        assert not results.finished_sending & self.sent
        assert not results.finished_recving & self.received
        self.sent |= results.finished_sending
        self.received |= results.finished_recving
        self.failed |= results.failed_recving

    def wait(self, condition: Callable[[], bool]) -> None:
        """Empty steps until a condition holds."""

        def look() -> bool:
            self.collect()
            return condition()

        eventually(look)


def config(role: str, mode: str, ports: Sequence[int], **extra: object) -> ConnectorConfig:
    """The configuration of a node on this host without a router."""
    keys = {"http_port": 8000, "handshake_port": ports[0], "notify_port": ports[1], "backend": "loopback",
            "read_mode": mode == "READ", "host_ip": HOST, **extra}  # fmt: skip
    return ConnectorConfig.from_extra(
        keys, role="kv_producer" if role == "P" else "kv_consumer", ranks=Ranks(), default_host=lambda: HOST,
        backends=available_transports(), options_of=lambda name: load_transport(name).options, environment={},
    )  # fmt: skip


def make_half(role: str, mode: str, ports: Sequence[int], layout: str = "standard", **extra: object) -> WorkerHalf:
    """A worker half whose caches are not registered yet."""
    spec = LAYOUTS[layout][2]
    caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), spec)])
    return WorkerHalf(config(role, mode, ports, **extra), caches, cache_dtype="auto", attention_backend="TEST")


def make_worker(role: str, mode: str, layout: str = "standard", **extra: object) -> Worker:
    """A running worker half."""
    ports = free_ports(2)
    make, axis, _ = LAYOUTS[layout]
    half, caches = make_half(role, mode, ports, layout, **extra), make()
    half.register_kv_caches(caches)
    return Worker(half, caches, axis, Endpoint(HOST, *ports), mode)


@contextmanager
def pair(mode: str, layout: str = "standard", **extra: object) -> Iterator[tuple[Worker, Worker]]:
    """A prefill and a decode worker, running."""
    p = make_worker("P", mode, layout, **extra)
    try:
        d = make_worker("D", mode, layout, **extra)
    except BaseException:
        p.half.shutdown()
        raise
    try:
        yield p, d
    finally:
        p.half.shutdown()
        d.half.shutdown()


def leg(role: str, transfer_id: str, peer: Worker | Endpoint, blocks: Sequence[int] = ()) -> TransferParams:
    """The parsed parameters of one leg."""
    at = peer if isinstance(peer, Endpoint) else peer.endpoint
    mode = load_mode(peer)
    given = {"do_remote_decode": role == "P", "do_remote_prefill": role == "D", "transfer_id": transfer_id,
             "remote_host": at.host, "remote_handshake_port": at.handshake_port,
             "remote_notify_port": at.notify_port, "remote_block_ids": list(blocks)}  # fmt: skip
    parsed = (parse_prefill_params if role == "P" else parse_decode_params)(given, "", mode)
    assert parsed is not None
    return parsed


def load_mode(peer: Worker | Endpoint) -> object:
    """The mode of a worker; READ for an address where nobody is."""
    from moriio_proto.wire.messages import Mode

    return Mode.READ if isinstance(peer, Endpoint) else Mode[peer.mode]


def write(p: Worker, d: Worker, name: str, source: Sequence[int], target: Sequence[int], seed: int) -> None:
    """One WRITE in two chunks, layer by layer."""
    half = len(source) // 2
    d.step(StepPlan(loads=[LoadPlan(name, leg("D", name, p), list(target), 0)]))
    p.step(
        StepPlan(
            offers=[OfferPlan(name, leg("P", name, d), len(source))], chunks=[Chunk(name, 0, half, list(source[:half]))]
        ),
        lambda layer: p.fill(layer, source[:half], seed),
    )

    def second(layer: str) -> None:
        for position in range(half, len(source)):
            value = seed * 10_000 + LAYERS.index(layer) * 100 + position + 1
            p.block(layer, source[position]).fill_(value)

    p.step(StepPlan(chunks=[Chunk(name, half, len(source), list(source))]), second)
    p.step(StepPlan(finishes=[name]))


def read(p: Worker, d: Worker, name: str, source: Sequence[int], target: Sequence[int], seed: int) -> None:
    """One READ."""
    p.step(
        StepPlan(offers=[OfferPlan(name, leg("P", name, d), len(source))]), lambda layer: p.fill(layer, source, seed)
    )
    p.step(StepPlan(finishes=[name]))
    d.step(StepPlan(loads=[LoadPlan(name, leg("D", name, p, source), list(target), 0)]))
