"""What transfers do, for vLLM's log and its Prometheus endpoint.

A worker half tells its `TransferMeter` what it is told to do and what was settled; once a step vLLM takes the
difference since the last step as `TransferStats`, adds up all ranks, and hands the sum to the log and to
`TransferProm` in the front end.

Counters and observations are added; gauges are kept by rank, so that the newest value of each rank counts,
whether stats of several ranks or of several steps are put together.
"""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from moriio_proto.core import Core

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moriio_proto.effects import Settled
    from moriio_vllm.metadata import StepPlan

__all__ = ["REASONS", "TransferMeter", "TransferProm", "TransferStats", "reason_class"]

REASONS: Final = {  # class -> how the texts of `Settled.reason` begin; "other" is everything else
    "expired": ("no progress in time while offered", "no progress in time while leased", "the prefill node's lease"),
    "timeout": ("no progress in time",),
    "peer lost": ("the peer process", "the process at this address", "no answer to the handshake", "the session"),
    "given up by peer": ("the prefill node", "the decode node", "not offered"),
    "aborted": ("the request was aborted",),
    "id used twice": ("a transfer with this id", "another prompt"),
}
SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

_COUNTERS: Final = {
    "transfers": "Transfers that are over, by outcome and class of reason.",
    "bytes": "Bytes that this side has copied.",
    "refused_frames": "Frames of peers that were no message.",
    "refused_posts": "Copies that the transport put off because its queue was full.",
    "strangers": "Messages of a process that a transfer is not bound to.",
}
_GAUGES: Final = {
    "live_transfers": "Transfers that vLLM waits for.",
    "held_blocks": "KV cache blocks that only a transfer holds.",
    "peers": "Known peers, by state.",
}
_HISTOGRAMS: Final = {
    "queue_seconds": "D: from the request's arrival to its load. P: from its arrival to the end of its prefill.",
    "transfer_seconds": "From the load (D) or the end of the prefill (P) to the transfer's end.",
}


def reason_class(reason: str) -> str:
    """The class of a reason, one of `REASONS` or "other"; "" stays ""."""
    if not reason:
        return ""
    return next((name for name, begins in REASONS.items() if reason.startswith(begins)), "other")


@dataclass
class TransferStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """One step of one or more ranks, or the sum of several; plain values that any serializer takes.

    `data`: counters by name and label, observations in seconds by name, gauges by name, label and rank.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin empty, or with what `to_dict` gave in another process."""
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Begin again."""
        self.data = {
            "counters": {name: {} for name in _COUNTERS},
            "seconds": {name: [] for name in _HISTOGRAMS},
            "gauges": {name: {} for name in _GAUGES},
        }

    def count(self, name: str, label: str = "", by: int = 1) -> None:
        """Add to a counter."""
        if by:
            counter = self.data["counters"][name]
            counter[label] = counter.get(label, 0) + by

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Add other ranks, or a later time."""
        for name, labels in other.data["counters"].items():
            for label, value in labels.items():
                self.count(name, label, value)
        for name, values in other.data["seconds"].items():
            self.data["seconds"][name].extend(values)
        for name, labels in other.data["gauges"].items():
            for label, ranks in labels.items():
                self.data["gauges"][name].setdefault(label, {}).update(ranks)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of vLLM's log."""
        counters, seconds, gauges = self.data["counters"], self.data["seconds"], self.data["gauges"]
        ended = Tally[str]()
        for label, value in counters["transfers"].items():
            ended[label.partition("/")[0]] += value
        took = np.asarray(seconds["transfer_seconds"] or [0.0])
        return {
            "Transfers done": ended["done"],
            "Transfers failed": ended["failed"],
            "Transfers aborted": ended["aborted"],
            "Avg transfer time (ms)": round(float(took.mean()) * 1e3, 3),
            "P90 transfer time (ms)": round(float(np.percentile(took, 90)) * 1e3, 3),
            "MB copied": round(sum(counters["bytes"].values()) / 2**20, 3),
            "Live transfers": _total(gauges["live_transfers"]),
            "Held blocks": _total(gauges["held_blocks"]),
        }

    def is_empty(self) -> bool:
        """Nothing happened, and nothing is held."""
        return not any(any(kind.values()) for kind in self.data.values())


def _total(gauge: Mapping[str, Mapping[str, int]]) -> int:
    return sum(sum(ranks.values()) for ranks in gauge.values())


