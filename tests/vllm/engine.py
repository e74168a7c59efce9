"""vLLM's own scheduler with our scheduler half in it, and a worker that settles what it is told to, when it is told to.

The worker is a model of what the worker half promises: a `Load`, and an offer that was handed over, is settled exactly
once.  It refuses a plan that the core would refuse, and after every step it looks whether vLLM gave a block away that a
peer may still touch.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs
import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's and torch's own imports deprecate is not ours to fail for
    import torch
    from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from moriio_vllm.endpoints import decode_endpoints, prefill_endpoint
    from moriio_vllm.metadata import StepPlan

BLOCK = 16
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip
ABORTED = RequestStatus.FINISHED_ABORTED


def params(role: str, transfer_id: str, blocks: Iterable[int] = (), **more: object) -> dict[str, object]:
    """`kv_transfer_params` of one leg, as an explicit coordinator would give them."""
    leg: dict[str, object] = {
        "transfer_id": transfer_id, "remote_host": "127.0.0.1", "remote_handshake_port": 7301,
        "remote_notify_port": 62005, "remote_dp_size": 1, "tp_size": 1, "remote_block_ids": [list(blocks)],
    }  # fmt: skip
    leg["do_remote_decode" if role == "P" else "do_remote_prefill"] = True
    return leg | more


def vllm_config(
    model_dir: Path, role: str, mode: str, *, policy: str = "recompute", batch: int = 64, async_: bool = False,
    seqs: int = 16, ports: tuple[int, int] = (6301, 61005), **extra: object,
) -> VllmConfig:  # fmt: skip
    """A small configuration with our connector in it."""
    (model_dir / "config.json").write_text(json.dumps(MODEL))
    transfer = KVTransferConfig(
        kv_connector="MoRIIOConnector", kv_connector_module_path="moriio_vllm", kv_load_failure_policy=policy,
        kv_role="kv_producer" if role == "P" else "kv_consumer",
        kv_connector_extra_config={
            "http_port": 8000, "handshake_port": ports[0], "notify_port": ports[1], "backend": "loopback",
            "read_mode": mode == "READ", "host_ip": "127.0.0.1", **extra,
        },
    )  # fmt: skip
    return VllmConfig(
        model_config=ModelConfig(
            model=str(model_dir), skip_tokenizer_init=True, dtype="float32", max_model_len=2048, enforce_eager=True
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seqs, max_num_batched_tokens=batch, max_model_len=2048, enable_chunked_prefill=True,
            is_encoder_decoder=False, async_scheduling=async_,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        kv_transfer_config=transfer,
    )  # fmt: skip


def cache_config(blocks: int) -> KVCacheConfig:
    """One group of two layers with full attention: 2 heads of 16, K and V, float32."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    return KVCacheConfig(blocks, [], [KVCacheGroupSpec(list(LAYERS), spec)])


