"""The scheduler half: vLLM's scheduler hooks in, one `StepPlan` per step out.

One record per request, made at admission (`on_new_request`) from a snapshot of its parameters, and dropped when the
request is over for the worker, too.  Queries are pure; every decision is made in the hook that vLLM calls once.

    P   admitted -> chunks of each step -> finished (blocks held) -> vLLM hears `finished_sending` -> gone
    D   admitted -> load planned (one-shot) or skipped -> vLLM hears `finished_recving` -> gone with the request

A transfer id belongs to one live request.  Siblings (n > 1 shares one id) are served locally: a plain prefill on P, a
local computation on D.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from moriio_proto.errors import ParameterError
from moriio_proto.wire.messages import Mode
from moriio_proto.wire.params import TransferParams, parse_decode_params, parse_prefill_params, prefill_answer
from moriio_vllm import endpoints
from moriio_vllm.metadata import Chunk, LoadPlan, OfferPlan, StepPlan
from moriio_vllm.prompt import prompt_digest

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from moriio_proto.wire.addresses import ZmqAddress
    from moriio_vllm.allowed_peers import AllowedPeers

__all__ = ["DecodeScheduler", "Instance", "PrefillScheduler", "make_scheduler"]

log = logging.getLogger(__name__)

Groups: TypeAlias = "tuple[list[int], ...]"  # block ids per KV cache group

_SERVED = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})  # names of vLLM's RequestStatus


@attrs.frozen
class Instance:
    """What both halves of this engine know of themselves."""

    mode: Mode
    address: ZmqAddress  # own host and base ports
    group: int  # index of the transferred KV cache group in vLLM's block tables
    block_tokens: int
    dp_rank: int  # global
    dp_size: int
    dp_size_local: int
    tp_size: int
    allowed_peers: AllowedPeers | None = None  # None: any


def _blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


@attrs.define(eq=False)
class _Offer:
    """P: one request whose blocks are offered."""

    request_id: str
    params: TransferParams
    prompt_tokens: int
    blocks: list[int] = attrs.field(factory=list)
    started: bool = False  # a chunk of the present computation was planned
    handed_over: bool = False
    answer: dict[str, Any] | None = None  # to the router


class PrefillScheduler:
    """The hooks of a prefill node."""

    def __init__(self, instance: Instance) -> None:
        self._it = instance
        self._offers: dict[str, _Offer] = {}  # by request id
        self._ids: set[str] = set()  # transfer ids of the same
        self._siblings: dict[str, str] = {}  # plain requests with the id of an offer: request id -> transfer id
        self._plan = StepPlan()

    def on_new_request(self, request: Request) -> None:
        """Admission: read the parameters once."""
        try:
            params = parse_prefill_params(request.kv_transfer_params, request.request_id, self._it.mode)
            if params is not None:
                endpoints.check(params, self._it.tp_size, is_producer=True, allowed=self._it.allowed_peers)
        except ParameterError as e:
            log.warning("request %s is served as a plain one: %s", request.request_id, e)
            return
        if params is None:
            return
        if params.transfer_id in self._ids:
            self._siblings[request.request_id] = params.transfer_id
            return
        params = attrs.evolve(params, prompt_digest=prompt_digest(request))
        offer = _Offer(request.request_id, params, request.num_prompt_tokens)
        self._offers[request.request_id] = offer
        self._ids.add(params.transfer_id)
        goal = _blocks_for(offer.prompt_tokens, self._it.block_tokens)
        self._plan.offers.append(OfferPlan(request.request_id, params, goal))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """P loads nothing."""
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks are read from the scheduler's output of the step."""

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        """The plan of the step that vLLM is about to run."""
        plan, self._plan = self._plan, StepPlan()
        if self._it.mode is Mode.WRITE and self._offers:
            self._plan_chunks(plan, output)
        return plan

    def _plan_chunks(self, plan: StepPlan, output: SchedulerOutput) -> None:
        for request_id in output.preempted_req_ids or ():
            self._preempt(plan, request_id)
        for new in output.scheduled_new_reqs:
            self._scheduled(plan, output, new.req_id, new.num_computed_tokens, new.block_ids, replace=True)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            resumed = request_id in cached.resumed_req_ids
            if resumed:
                self._preempt(plan, request_id)
            blocks = cached.new_block_ids[i]
            self._scheduled(plan, output, request_id, cached.num_computed_tokens[i], blocks, replace=resumed)

    def _preempt(self, plan: StepPlan, request_id: str) -> None:
        offer = self._offers.get(request_id)
        if offer is not None and offer.started:
            offer.started = False
            plan.preempts.append(offer.params.transfer_id)

    def _scheduled(
        self, plan: StepPlan, output: SchedulerOutput, request_id: str, computed: int, blocks: Any, *, replace: bool
    ) -> None:
        offer = self._offers.get(request_id)
        if offer is None:
            return
        ids = list(blocks[self._it.group]) if blocks is not None else []
        offer.blocks = ids if replace else offer.blocks + ids
        if computed >= offer.prompt_tokens:
            return  # the prompt is computed: this step only samples
        size = self._it.block_tokens
        # Blocks found in the prefix cache are part of the first chunk: another request of the same step may be
        # the one that computes them, layer by layer.
        start = computed // size if offer.started else 0
        done = computed + output.num_scheduled_tokens[request_id]
        end = _blocks_for(offer.prompt_tokens, size) if done >= offer.prompt_tokens else done // size
        offer.started = True
        plan.chunks.append(Chunk(offer.params.transfer_id, start, end, offer.blocks[:end]))

    def request_finished(self, request: Request, block_ids: Groups) -> tuple[bool, dict[str, Any] | None]:
        """The request is over: hand its blocks over, and answer the router if they are worth reading."""
        offer = self._offers.get(request.request_id)
        if offer is None:
            return False, self._answer_of_sibling(request)
        offer.handed_over = True
        if request.status.name not in _SERVED or request.num_computed_tokens < offer.prompt_tokens:
            self._plan.aborts.append(offer.params.transfer_id)
            return True, None
        self._plan.finishes.append(offer.params.transfer_id)
        ids = block_ids[self._it.group][: _blocks_for(offer.prompt_tokens, self._it.block_tokens)]
        it = self._it
        if it.mode is Mode.READ:
            self._plan.offered[offer.params.transfer_id] = ids
        offer.answer = prefill_answer(
            transfer_id=offer.params.transfer_id, block_ids=[ids], address=it.address, dp_rank=it.dp_rank,
            dp_size=it.dp_size, dp_size_local=it.dp_size_local, tp_size=it.tp_size,
        )  # fmt: skip
        return True, offer.answer

    def _answer_of_sibling(self, request: Request) -> dict[str, Any] | None:
        """With n > 1 vLLM answers with what the last of the siblings to finish returns, whichever that is."""
        transfer_id = self._siblings.pop(request.request_id, None)
        for offer in self._offers.values() if transfer_id is not None else ():
            same = (offer.params.transfer_id, offer.params.prompt_digest) == (transfer_id, prompt_digest(request))
            if same and request.status.name in _SERVED:
                return offer.answer
        return None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """All ranks have settled: the request's blocks are vLLM's again."""
        for request_id in output.finished_sending or ():
            offer = self._offers.pop(request_id, None)
            if offer is not None:
                self._ids.discard(offer.params.transfer_id)


