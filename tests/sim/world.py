"""One simulated cluster: its nodes, its clients and router, its faults, and the oracles that judge it.

safety phase    jobs and faults of `WORLD_SECONDS`, every oracle on
heal            every fault ends; killed nodes are started again
liveness phase  no fault any more: within `LIVENESS_SECONDS` everything has ended and nothing is left
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from moriio_proto.core import Role
from moriio_proto.testing.clock import EventQueue
from moriio_proto.testing.network import FakeNetwork
from moriio_proto.testing.schedule import Fault
from moriio_proto.wire.messages import Mode
from moriio_transport.base import Direction
from moriio_transport.testing import MemoryFabric, Touch
from tests.sim.channel import Directory
from tests.sim.content import expected
from tests.sim.engine import Request, Status
from tests.sim.faults import Nemesis
from tests.sim.node import PORTS, Node
from tests.sim.plan import WORLD_SECONDS, Job, Options

__all__ = ["Violation", "World"]

LIVENESS_SECONDS = 600.0


class Violation(AssertionError):  # noqa: N818 - it is what an oracle finds
    """An oracle does not hold."""


@attrs.define(eq=False)
class _Leg:
    """One request to one node, and how it ended."""

    job: Job
    node: Node
    request: Request | None = None
    end: str = ""


class World:
    """One run.  `run` raises `Violation` with the first thing that an oracle does not like."""

    def __init__(self, seed: int, options: Options, jobs: Sequence[Job], faults: Sequence[Fault]) -> None:
        self.seed, self.options, self.mode = seed, options, options.mode
        self.queue = EventQueue()
        self.network = FakeNetwork(self.queue, random.Random(f"{seed}/network"))
        self.fabric = MemoryFabric(self.queue, random.Random(f"{seed}/fabric"))
        self.fabric.on_touch = self._touched
        self.directory = Directory()
        self.counts: Counter[str] = Counter()
        self.trace: deque[str] = deque(maxlen=4000)
        self._digest = hashlib.blake2b(digest_size=16)
        self._legs: list[_Leg] = []
        self._answers: dict[str, tuple[Job, dict[str, Any]]] = {}  # READ: P's last answer, by job
        self._starts: Counter[str] = Counter()
        self.nodes: dict[str, Node] = {}
        self._by_key: dict[str, Node] = {}
        self.nemesis = Nemesis(self, faults)
        for i in range(options.prefills):
            self.start_node(f"p{i}")
        for i in range(options.decodes):
            self.start_node(f"d{i}")
        for job in jobs:
            self.queue.at(job.at, lambda job=job: self._send(job, 0))  # type: ignore[misc]

    def start_node(self, name: str) -> None:
        """A new process at this name."""
        role = Role.PREFILL if name.startswith("p") else Role.DECODE
        blocks = self.options.blocks + (8 if role is Role.PREFILL else 0)  # so that offsets differ
        node = Node(self, name, role, self._starts[name], blocks)
        self._starts[name] += 1
        self.nodes[name] = self._by_key[node.key] = node
        self.nemesis.refresh()  # a node that starts while faults are on gets its share

    # --- oracles --------------------------------------------------------------------------------------------------

    def note(self, *what: object) -> None:
        """A line of the trace; the digest of all lines tells two runs apart."""
        line = " ".join(map(str, (f"{self.queue.now:.6f}", *what)))
        self._digest.update(line.encode())
        self.trace.append(line)

    @property
    def digest(self) -> str:
        """Of the whole trace."""
        return self._digest.hexdigest()

    def check(self, good: bool, what: str) -> None:
        """Raise `Violation` unless `good`."""
        if not good:
            raise Violation(f"{what} (at {self.queue.now:.3f} s)")

    def _touched(self, touch: Touch) -> None:
        self._by_key[touch.peer].touched(touch, remote=True)
        if touch.direction is Direction.READ:
            self._by_key[touch.engine].touched(touch, remote=False)

    def run(self) -> None:
        """All phases."""
        self.queue.run(WORLD_SECONDS)
        self.nemesis.heal()
        done = self.queue.run(WORLD_SECONDS + LIVENESS_SECONDS)
        open_legs = [f"{leg.node.key} {leg.request.request_id}" for leg in self._legs if leg.request and not leg.end]
        self.check(not open_legs, f"{len(open_legs)} requests never ended: {open_legs[:4]}")
        left = [line for node in self.nodes.values() for line in node.leftovers()]
        self.check(not left, "; ".join(left))
        self.check(done, f"not quiet {LIVENESS_SECONDS:.0f} s after the faults ended")
        for node in self.nodes.values():
            self._check_cache(node)

    def _check_cache(self, node: Node) -> None:
        """Whatever the prefix cache would give the next request is right."""
        for word, block in node.engine.pool.cached.items():
            want = expected(np.array([word], np.uint64))[:, 0]
            self.check(bool((node.memory[:, block, -1] == want).all()), f"{node.key}: cached block {block} is wrong")

    def summary(self) -> Counter[str]:
        """What happened, by name."""
        out = Counter(self.counts)
        out.update({f"fault {kind}": n for kind, n in (self.network.counts + self.fabric.counts).items()})
        out.update(self.nemesis.counts)
        out["preemptions"] = sum(node.engine.preemptions for node in self._by_key.values())
        out["illegal messages"] = sum(node.core.stats.illegal for node in self._by_key.values())
        return out

    # --- the router and the clients -------------------------------------------------------------------------------

    def _send(self, job: Job, attempt: int) -> None:
        self.counts["transfers" if job.kind != "plain" else "plain requests"] += 1
        kind = job.kind if attempt == 0 else job.retry_kind
        if kind == "plain":
            self._leg(job, job.decode, "d", attempt, None)
        elif kind == "d_only":
            self._repeat_decode(job, attempt)
        else:
            self._leg(job, job.prefill, "p", attempt, self._prefill_params(job))
            if kind != "p_only" and self.mode is Mode.WRITE:
                self._decode(job, attempt, None)
        if attempt == 0 and job.retry_after is not None:
            self.queue.after(job.retry_after, lambda: self._send(job, 1))
        if job.leaves_after is not None:
            self.queue.after(job.leaves_after, lambda: self._leave(job))

    def _decode(self, job: Job, attempt: int, answer: dict[str, Any] | None) -> None:
        decode, prefill = job.decode, job.prefill
        if job.kind == "wrong_d" or (attempt and job.retry_kind == "d_only"):
            decode = f"d{(int(decode[1:]) + 1) % self.options.decodes}"
        if job.kind == "wrong_p":
            prefill = f"p{(int(prefill[1:]) + 1) % self.options.prefills}"
        params: dict[str, Any] = {"do_remote_prefill": True, "transfer_id": job.name, **_address(prefill)}
        if answer is not None:
            params = dict(answer)
        elif self.mode is Mode.READ:
            params["remote_block_ids"] = [[]]
        self._leg(job, decode, "d", attempt, params)

    def _prefill_params(self, job: Job) -> dict[str, Any]:
        return {"do_remote_decode": True, "transfer_id": job.name, **_address(job.decode)}

    def _repeat_decode(self, job: Job, attempt: int) -> None:
        """D's leg alone: in READ with P's answer to this job, or else as an old job once more."""
        if self._answers and self.mode is Mode.READ:
            job, answer = self._answers.get(job.name) or next(reversed(self._answers.values()))
            self._decode(job, attempt, answer)
        else:
            self._decode(job, attempt, None)

    def _leg(self, job: Job, name: str, side: str, attempt: int, params: dict[str, Any] | None) -> None:
        node = self.nodes[name]
        leg = _Leg(job, node)
        self._legs.append(leg)
        if not node.alive:
            leg.end = "refused"
            return
        leg.request = Request(
            f"{job.name}-{len(self._legs)}-{side}", list(job.prompt), 1 if side == "p" else job.max_tokens, params,
            lambda request, answer: self._ended(leg, request, answer, attempt),
        )  # fmt: skip
        node.add(leg.request)

    def _leave(self, job: Job) -> None:
        for leg in self._legs:
            if leg.job is job and leg.request is not None and not leg.end:
                leg.node.abort(leg.request.request_id)

    def died(self, node: Node) -> None:
        """Its clients see their connections end."""
        for leg in self._legs:
            if leg.node is node and leg.request is not None and not leg.end:
                self._ended(leg, leg.request, None, 0)

    def _ended(self, leg: _Leg, request: Request, answer: dict[str, Any] | None, attempt: int) -> None:
        """A node answered (with its status), or died."""
        node, name = leg.node, request.status.name
        leg.end = name if node.alive else "killed"
        self.note(node.key, "ended", request.request_id, leg.end)
        self.counts[f"{node.role.value} {leg.end}"] += 1
        if not node.alive:
            return
        node.ended(request)
        if request.status is Status.FINISHED_ERROR:
            self.check(not self.options.recompute, f"{request.request_id} failed under the policy 'recompute'")
        if request.status is Status.FINISHED_ABORTED:
            self.check(leg.job.leaves_after is not None, f"{request.request_id} was aborted by nobody")
        read = node.role is Role.PREFILL and self.mode is Mode.READ
        if read and request.status is Status.FINISHED_LENGTH_CAPPED and leg.job.kind != "p_only":
            if answer is None:
                self._leg(leg.job, leg.job.decode, "d", attempt, None)
            else:
                self._answers[leg.job.name] = (leg.job, answer)
                self._decode(leg.job, attempt, answer)


def _address(name: str) -> dict[str, Any]:
    return {"remote_host": name, "remote_handshake_port": PORTS[0], "remote_notify_port": PORTS[1]}