@attrs.define(eq=False)
class ModelWorker:
    """What the worker half promises, without a transport.  `owed` maps requests to the blocks that a peer may touch."""

    role: str
    offers: dict[str, str] = attrs.field(factory=dict)  # transfer id -> request id
    expected: set[str] = attrs.field(factory=set)
    owed: dict[str, list[int]] = attrs.field(factory=dict)  # request id -> blocks
    loads: dict[str, str] = attrs.field(factory=dict)  # transfer id -> request id
    aborted: set[str] = attrs.field(factory=set)
    skipped: list[str] = attrs.field(factory=list)
    chunks: dict[str, list[tuple[int, int, list[int]]]] = attrs.field(factory=dict)  # by transfer id
    settled: dict[str, str] = attrs.field(factory=dict)  # not reported yet: request id -> verdict

    def run(self, plan: StepPlan, blocks_of: Callable[[str], list[int]]) -> None:
        """Take a plan in, in the order that the worker half submits it."""
        self._find_peers(plan)
        for offer in plan.offers:
            assert offer.params.transfer_id not in self.offers
            self.offers[offer.params.transfer_id] = offer.request_id
            self.chunks[offer.params.transfer_id] = []
        for transfer_id in plan.preempts:
            assert transfer_id in self.offers
            assert self.chunks[transfer_id], "what was never computed cannot be preempted"
            self.chunks[transfer_id] = []
        for transfer_id in plan.finishes:
            request_id = self.offers.pop(transfer_id)
            self.owed[request_id] = blocks_of(request_id)
        for transfer_id in plan.aborts:
            self._abort(transfer_id, blocks_of)
        for chunk in plan.chunks:
            assert chunk.transfer_id in self.offers, "a chunk belongs to an offer that is not handed over"
            assert chunk.blocks == blocks_of(self.offers[chunk.transfer_id])[: chunk.end], "blocks are those of now"
            done = self.chunks[chunk.transfer_id]
            assert chunk.start == (done[-1][1] if done else 0), "chunks leave no block out"
            done.append((chunk.start, chunk.end, chunk.blocks))
        self.expected |= {p.transfer_id for p in plan.expects}
        for load in plan.loads:
            assert load.request_id not in self.owed, "a transfer is loaded once"
            self.owed[load.request_id] = list(load.blocks)
            if load.params is None:
                self.settled[load.request_id] = "failed"
            else:
                self.loads[load.params.transfer_id] = load.request_id
        self.skipped += [p.transfer_id for p in plan.skips]

    def _find_peers(self, plan: StepPlan) -> None:
        """As the worker half does, which must not raise."""
        for offer in plan.offers:
            decode_endpoints(offer.params, 0, 1)
        for leg in (*plan.expects, *plan.skips, *(load.params for load in plan.loads if load.params is not None)):
            prefill_endpoint(leg, 0, 1)

    def _abort(self, transfer_id: str, blocks_of: Callable[[str], list[int]]) -> None:
        if self.role == "D":
            assert transfer_id in self.loads
            self.aborted.add(self.loads[transfer_id])
        else:
            request_id = self.offers.pop(transfer_id)
            self.owed[request_id] = blocks_of(request_id)

    def report(self) -> KVConnectorOutput:
        """Everything that was settled since the last report."""
        done, self.settled = self.settled, {}
        for request_id in done:
            del self.owed[request_id]
        failed = {r for r, verdict in done.items() if verdict == "failed"}
        if self.role == "P":
            return KVConnectorOutput(finished_sending=set(done))
        return KVConnectorOutput(finished_recving=set(done), failed_recving=failed)


