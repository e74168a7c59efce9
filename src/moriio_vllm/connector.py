"""The facade that vLLM loads: every hook goes to the scheduler half or to the worker half, and none does more.

    --kv-transfer-config '{"kv_connector": "MoRIIOConnector", "kv_connector_module_path": "moriio_vllm", ...}'

Loads are asynchronous in both modes: a request enters a forward pass only when all of its KV is here.  So no layer
ever waits, and READ runs under any graph mode.  WRITE posts layer by layer from Python, and asks for piecewise graphs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.utils.network_utils import get_ip

from moriio_proto.errors import ConfigurationError
from moriio_transport.registry import available_transports, load_transport
from moriio_vllm._config_keys import BY_NAME
from moriio_vllm.config import ConnectorConfig, Ranks
from moriio_vllm.metadata import StepPlan
from moriio_vllm.metrics import TransferProm, TransferStats
from moriio_vllm.scheduler import Instance, make_scheduler
from moriio_vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["MoRIIOConnector"]

KVConnectorMetadata.register(StepPlan)  # a plain record, so that the scheduler half runs without vLLM, too


class MoRIIOConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """Prefill/decode KV transfer between vLLM instances; roles kv_producer and kv_consumer."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_like_vllm()
        config = checked_config(vllm_config, role)
        group = single_group(kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            instance = Instance(
                mode=config.mode, address=config.zmq_address, group=group,
                block_tokens=kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size,
                dp_rank=config.ranks.dp_rank, dp_size=config.ranks.dp_size,
                dp_size_local=config.ranks.dp_size_local, tp_size=config.ranks.tp_size,
                allowed_peers=config.allowed_peers,
            )  # fmt: skip
            self._scheduler = make_scheduler(instance, is_producer=config.is_producer)
        else:
            self._worker = WorkerHalf(
                config, kv_cache_config, cache_dtype=vllm_config.cache_config.cache_dtype,
                attention_backend=attention_backend_name(vllm_config),
            )  # fmt: skip

    # --- scheduler side -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request was admitted."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the transfer brings, always asynchronously."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The plan of this step."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers reported."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over (vLLM without the hybrid cache manager)."""
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over."""
        return self._scheduler.request_finished(request, block_ids)

    # --- worker side ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches are allocated."""
        self._worker.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepPlan)
        self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads were queued when the step began."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled only when its KV is here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """A layer is computed."""
        self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """The forward pass is done; sources stay valid because vLLM waits for `finished_sending`."""
        self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As `get_transfer_results`, for a vLLM that does not know it; a failed load is then only recomputed."""
        results = self._worker.results()
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What was settled since the last step."""
        results = self._worker.results()
        return KVConnectorTransferResults(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
        )

    def get_kv_connector_stats(self) -> TransferStats | None:
        """What happened in this worker since the last step."""
        return self._worker.stats() if self.role is KVConnectorRole.WORKER else None

    def shutdown(self) -> None:
        """The engine ends."""
        if self.role is KVConnectorRole.WORKER:
            self._worker.shutdown()

    # --- what vLLM asks the class ---------------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """WRITE posts layer by layer from Python, which a full graph would not run; READ needs nothing."""
        return not BY_NAME["read_mode"].parse(extra_config.get("read_mode") or False)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """Stats out of what `TransferStats.to_dict` gave, or none yet."""
        return TransferStats() if data is None else TransferStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferProm:
        """The metrics that those stats are written to."""
        return TransferProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# In a MultiConnector vLLM finds the class of a child's stats by name alone.  In a process that loads this module the
# name means this class, and not the connector of that name which is built into vLLM.
KVConnectorFactory._registry["MoRIIOConnector"] = lambda: MoRIIOConnector  # noqa: SLF001 - vLLM offers no other way


def checked_config(vllm_config: VllmConfig, role: KVConnectorRole) -> ConnectorConfig:
    """The configuration of this rank, checked.

    Raises:
        ConfigurationError: a key of the user's, or a kind of parallelism that this connector does not transfer.
    """
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigurationError(name, getattr(parallel, name), "1 with MoRIIOConnector")
    transfer = vllm_config.kv_transfer_config
    ranks = Ranks(
        dp_rank=parallel.data_parallel_rank, dp_size=parallel.data_parallel_size,
        dp_size_local=parallel.data_parallel_size_local, tp_size=parallel.tensor_parallel_size,
        tp_rank=get_tensor_model_parallel_rank() if role is KVConnectorRole.WORKER else 0,
    )  # fmt: skip
    return ConnectorConfig.from_extra(
        transfer.kv_connector_extra_config, role=transfer.kv_role, ranks=ranks, default_host=get_ip,
        backends=available_transports(), options_of=lambda name: load_transport(name).options,
    )  # fmt: skip


def log_like_vllm() -> None:
    """Let our loggers write where vLLM's do, at its level: it configures none but its own."""
    theirs = logging.getLogger("vllm")
    for package in ("moriio_proto", "moriio_transport", "moriio_vllm"):
        ours = logging.getLogger(package)
        if theirs.handlers and not ours.handlers:
            ours.handlers, ours.propagate = list(theirs.handlers), False
            ours.setLevel(theirs.getEffectiveLevel())


def single_group(kv_cache_config: KVCacheConfig) -> int:
    """Index of the one KV cache group that is transferred.

    Raises:
        NotImplementedError: none or several; says what to do.
    """
    groups = kv_cache_config.transfer_group_ids
    if len(groups) != 1:
        specs = [type(kv_cache_config.kv_cache_groups[i].kv_cache_spec).__name__ for i in groups]
        raise NotImplementedError(
            f"this model has {len(groups)} transferable KV cache groups ({', '.join(specs)}): expected one. "
            "Start vLLM with --disable-hybrid-kv-cache-manager, or serve a model with one kind of attention."
        )
    return int(groups[0])


def attention_backend_name(vllm_config: VllmConfig) -> str:
    """What the handshake calls `attn_backend_name`."""
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return str(getattr(backend, "name", backend) or "auto")
