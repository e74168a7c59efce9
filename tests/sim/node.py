"""One simulated instance: the real core, driver, plans and scheduler half around fakes, and its vLLM engine.

The worker half is modelled (`_events`, layer by layer progress, results per step), because the real one starts threads;
it makes the same events in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moriio_proto.core import Core, CoreConfig, Role
from moriio_proto.effects import Settled
from moriio_proto.events import (
    AbortTransfer,
    Endpoint,
    Event,
    Expect,
    Finish,
    Load,
    Preempt,
    Progress,
    Skip,
    StartOffer,
)
from moriio_proto.geometry import CacheGeometry, LayerLayout, Piece
from moriio_proto.testing.clock import NodeClock
from moriio_proto.wire.addresses import ZmqAddress
from moriio_proto.wire.codec import encode_hello
from moriio_proto.wire.messages import CAPABILITIES, Hello, HelloExtension, LayerDescriptors
from moriio_transport.base import Direction, Region
from moriio_transport.driver import Driver
from moriio_transport.testing import MemoryTransport, Touch
from moriio_vllm.endpoints import decode_endpoints, prefill_endpoint
from moriio_vllm.metadata import StepPlan
from moriio_vllm.scheduler import Instance, make_scheduler
from tests.sim.channel import FakeControl
from tests.sim.content import BLOCK_TOKENS, LAYERS
from tests.sim.engine import Engine, Outcome, Output, Request
from tests.sim.pool import BlockPool

if TYPE_CHECKING:
    from tests.sim.world import World

__all__ = ["PORTS", "Node"]

PORTS = (6301, 61005)
BLOCK_BYTES = BLOCK_TOKENS * 8


def _geometry(blocks: int) -> CacheGeometry:
    size = blocks * BLOCK_BYTES
    layers = tuple(LayerLayout(f"l{i}", (Piece(0, i * size, BLOCK_BYTES, BLOCK_BYTES),), "u64") for i in range(LAYERS))
    return CacheGeometry(layers, (LAYERS * size,), blocks, BLOCK_TOKENS)


class Node:
    """One process start of one instance; a restart is another `Node` with the same name."""

    def __init__(self, world: World, name: str, role: Role, start: int, blocks: int) -> None:
        self.world, self.name, self.role, self.start = world, name, role, start
        self.key = f"{name}.{start}"
        self.rng = random.Random(f"{world.seed}/{self.key}")
        self.clock = NodeClock(world.queue, self.rng.uniform(*world.options.rates), self.rng.uniform(0, 1e5))
        self.endpoint = Endpoint(name, *PORTS)
        self.alive, self.stopped = True, False
        self.step_seconds = 0.01
        self.unsettled: dict[
            str, tuple[Sequence[int], int]
        ] = {}  # owner -> its blocks, that a transfer may touch; first
        self._held: list[Callable[[], None]] = []
        self._inbox: list[Event] = []
        self._inputs: list[Callable[[], None]] = []
        self._results: list[Settled] = []
        self._stepping = self._polling = False
        self._armed = float("inf")
        self._build(blocks)

    def _build(self, blocks: int) -> None:
        world, geometry = self.world, _geometry(blocks)
        self.memory = np.zeros((LAYERS, blocks, BLOCK_TOKENS), np.uint64)
        self.transport = MemoryTransport(
            world.fabric, self.key, self.clock, self._on_transport, copies_while_stopped=self.rng.random() < 0.5
        )
        self.transport.register([Region(self.memory.ctypes.data, self.memory.nbytes)])
        own = self.transport.describe()
        extension = HelloExtension(
            token=self.key, global_dp_rank=0, tp_rank=0, dp_size=1, dp_size_local=1, tp_size=1,
            capabilities=CAPABILITIES, notify_port=PORTS[1], transport="memory", regions=own.regions, geometry=geometry,
        )  # fmt: skip
        hello = Hello(self.name, own.engine, (0,) * LAYERS, blocks, BLOCK_BYTES, "sim", extension)
        control = FakeControl(
            self, world.network, world.directory, self.endpoint, encode_hello(hello, LayerDescriptors({}))
        )
        self.core = Core(
            CoreConfig(self.role, world.mode, self.key, geometry, timing=world.options.timing), self._trace
        )
        self.driver = Driver(self.core, self.transport, control, geometry)
        instance = Instance(
            mode=world.mode, address=ZmqAddress(self.name, *PORTS), group=0, block_tokens=BLOCK_TOKENS, dp_rank=0,
            dp_size=1, dp_size_local=1, tp_size=1,
        )  # fmt: skip
        connector = make_scheduler(instance, is_producer=self.role is Role.PREFILL)
        self.engine = Engine(connector, BlockPool(blocks), self.rng, recompute=world.options.recompute)

    def _trace(self, machine: str, name: str, source: Any, trigger: str, dest: Any, now: float) -> None:
        self.world.note(self.key, machine, name, source.name, trigger, dest.name)

    # --- the process ----------------------------------------------------------------------------------------------

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """Do something as this process: not at all when it is dead, not before it goes on when it is stopped."""
        self.world.queue.after(delay, lambda: self._run(action))

    def _run(self, action: Callable[[], None]) -> None:
        if self.stopped:
            self._held.append(action)
        elif self.alive:
            action()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        self.transport.stop()

    def resume(self) -> None:
        """SIGCONT."""
        if self.alive and self.stopped:
            self.stopped = False
            self.transport.resume()
            held, self._held = self._held, []
            for action in held:
                self._run(action)

    def die(self) -> None:
        """SIGKILL: whoever waits for its answers sees the connection end."""
        self.alive = self.stopped = False
        self.world.fabric.kill(self.key)
        self.world.died(self)

    # --- the reactor ----------------------------------------------------------------------------------------------

    def perform(self, action: Callable[[Driver, float], None]) -> None:
        """Give the driver something, and see what it says."""
        self._run(lambda: self._perform(action))

    def _perform(self, action: Callable[[Driver, float], None]) -> None:
        action(self.driver, self.clock())
        settled = self.driver.settled
        while settled:
            self._on_settled(settled.popleft())
        deadline = self.core.next_deadline()
        if deadline is not None:
            when = self.clock.globally(deadline)
            if when < self._armed:
                self._armed = max(when, self.world.queue.now)
                self.world.queue.at(self._armed, lambda: self._due(self._armed))

    def _due(self, armed: float) -> None:
        self._armed = float("inf")
        self.perform(self._tick)

    def _tick(self, driver: Driver, now: float) -> None:
        deadline = driver.core.next_deadline()
        if deadline is not None and deadline <= now + 1e-6:  # two conversions between clocks round
            driver.tick(max(now, deadline))

    def _on_transport(self) -> None:
        if not self._polling:
            self._polling = True
            self.world.queue.after(0.0, lambda: self.perform(self._poll))

    def _poll(self, driver: Driver, now: float) -> None:
        self._polling = False
        driver.on_transport(now)

    def submit(self, events: list[Event]) -> None:
        """The worker half's commands; the reactor takes them a moment later."""
        if not self._inbox:
            self.later(self.rng.uniform(0, 0.002), lambda: self.perform(self._take_inbox))
        self._inbox += events

    def _take_inbox(self, driver: Driver, now: float) -> None:
        events, self._inbox = self._inbox, []
        driver.on_commands(events, now)

    def _on_settled(self, settled: Settled) -> None:
        found = self.unsettled.pop(settled.owner, None)
        self.world.check(found is not None, f"{self.key}: {settled.owner} was settled and nobody waits for it")
        self.world.counts[f"{self.role.value} {settled.verdict}"] += 1
        self.world.note(self.key, "settled", settled.owner, settled.verdict)
        if found is not None and self.role is Role.DECODE and settled.verdict == "done":
            self._check_loaded(self.engine.requests[settled.owner], *found)
        self._results.append(settled)
        self.wake()

    def _check_loaded(self, request: Request, blocks: Sequence[int], first: int) -> None:
        start, end = first * BLOCK_TOKENS, request.num_prompt_tokens - 1
        got = self.memory[:, list(blocks)].reshape(LAYERS, -1)[:, : end - start]
        good = np.array_equal(got, request.content[:, start:end])
        self.world.check(good, f"{self.key}: {request.request_id} landed 'done' with wrong bytes")

    # --- vLLM -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A client's request comes in."""
        self._input(lambda: self.engine.add(request))

    def abort(self, request_id: str) -> None:
        """Its client leaves."""
        self._input(lambda: self.engine.abort(request_id))

    def _input(self, action: Callable[[], None]) -> None:
        self._inputs.append(action)
        self.wake()

    def wake(self) -> None:
        """There may be something to do in a step."""
        if not self._stepping:
            self._stepping = True
            self.later(0.001, self._step)

    def _step(self) -> None:
        inputs, self._inputs = self._inputs, []
        for action in inputs:
            action()
        out = self.engine.schedule()
        plan = self.engine.connector.build_connector_meta(out)  # type: ignore[arg-type]
        failed = [load.request_id for load in plan.loads if load.params is None]
        events = self._events(plan)
        if events:
            self.submit(events)
        work = []
        for request_id, count in out.num_scheduled_tokens.items():
            request = self.engine.requests[request_id]
            work.append((request, request.num_computed_tokens, count))
        seconds = self.step_seconds if work else 0.001
        if work:
            for layer in range(LAYERS):
                self.later(seconds * (layer + 1) / (LAYERS + 1), lambda n=layer: self._layer(work, plan, n))  # type: ignore[misc]
        self.later(seconds, lambda: self._end_step(out, work, failed))

    def _layer(self, work: list[tuple[Request, int, int]], plan: StepPlan, layer: int) -> None:
        for request, start, count in work:
            positions = np.arange(start, start + count)
            blocks = np.array(request.blocks)[positions // BLOCK_TOKENS]
            self.memory[layer, blocks, positions % BLOCK_TOKENS] = request.content[layer, start : start + count]
        if plan.chunks:
            self.submit([Progress(c.transfer_id, c.start, c.end, layer + 1, c.blocks) for c in plan.chunks])

    def _end_step(self, out: Output, work: list[tuple[Request, int, int]], failed: list[str]) -> None:
        for request, start, count in work:
            end = start + count
            kv = self.memory[:, request.blocks].reshape(LAYERS, -1)[:, :end]
            good = np.array_equal(kv, request.content[:, :end])
            self.world.check(good, f"{self.key}: {request.request_id} computes on wrong KV")
        outcome = Outcome(finished_recving=set(failed), failed_recving=set(failed))
        results, self._results = self._results, []
        for settled in results:
            self._report(settled, outcome)
        self.engine.update(out, outcome)
        self._stepping = False
        if work or out.preempted_req_ids or results or failed or self._inputs or self._results:
            self.wake()

    def _report(self, settled: Settled, outcome: Outcome) -> None:
        if self.role is Role.PREFILL:
            outcome.finished_sending.add(settled.owner)
            return
        outcome.finished_recving.add(settled.owner)
        if settled.verdict == "failed":
            outcome.failed_recving.add(settled.owner)

    def _events(self, plan: StepPlan) -> list[Event]:
        events: list[Event] = [
            StartOffer(o.params.transfer_id, o.request_id, decode_endpoints(o.params, 0, 1), o.goal_blocks)
            for o in plan.offers
        ]
        events += [Preempt(i) for i in plan.preempts]
        events += [Finish(i) for i in plan.finishes]
        events += [AbortTransfer(i) for i in plan.aborts]
        events += [Expect(p.transfer_id, prefill_endpoint(p, 0, 1)) for p in plan.expects]
        for load in plan.loads:
            if load.params is not None:
                remote = load.params.remote_blocks[0] if load.params.remote_blocks else ()
                peer = prefill_endpoint(load.params, 0, 1)
                self.unsettled[load.request_id] = (load.blocks, load.first_block)
                events.append(
                    Load(load.params.transfer_id, load.request_id, peer, load.blocks, load.first_block, remote)
                )
        events += [Skip(p.transfer_id, prefill_endpoint(p, 0, 1)) for p in plan.skips]
        return events

    def ended(self, request: Request) -> None:
        """P: the engine has ended a request; the connector keeps its blocks if it offered them."""
        offer = getattr(self.engine.connector, "_offers", {}).get(request.request_id)
        if offer is not None:
            self.unsettled[request.request_id] = (list(request.blocks), 0)

    # --- oracles --------------------------------------------------------------------------------------------------

    def touched(self, touch: Touch, *, remote: bool) -> None:
        """Bytes of this node were copied: only blocks that nobody but the transfer uses may be."""
        plan = touch.plan
        offsets = plan.remote_offset if remote else plan.local_offset
        lent: set[int] = set()
        for blocks, _ in self.unsettled.values():
            lent.update(blocks)
        count = self.memory.shape[1]
        for offset, nbytes in zip(
            offsets[touch.start : touch.stop].tolist(), plan.nbytes[touch.start : touch.stop].tolist(), strict=True
        ):
            first, last = offset // BLOCK_BYTES, (offset + nbytes - 1) // BLOCK_BYTES
            bad = {n % count for n in range(first, last + 1)} - lent
            verb = "written" if remote == (touch.direction is Direction.WRITE) else "read"
            self.world.check(
                not bad, f"{self.key}: blocks {sorted(bad)} were {verb} by {touch.engine} after their release"
            )

    def leftovers(self) -> list[str]:
        """What is not at its start level; empty when all is well."""
        connector, driver = self.engine.connector, self.driver
        tables: dict[str, Any] = {
            "core transfers": self.core.transfers,
            "core posts": self.core._ops,
            "driver posts": driver._posts,
            "driver parts": driver._parts,
            "posts under way": self.transport._ops,
            "unsettled": self.unsettled,
            "requests": self.engine.requests,
            **{f"scheduler {k}": getattr(connector, k, ()) for k in ("_offers", "_loads", "_ids", "_new")},
        }
        out = [
            f"{self.key}: {len(table)} {name} are left: {list(table)[:3]}" for name, table in tables.items() if table
        ]
        pool = self.engine.pool
        if pool.num_free != pool.size:
            out.append(f"{self.key}: {pool.num_free} of {pool.size} blocks are free")
        return out
