"""The worker half: vLLM's worker hooks in, core events out; verdicts in, vLLM's answers out.

It decides nothing and waits for nobody: hooks append to the reactor's inbox or read what it has settled.
`register_kv_caches` builds everything in the order in which it may fail: caches, transport, ports, registration.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from typing import TYPE_CHECKING

import attrs

from moriio_proto.core import Core, CoreConfig, Role, Timing
from moriio_proto.dialects import plain_addresses
from moriio_proto.events import (
    AbortTransfer,
    Event,
    Expect,
    Finish,
    Load,
    Preempt,
    Progress,
    Skip,
    StartOffer,
)
from moriio_proto.wire.codec import encode_hello, encode_ping
from moriio_proto.wire.messages import CAPABILITIES, Hello, HelloExtension, LayerDescriptors
from moriio_transport.control import ZmqControl
from moriio_transport.driver import Driver
from moriio_transport.faulty import FaultyTransport
from moriio_transport.reactor import Reactor, ReactorDiedError
from moriio_transport.registry import load_transport
from moriio_transport.trace import TraceWriter
from moriio_vllm.cache_layout import describe_vllm_caches
from moriio_vllm.device import DeviceFence
from moriio_vllm.endpoints import decode_endpoints, prefill_endpoint
from moriio_vllm.metrics import TransferMeter
from moriio_vllm.registrar import Registrar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from moriio_proto.effects import Settled
    from moriio_proto.geometry import CacheGeometry
    from moriio_transport.base import Description, Region, Transport
    from moriio_vllm.config import ConnectorConfig
    from moriio_vllm.metadata import Chunk, StepPlan
    from moriio_vllm.metrics import TransferStats

__all__ = ["Results", "WorkerHalf"]

log = logging.getLogger(__name__)

# A P without leases frees held blocks after its own `defer_timeout`, which nobody tells: ours is taken for it.
UPSTREAM_MARGIN = 0.9


@attrs.define
class Results:
    """What one step reports to vLLM: request ids."""

    finished_sending: set[str] = attrs.field(factory=set)
    finished_recving: set[str] = attrs.field(factory=set)
    failed_recving: set[str] = attrs.field(factory=set)


class WorkerHalf:
    """One rank."""

    def __init__(
        self, config: ConnectorConfig, kv_cache_config: KVCacheConfig, *, cache_dtype: str, attention_backend: str
    ) -> None:
        self._config, self._kv_cache_config, self._cache_dtype = config, kv_cache_config, cache_dtype
        self._attention_backend = attention_backend
        self._token = uuid.uuid4().hex
        self._driver: Driver | None = None
        self._reactor: Reactor | None = None
        self._registrar: Registrar | None = None
        self._layers: dict[str, int] = {}
        self._failed: dict[str, str] = {}  # owner -> why its load was never started
        self._chunks: Sequence[Chunk] = ()
        self._computed = 0  # layers of this step, in order, that are computed
        rank = f"dp{config.ranks.dp_rank} tp{config.ranks.tp_rank}"
        self._meter = TransferMeter(rank, is_producer=config.is_producer)

    # --- start and end --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The caches are allocated: describe them, register them, listen, and only then be found by the router."""
        config = self._config
        geometry, regions = describe_vllm_caches(kv_caches, self._kv_cache_config, self._cache_dtype)
        self._layers = {layer.name: i for i, layer in enumerate(geometry.layers)}
        with contextlib.ExitStack() as started:  # whatever fails, all that runs by then ends before the error is shown
            transport = self._make_transport()
            started.callback(transport.close)
            transport.register(regions)
            control = ZmqControl(
                bind_host="*", handshake_port=config.own_handshake_port, notify_port=config.own_notify_port,
                token=self._token, hello=self._hello(geometry, regions, transport.describe(), list(kv_caches)),
            )  # fmt: skip
            started.callback(control.close)
            self._trace = TraceWriter(config.trace_file) if config.trace_file else None
            core = Core(self._core_config(geometry), self._trace)
            self._registrar = self._register()
            started.pop_all()
        self._fence = DeviceFence(next(iter(kv_caches.values())).device)
        self._driver = Driver(core, transport, control, geometry)
        self._reactor = Reactor(self._driver, control)
        self._reactor.start()
        log.info(
            "MoRIIO %s %s rank dp%d tp%d: backend %s, handshake port %d, notify port %d, %d layers, %d blocks",
            config.role, config.mode.value, config.ranks.dp_rank, config.ranks.tp_rank, config.backend,
            config.own_handshake_port, config.own_notify_port, len(geometry.layers), geometry.num_blocks,
        )  # fmt: skip

    def _make_transport(self) -> Transport:
        config, ranks = self._config, self._config.ranks
        transport = load_transport(config.backend).create(
            engine_key=f"{self._token}-{ranks.dp_rank}-{ranks.tp_rank}", host=config.host,
            options=config.transport_options,
        )  # fmt: skip
        return transport if config.fault_injection is None else FaultyTransport(transport, config.fault_injection)

    def _register(self) -> Registrar | None:
        """Start the registration process; it pings only when every rank, this one included, answers."""
        config = self._config
        if not config.registers:
            return None
        assert config.proxy_ip is not None
        assert config.proxy_ping_port is not None
        return Registrar.start(
            router=(config.proxy_ip, config.proxy_ping_port), ping=encode_ping(config.ping()),
            ranks=config.pod_endpoints, ping_interval=config.ping_interval,
        )  # fmt: skip

    def _core_config(self, geometry: CacheGeometry) -> CoreConfig:
        config = self._config
        timing = Timing(
            lease=config.lease, transfer_timeout=config.transfer_timeout, defer_timeout=config.defer_timeout,
            recv_abort_timeout=config.recv_abort_timeout, upstream_hold=UPSTREAM_MARGIN * config.defer_timeout,
        )  # fmt: skip
        return CoreConfig(
            role=Role.PREFILL if config.is_producer else Role.DECODE, mode=config.mode, token=self._token,
            geometry=geometry, tp_size=config.ranks.tp_size, dp_rank=config.ranks.dp_rank, timing=timing,
            transport=config.backend,
        )  # fmt: skip

    def _hello(
        self, geometry: CacheGeometry, regions: Sequence[Region], own: Description, names: Sequence[str]
    ) -> tuple[bytes, bytes]:
        config, ranks = self._config, self._config.ranks
        # A peer without our extension counts the addresses in the order in which vLLM registers the caches.
        by_name = {layer.name: layer for layer in geometry.layers}
        ordered = [by_name[name] for name in names if name in by_name]
        base = plain_addresses(ordered, [region.address for region in regions])
        extension = HelloExtension(
            token=self._token, global_dp_rank=ranks.dp_rank, tp_rank=ranks.tp_rank, dp_size=ranks.dp_size,
            dp_size_local=ranks.dp_size_local, tp_size=ranks.tp_size, capabilities=CAPABILITIES,
            notify_port=config.own_notify_port, transport=config.backend, regions=own.regions, geometry=geometry,
            transfer_mode=config.mode.value,
        )  # fmt: skip
        hello = Hello(
            engine_id=f"{config.host}:{config.handshake_port}", agent_metadata=own.engine, kv_caches_base_addr=base,
            num_blocks=geometry.num_blocks, block_len=sum(p.nbytes for p in geometry.layers[0].pieces),
            attn_backend_name=self._attention_backend, extension=extension,
        )  # fmt: skip
        layers = {layer.name: [own.regions[layer.pieces[0].region]] for layer in ordered}
        return encode_hello(hello, LayerDescriptors(layers))

    def shutdown(self) -> None:
        """Leave the router, then stop copying, then go."""
        if self._registrar is not None:
            self._registrar.close()
            self._registrar = None
        if self._reactor is not None:
            self._fence.close()  # first: it tells the reactor what is computed
            self._reactor.close()
            if self._trace is not None:
                self._trace.close()
            self._reactor = None

    # --- one step -------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass: what the scheduler half decided."""
        self._chunks, self._computed = plan.chunks, 0
        self._meter.planned(plan, time.monotonic())
        events = self._events(plan)
        if not events:
            return
        if self._config.is_producer:  # behind what earlier steps compute: a preemption must not overtake its layers
            self._fence.after(lambda _: self._submit_later(events))
        else:
            self._submit(events)

    def layer_computed(self, layer_name: str) -> None:
        """The KV of one layer is written (or, on an accelerator, queued to be)."""
        if self._chunks and self._layers.get(layer_name) == self._computed:
            self._computed += 1
            self._progress(self._computed)

    def end_step(self) -> None:
        """The forward pass is done: whatever layer did not say so itself is computed now."""
        if self._chunks and self._computed < len(self._layers):
            self._progress(len(self._layers))
        self._chunks = ()

    def results(self) -> Results:
        """What was settled since the last step."""
        out = Results()
        assert self._reactor is not None
        for settled in self._reactor.take_settled():
            self._report(settled, out)
        for owner, why in self._failed.items():
            log.warning("request %s: KV load failed: %s", owner, why)
            out.finished_recving.add(owner)
            out.failed_recving.add(owner)
            self._meter.over("failed", why)
        self._failed.clear()
        return out

    def stats(self) -> TransferStats | None:
        """What happened since the last step, for vLLM's metrics; None when nothing did."""
        if self._driver is None:
            return None
        return self._meter.take(self._driver.core, self._driver.refused_frames)

    def _report(self, settled: Settled, out: Results) -> None:
        self._meter.settled(settled, time.monotonic())
        if self._config.is_producer:
            if settled.verdict != "done":
                log.warning("request %s: its KV was not taken: %s", settled.owner, settled.reason)
            out.finished_sending.add(settled.owner)
            return
        out.finished_recving.add(settled.owner)
        if settled.verdict == "failed":
            log.warning("request %s: KV load failed: %s", settled.owner, settled.reason)
            out.failed_recving.add(settled.owner)

    def _submit(self, events: list[Event]) -> None:
        assert self._reactor is not None, "vLLM calls hooks only after register_kv_caches"
        self._reactor.submit(events)

    def _submit_later(self, events: list[Event]) -> None:
        """From the fence, whose callbacks must not raise: a dead reactor is reported by the next `results`."""
        with contextlib.suppress(ReactorDiedError):
            self._submit(events)

    def _progress(self, layers: int) -> None:
        events: list[Event] = [Progress(c.transfer_id, c.start, c.end, layers, c.blocks) for c in self._chunks]

        def computed(error: BaseException | None) -> None:
            if error is None:
                self._submit_later(events)
            else:  # the device is broken: nothing that it computed is sent, and vLLM hears of it by itself
                log.error("the layers of this step are not sent: %s", error)

        self._fence.after(computed)

    def _events(self, plan: StepPlan) -> list[Event]:
        tp_rank, tp_size = self._config.ranks.tp_rank, self._config.ranks.tp_size
        events: list[Event] = []
        for offer in plan.offers:
            peers = decode_endpoints(offer.params, tp_rank, tp_size)
            params = offer.params
            events.append(
                StartOffer(params.transfer_id, offer.request_id, peers, offer.goal_blocks, params.prompt_digest)
            )
        events += [Preempt(transfer_id) for transfer_id in plan.preempts]
        events += [Finish(transfer_id, plan.offered.get(transfer_id, ())) for transfer_id in plan.finishes]
        events += [AbortTransfer(transfer_id) for transfer_id in plan.aborts]
        for p in plan.expects:
            events.append(Expect(p.transfer_id, prefill_endpoint(p, tp_rank, tp_size), p.prompt_digest))
        for load in plan.loads:
            if load.params is None:
                self._failed[load.request_id] = load.error
                continue
            remote = load.params.remote_blocks[0] if load.params.remote_blocks else ()
            peer = prefill_endpoint(load.params, tp_rank, tp_size)
            digest = load.params.prompt_digest
            events.append(
                Load(load.params.transfer_id, load.request_id, peer, load.blocks, load.first_block, remote, digest)
            )
        for p in plan.skips:
            events.append(Skip(p.transfer_id, prefill_endpoint(p, tp_rank, tp_size), p.prompt_digest))
        return events