class TransferMeter:
    """Counts what one worker half does.  Times are those of the steps at which vLLM tells and is told."""

    def __init__(self, rank: str, *, is_producer: bool) -> None:
        self._rank, self._is_producer = rank, is_producer
        self._stats = TransferStats()
        self._arrived: dict[str, float] = {}  # transfer id -> when its request came
        self._begun: dict[str, float] = {}  # transfer id -> when vLLM began to wait for its end
        self._goal: dict[str, int] = {}  # transfer id -> blocks, of what is not handed over
        self._held: dict[str, int] = {}  # transfer id -> blocks
        self._seen: dict[str, int] = {}  # of the counters that only grow
        self._gauges: dict[str, dict[str, int]] = {}

    def planned(self, plan: StepPlan, now: float) -> None:
        """A step begins."""
        for offer in plan.offers:
            self._arrived[offer.params.transfer_id] = now
            self._goal[offer.params.transfer_id] = offer.goal_blocks
        for params in plan.expects:
            self._arrived[params.transfer_id] = now
        for load in plan.loads:
            if load.params is not None:
                self._begin(load.params.transfer_id, len(load.blocks), now)
        for params in plan.skips:
            self._arrived.pop(params.transfer_id, None)
        if self._is_producer:
            for transfer_id in (*plan.finishes, *plan.aborts):
                self._begin(transfer_id, self._goal.pop(transfer_id, 0), now)

    def _begin(self, transfer_id: str, blocks: int, now: float) -> None:
        self._stats.data["seconds"]["queue_seconds"].append(now - self._arrived.pop(transfer_id, now))
        self._begun[transfer_id], self._held[transfer_id] = now, blocks

    def settled(self, settled: Settled, now: float) -> None:
        """A transfer is over."""
        begun = self._begun.pop(settled.transfer_id, now)
        self._held.pop(settled.transfer_id, None)
        self._stats.data["seconds"]["transfer_seconds"].append(now - begun)
        self.over(settled.verdict, settled.reason)

    def over(self, verdict: str, reason: str) -> None:
        """A transfer ended, or never began."""
        label = verdict if verdict == "done" else f"{verdict}/{reason_class(reason)}"
        self._stats.count("transfers", label)

    def take(self, core: Core, refused_frames: int) -> TransferStats | None:
        """What happened since the last call; None when nothing did.  Only reads of the core what is safe to."""
        grown = {
            "bytes": core.stats.bytes_moved, "refused_posts": core.stats.refused_posts,
            "strangers": core.stats.strangers, "refused_frames": refused_frames,
        }  # fmt: skip
        for name, value in grown.items():
            self._stats.count(name, by=value - self._seen.get(name, 0))
        self._seen = grown
        states = Tally(p.state.name for p in list(core.peers.values()))
        gauges = {
            "live_transfers": {"": len(self._goal) + len(self._begun)},
            "held_blocks": {"": sum(self._held.values())},
            "peers": {**dict.fromkeys(self._gauges.get("peers", {}), 0), **states},
        }
        if self._stats.is_empty() and gauges == self._gauges:
            return None
        self._gauges = gauges
        out, self._stats = self._stats, TransferStats()
        for name, labels in gauges.items():
            out.data["gauges"][name] = {label: {self._rank: value} for label, value in labels.items()}
        return out


class TransferProm(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is untyped here
    """Prometheus metrics `vllm:moriio_*`; those with a label have it after vLLM's own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        role = vllm_config.kv_transfer_config.kv_role.removeprefix("kv_")

        def made(kind: type, name: str, text: str, *labels: str, **more: Any) -> Any:
            return metric_types[kind](
                name=f"vllm:moriio_{name}", documentation=text, labelnames=[*labelnames, "role", *labels], **more
            )

        self._role = role
        labels = {"transfers": ("outcome", "reason"), "peers": ("state",)}
        self._counters = {n: made(Counter, n, text, *labels.get(n, ())) for n, text in _COUNTERS.items()}
        self._gauges = {n: made(Gauge, n, text, *labels.get(n, ())) for n, text in _GAUGES.items()}
        self._seconds = {n: made(Histogram, n, text, buckets=SECONDS) for n, text in _HISTOGRAMS.items()}
        self._ranks: dict[tuple[int, str, str], dict[str, int]] = {}  # gauges of the ranks that said nothing this time

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one `TransferStats.data`."""
        engine = [*self.per_engine_labelvalues[engine_idx], self._role]
        for name, labels in transfer_stats_data["counters"].items():
            for label, value in labels.items():
                outcome, _, reason = label.partition("/")
                own = [outcome, reason] if name == "transfers" else []
                self._counters[name].labels(*engine, *own).inc(value)
        for name, labels in transfer_stats_data["gauges"].items():
            for label, ranks in labels.items():
                known = self._ranks.setdefault((engine_idx, name, label), {})
                known.update(ranks)
                self._gauges[name].labels(*engine, *([label] if name == "peers" else [])).set(sum(known.values()))
        for name, values in transfer_stats_data["seconds"].items():
            for value in values:
                self._seconds[name].labels(*engine).observe(value)