class Engine:
    """One vLLM engine without a model: every forward pass samples token 7."""

    def __init__(self, model_dir: Path, role: str, mode: str = "WRITE", *, blocks: int = 64, **config: object) -> None:
        self.role = role
        self.config = vllm_config(model_dir, role, mode, **config)  # type: ignore[arg-type]
        self.config.cache_config.num_gpu_blocks = blocks
        caches = cache_config(blocks)
        self.lag = 1 if config.get("async_") else 0
        self.config.scheduler_config.async_scheduling = bool(self.lag)  # vLLM turns it off on a CPU
        made = AsyncScheduler if self.lag else Scheduler
        self.scheduler = made(self.config, caches, StructuredOutputManager(self.config), BLOCK, BLOCK)
        self.worker = ModelWorker(role)
        self.half = self.scheduler.connector._scheduler  # type: ignore[union-attr]
        self.finished: dict[str, str] = {}  # request id -> finish reason
        self.answers: dict[str, dict[str, object]] = {}  # request id -> kv_transfer_params
        self._running: deque[tuple[object, KVConnectorOutput]] = deque()
        self._free_at_start = self.free_blocks
        if not os.environ.get("PYTHONHASHSEED"):
            os.environ["PYTHONHASHSEED"] = "0"
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    @property
    def free_blocks(self) -> int:
        """Blocks that vLLM may give away."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self, request_id: str, prompt: int | list[int], leg: object = None, *, max_tokens: int | None = None
    ) -> Request:
        """Admit a request; a prompt given as a number gets tokens of its own."""
        tokens = [hash((request_id, i)) % 100 for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
        count = max_tokens or (1 if self.role == "P" else 4)
        sampling = SamplingParams(max_tokens=count, ignore_eos=True, extra_args={"kv_transfer_params": leg})
        sampling.update_from_generation_config({}, 2)
        request = Request(request_id, tokens, sampling, None, block_hasher=self._hasher)
        request.kv_transfer_params = leg  # also what no API server would let through
        self.scheduler.add_request(request)
        return request

    def step(self) -> StepPlan:
        """Schedule one step, let the worker run it, and give vLLM its output (async: that of the step before)."""
        output = self.scheduler.schedule()
        plan = output.kv_connector_metadata
        assert isinstance(plan, StepPlan)
        self.worker.run(plan, self._blocks_of)
        self._running.append((output, self.worker.report()))
        if len(self._running) > self.lag:
            self._deliver()
        self._check_blocks()
        return plan

    def _deliver(self) -> None:
        output, connector_output = self._running.popleft()
        ids = list(output.num_scheduled_tokens)  # type: ignore[attr-defined]
        sampled = []
        for request_id in ids:
            request = self.scheduler.requests.get(request_id)
            complete = request is not None and self._samples(request, output)
            sampled.append([7] if complete else [])
        outputs = self.scheduler.update_from_output(
            output,  # type: ignore[arg-type]
            ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled, kv_connector_output=connector_output),
        )
        for per_client in outputs.values():
            for one in per_client.outputs:
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
                if one.kv_transfer_params is not None:
                    self.answers[one.request_id] = one.kv_transfer_params

    def _samples(self, request: Request, output: object) -> bool:
        """Whether this step computed the request's last token so far."""
        at = {n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs}  # type: ignore[attr-defined]
        cached = output.scheduled_cached_reqs  # type: ignore[attr-defined]
        at |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = output.num_scheduled_tokens[request.request_id]  # type: ignore[attr-defined]
        return bool(at[request.request_id] + scheduled >= request.num_tokens)

    def _blocks_of(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def _check_blocks(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        for request_id, blocks in self.worker.owed.items():
            for block in blocks:
                assert pool.blocks[block].ref_cnt > 0, (
                    f"block {block} of {request_id} is free while a peer may touch it"
                )

    def settle(self, *request_ids: str, verdict: str = "done") -> None:
        """The transfers of these requests are over; the next step reports it."""
        for request_id in request_ids:
            assert request_id in self.worker.owed, f"nothing is owed for {request_id}"
            self.worker.settled[request_id] = "aborted" if request_id in self.worker.aborted else verdict

    def abort(self, *request_ids: str) -> None:
        """The clients are gone."""
        self.scheduler.finish_requests(list(request_ids), ABORTED)

    def status(self, request_id: str) -> str:
        """vLLM's status of a request, or "GONE"."""
        request = self.scheduler.requests.get(request_id)
        return "GONE" if request is None else request.status.name

    def steps(self, count: int) -> list[StepPlan]:
        """So many steps."""
        return [self.step() for _ in range(count)]

    def finish(self, verdict: str = "done", limit: int = 200) -> None:
        """Run until vLLM has nothing left, settling whatever is owed, and check that nothing is left behind."""
        for _ in range(limit):
            if not self.scheduler.requests and not self._running_work():
                break
            self.settle(*(r for r in self.worker.owed if r not in self.worker.settled), verdict=verdict)
            self.step()
        self.check_empty()

    def _running_work(self) -> bool:
        return any(o.num_scheduled_tokens for o, _ in self._running)  # type: ignore[attr-defined]

    def check_empty(self) -> None:
        """No request, no promise, no record, and every block is back."""
        self.steps(3)
        assert not self.scheduler.requests
        assert not self.worker.owed
        assert not self.worker.offers
        assert self.free_blocks == self._free_at_start
        kept = {name: value for name, value in vars(self.half).items() if isinstance(value, dict | set) and value}
        assert not kept, "the half keeps nothing of requests that are over"