@attrs.define(eq=False)
class _Load:
    """D: one request that another node prefilled."""

    request_id: str
    params: TransferParams | None
    error: str
    prompt_tokens: int
    local_tokens: int = 0  # of the last query: computed here, block-aligned
    consumed: bool = False  # one-shot: a transfer is loaded, or skipped, once
    loading: bool = False
    finished: bool = False


def _check_group(params: TransferParams) -> None:
    if len(params.remote_blocks) > 1:
        raise ParameterError("remote_block_ids", params.remote_blocks, "the blocks of one KV cache group")


class DecodeScheduler:
    """The hooks of a decode node."""

    def __init__(self, instance: Instance) -> None:
        self._it = instance
        self._loads: dict[str, _Load] = {}  # by request id
        self._ids: set[str] = set()  # transfer ids of the same
        self._new: dict[str, TransferParams] = {}  # admitted since the last step, by request id
        self._plan = StepPlan()

    def on_new_request(self, request: Request) -> None:
        """Admission: read the parameters once."""
        params, error = None, ""
        try:
            params = parse_decode_params(request.kv_transfer_params, request.request_id, self._it.mode)
            if params is not None:
                _check_group(params)
                endpoints.check(params, self._it.tp_size, is_producer=False, allowed=self._it.allowed_peers)
        except ParameterError as e:
            error = str(e)
            log.warning("request %s cannot be loaded: %s", request.request_id, e)
        if error:
            params = None
        elif params is None or params.transfer_id in self._ids:
            return
        if params is not None:
            params = attrs.evolve(params, prompt_digest=prompt_digest(request))
        self._loads[request.request_id] = _Load(request.request_id, params, error, request.num_prompt_tokens)
        if params is not None:
            self._ids.add(params.transfer_id)
            self._new[request.request_id] = params

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens the transfer brings beyond what is here.  The last prompt token is always computed here.

        Zero, for ever, once the transfer is consumed: loaded, failed or not needed.
        """
        load = self._loads.get(request.request_id)
        if load is None or load.consumed:
            return 0, False
        load.local_tokens = num_computed_tokens
        wanted = load.prompt_tokens - 1 - num_computed_tokens
        return (wanted, True) if wanted > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks are allocated: load into them, or release what is not needed."""
        load = self._loads.get(request.request_id)
        if load is None or load.consumed:
            return
        load.consumed = True
        self._new.pop(request.request_id, None)
        if num_external_tokens == 0:
            if load.params is not None:
                self._plan.skips.append(load.params)
            return
        load.loading = True
        size = self._it.block_tokens
        first = load.local_tokens // size
        end = _blocks_for(load.local_tokens + num_external_tokens, size)
        ids = blocks.get_block_ids()[self._it.group][first:end]
        self._plan.loads.append(LoadPlan(load.request_id, load.params, ids, first, load.error))

    def build_connector_meta(self, output: SchedulerOutput) -> StepPlan:
        """The plan of the step that vLLM is about to run."""
        plan, self._plan = self._plan, StepPlan()
        plan.expects.extend(self._new.values())
        self._new.clear()
        return plan

    def request_finished(self, request: Request, block_ids: Groups) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; vLLM itself waits for `finished_recving` of a load that is under way."""
        load = self._loads.get(request.request_id)
        if load is None:
            return False, None
        load.finished = True
        self._new.pop(request.request_id, None)
        if load.loading:
            if load.params is not None:
                self._plan.aborts.append(load.params.transfer_id)
        else:
            if not load.consumed and load.params is not None:
                self._plan.skips.append(load.params)
            self._drop(load)
        return False, None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """All ranks have settled a load."""
        for request_id in output.finished_recving or ():
            load = self._loads.get(request_id)
            if load is not None:
                load.loading = False
                if load.finished:
                    self._drop(load)

    def _drop(self, load: _Load) -> None:
        del self._loads[load.request_id]
        if load.params is not None:
            self._ids.discard(load.params.transfer_id)


def make_scheduler(instance: Instance, *, is_producer: bool) -> PrefillScheduler | DecodeScheduler:
    """The half of the configured role."""
    return PrefillScheduler(instance) if is_producer else DecodeScheduler(instance)
