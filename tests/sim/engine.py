"""A model of vLLM's scheduler that calls the real scheduler half in the order in which vLLM does.

Chunked prefill under a token budget, prefix cache filled at allocation, preemption of the last running request, loads
that hold blocks while they wait, both values of `kv_load_failure_policy`, blocks that a connector keeps after the end.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from moriio_vllm.scheduler import DecodeScheduler, PrefillScheduler
from tests.sim.content import BLOCK_TOKENS, Words, chain, expected
from tests.sim.pool import BlockPool

__all__ = ["Engine", "Output", "Request", "Status"]

Status = enum.Enum(
    "Status",
    "WAITING WAITING_FOR_REMOTE_KVS RUNNING PREEMPTED "
    "FINISHED_LENGTH_CAPPED FINISHED_ABORTED FINISHED_ERROR",
)  # fmt: skip


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@attrs.define(eq=False)
class Request:
    """One request; the attributes that the connector reads are named as vLLM names them."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None
    on_end: Callable[[Request, dict[str, Any] | None], None]
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    blocks: list[int] = attrs.field(factory=list)
    words: list[int] = attrs.field(factory=list)
    content: Words = attrs.field(init=False)  # what its KV must be, [layers, positions]

    def __attrs_post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids)
        self.words = chain(self.prompt_token_ids)
        self.words += chain(range(self.max_tokens), self.words[-1])
        self.content = expected(np.array(self.words, np.uint64))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    def get_block_ids(self) -> tuple[list[int], ...]:
        """As vLLM's `KVCacheBlocks`: ids per group."""
        return (list(self.blocks),)


@attrs.define
class _New:
    req_id: str
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]


@attrs.define
class _Cached:
    req_ids: list[str] = attrs.field(factory=list)
    resumed_req_ids: set[str] = attrs.field(factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = attrs.field(factory=list)
    num_computed_tokens: list[int] = attrs.field(factory=list)


@attrs.define
class Output:
    """As vLLM's `SchedulerOutput`."""

    preempted_req_ids: set[str] = attrs.field(factory=set)
    scheduled_new_reqs: list[_New] = attrs.field(factory=list)
    scheduled_cached_reqs: _Cached = attrs.field(factory=_Cached)
    num_scheduled_tokens: dict[str, int] = attrs.field(factory=dict)


@attrs.define
class Outcome:
    """As vLLM's `KVConnectorOutput`."""

    finished_sending: set[str] = attrs.field(factory=set)
    finished_recving: set[str] = attrs.field(factory=set)
    failed_recving: set[str] = attrs.field(factory=set)


class Engine:
    """The scheduler process of one node."""

    def __init__(
        self, connector: PrefillScheduler | DecodeScheduler, pool: BlockPool, rng: random.Random, *, recompute: bool
    ) -> None:
        self.connector, self.pool, self.budget, self.recompute = connector, pool, 16, recompute
        self._rng = rng
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.resets = 0.0  # probability per step that somebody resets the prefix cache, running requests included
        self._received: set[str] = set()
        self._failed: set[str] = set()

    def add(self, request: Request) -> None:
        """A client's request."""
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)  # type: ignore[arg-type]

    def abort(self, request_id: str) -> None:
        """The client has gone."""
        request = self.requests.get(request_id)
        if request is not None and not request.status.name.startswith("FINISHED"):
            self._finish(request, Status.FINISHED_ABORTED)

    # --- one step -------------------------------------------------------------------------------------------------

    def schedule(self) -> Output:
        """What the next forward pass computes."""
        out = Output()
        if self.resets and self._rng.random() < self.resets:
            self._reset(out)
        budget = self._schedule_running(out)
        if not out.preempted_req_ids:
            self._schedule_waiting(out, budget)
        return out

    def _reset(self, out: Output) -> None:
        """As vLLM's `reset_prefix_cache(reset_running_requests=True)`."""
        while self.running:
            self._preempt(self.running.pop(), out)
        self.pool.forget_cached()

    def _schedule_running(self, out: Output) -> int:
        budget, i = self.budget, 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            new = self._grow_or_preempt(request, request.num_computed_tokens + count, out)
            if new is None:
                break
            cached = out.scheduled_cached_reqs
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append((new,) if new else None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            self._scheduled(request, count, out)
            budget -= count
            i += 1
        return budget

    def _grow_or_preempt(self, request: Request, tokens: int, out: Output) -> list[int] | None:
        while True:
            new = self.pool.use([], max(0, _blocks_for(tokens) - len(request.blocks)))
            if new is not None:
                request.blocks += new
                return new
            victim = self.running.pop()
            self._preempt(victim, out)
            if victim is request:
                return None

    def _preempt(self, victim: Request, out: Output) -> None:
        self.preemptions += 1
        self._release(victim)
        victim.status, victim.num_computed_tokens = Status.PREEMPTED, 0
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)
        out.preempted_req_ids.add(victim.request_id)

    def _schedule_waiting(self, out: Output, budget: int) -> None:
        passed: list[Request] = []
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if request.status is Status.WAITING_FOR_REMOTE_KVS and not self._promote(request):
                passed.append(self.waiting.popleft())
                continue
            hits, external, is_async = self._known(request)
            local = request.num_computed_tokens or len(hits) * BLOCK_TOKENS
            computed = local + external
            count = 0 if is_async else min(request.num_tokens - computed, budget)
            new = self._admit(request, hits, computed + count, is_async=is_async)
            if new is None:
                break
            request.blocks += hits + new
            self.connector.update_state_after_alloc(request, request, external)  # type: ignore[arg-type]
            self.waiting.popleft()
            request.num_computed_tokens = computed
            if is_async:
                request.status = Status.WAITING_FOR_REMOTE_KVS
                passed.append(request)
                continue
            self._start(request, computed, out)
            self._scheduled(request, count, out)
            budget -= count
        self.waiting.extendleft(reversed(passed))

    def _known(self, request: Request) -> tuple[list[int], int, bool]:
        if request.num_computed_tokens:
            return [], 0, False
        hits = self.pool.lookup(request.words[: request.num_tokens])
        external, is_async = self.connector.get_num_new_matched_tokens(request, len(hits) * BLOCK_TOKENS)  # type: ignore[arg-type]
        return hits, external, is_async

    def _admit(self, request: Request, hits: list[int], tokens: int, *, is_async: bool) -> list[int] | None:
        """Blocks for a waiting request: loads may hold half of the pool, and what runs must fit as a whole."""
        fresh = _blocks_for(tokens) - len(hits) - len(request.blocks)
        if is_async:
            held = sum(len(r.blocks) for r in self.requests.values() if r.status is Status.WAITING_FOR_REMOTE_KVS)
            if held + fresh + len(hits) > self.pool.size // 2:
                return None
        elif _blocks_for(request.num_tokens) - len(hits) - len(request.blocks) > self.pool.num_free - len(hits):
            return None
        return self.pool.use(hits, fresh)

    def _start(self, request: Request, computed: int, out: Output) -> None:
        if request.status is Status.PREEMPTED:
            cached = out.scheduled_cached_reqs
            cached.req_ids.append(request.request_id)
            cached.resumed_req_ids.add(request.request_id)
            cached.new_block_ids.append(request.get_block_ids())
            cached.num_computed_tokens.append(computed)
        else:
            out.scheduled_new_reqs.append(_New(request.request_id, computed, request.get_block_ids()))
        request.status = Status.RUNNING
        self.running.append(request)

    def _scheduled(self, request: Request, count: int, out: Output) -> None:
        out.num_scheduled_tokens[request.request_id] = count
        self._cache(request, request.num_computed_tokens + count)

    def _cache(self, request: Request, tokens: int) -> None:
        for i in range(tokens // BLOCK_TOKENS):
            self.pool.cache(request.blocks[i], request.words[(i + 1) * BLOCK_TOKENS - 1])

    def _promote(self, request: Request) -> bool:
        """A load has ended: on with the request."""
        if request.request_id not in self._received:
            return False
        self._received.remove(request.request_id)
        if request.request_id in self._failed:
            self._failed.remove(request.request_id)
            self._release(request)
        else:
            self._cache(request, request.num_computed_tokens)
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        return True

    # --- after the forward pass -----------------------------------------------------------------------------------

    def update(self, out: Output, outcome: Outcome) -> None:
        """Sampled tokens, then what the connector's workers reported."""
        for request_id in outcome.failed_recving:
            request = self.requests[request_id]
            if request.status is Status.WAITING_FOR_REMOTE_KVS and self.recompute:
                request.num_computed_tokens = 0
                self._failed.add(request_id)
        for request_id, count in out.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                if request.num_tokens - request.num_prompt_tokens + 1 == request.max_tokens:
                    self._finish(request, Status.FINISHED_LENGTH_CAPPED)
                else:
                    request.num_tokens += 1
        if not self.recompute:
            for request_id in sorted(outcome.failed_recving):
                if self.requests[request_id].status is Status.WAITING_FOR_REMOTE_KVS:
                    self._finish(self.requests[request_id], Status.FINISHED_ERROR)
        self._transferred(outcome)

    def _transferred(self, outcome: Outcome) -> None:
        self.connector.update_connector_output(outcome)  # type: ignore[arg-type]
        for request_id in sorted(outcome.finished_recving):
            request = self.requests[request_id]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self._received.add(request_id)
            else:
                assert request.status.name.startswith("FINISHED"), f"{request_id} was loaded while {request.status}"
                self._forget(request)
        for request_id in sorted(outcome.finished_sending):
            self._forget(self.requests[request_id])

    def _finish(self, request: Request, status: Status) -> None:
        keep = request.status is Status.WAITING_FOR_REMOTE_KVS and request.request_id not in self._received
        self._received.discard(request.request_id)
        self._failed.discard(request.request_id)
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = status
        kept, answer = self.connector.request_finished(request, request.get_block_ids())  # type: ignore[arg-type]
        if not keep and not kept:
            self._forget(request)
        request.on_end(request, answer)

    def _forget(self, request: Request) -> None:
        self._release(request)
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
