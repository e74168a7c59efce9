"""Telemetry: what was counted reaches vLLM's log and Prometheus, over ranks, steps, processes and a MultiConnector."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from tests.vllm.engine import vllm_config
from tests.vllm.workers import leg, pair, read, write

from moriio_vllm.connector import MoRIIOConnector
from moriio_vllm.metadata import LoadPlan, StepPlan
from moriio_vllm.metrics import REASONS, TransferStats, reason_class

TRANSCRIPTS = Path(__file__).parents[1] / "testdata" / "core"


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch):
    """Prometheus knows no metric of an earlier test."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram):
        monkeypatch.setattr(kind.__init__, "__kwdefaults__", None)
        defaults = list(kind.__init__.__defaults__)
        names = kind.__init__.__code__.co_varnames[: kind.__init__.__code__.co_argcount][-len(defaults) :]
        defaults[names.index("registry")] = registry
        monkeypatch.setattr(kind.__init__, "__defaults__", tuple(defaults))
    return registry


def stats_of(worker, steps=1):
    """The sum of a worker's stats, as the front end gets them: from another process."""
    total = TransferStats()
    for _ in range(steps):
        taken = worker.half.stats()
        if taken is not None:
            wire = msgspec.msgpack.decode(msgspec.msgpack.encode(taken.to_dict()))
            total.aggregate(MoRIIOConnector.build_kv_connector_stats(wire))
    return total


def test_every_reason_in_the_transcripts_has_a_class():
    """What the protocol gives as a reason is counted by what it means; texts of transports are "other"."""
    reasons = set()
    for script in TRANSCRIPTS.glob("*.txt"):
        reasons |= set(re.findall(r"SETTLED \S+ (?:failed|aborted) \((.*)\)$", script.read_text(), re.MULTILINE))
    classes = {reason: reason_class(reason) for reason in reasons}
    unknown = {reason for reason, name in classes.items() if name == "other"}
    assert unknown <= {"injected"}
    assert set(classes.values()) - {"other"} <= set(REASONS)
    assert len(set(classes.values())) > 3
    assert reason_class("") == ""


@pytest.mark.parametrize("mode", ["WRITE", "READ"])
def test_a_transfer_is_counted_on_both_sides(mode):
    """Bytes are counted by the side that copies, ends and times by both, and nothing is live or held afterwards."""
    with pair(mode) as (p, d):
        (write if mode == "WRITE" else read)(p, d, "t", [1, 2, 3], [4, 5, 6], 1)
        held = stats_of(d)
        d.wait(lambda: "t" in d.received)
        p.wait(lambda: "t" in p.sent)
        totals = {"P": stats_of(p), "D": held.aggregate(stats_of(d))}
        for side, total in totals.items():
            counters = total.data["counters"]
            assert counters["transfers"] == {"done": 1}, side
            assert bool(counters["bytes"]) is ((side == "P") is (mode == "WRITE"))
            assert [len(v) for v in total.data["seconds"].values()] == [1, 1]
            assert total.reduce()["Live transfers"] == total.reduce()["Held blocks"] == 0
        assert totals["D"].data["gauges"]["peers"]["READY"] == {"dp0 tp0": 1}
        assert p.half.stats() is None
        assert d.half.stats() is None


def test_what_is_held_is_seen_while_it_is_held():
    """A load that nobody serves holds its blocks in the metric until it ends, with the class of its reason."""
    with pair("READ", recv_abort_timeout=1, transfer_timeout=1) as (p, d):
        d.step(StepPlan(loads=[LoadPlan("t", leg("D", "t", p, [1, 2]), [5, 6], 0)]))
        now = stats_of(d).reduce()
        assert (now["Live transfers"], now["Held blocks"]) == (1, 2)
        d.wait(lambda: "t" in d.received)
        ended = stats_of(d)
        assert ended.data["counters"]["transfers"] == {"failed/given up by peer": 1}
        assert ended.reduce()["Held blocks"] == 0


def test_ranks_and_steps_add_up():
    """Counters are added; of a gauge the newest value of each rank counts, whatever is put together first."""

    def one(rank, done, held):
        stats = TransferStats()
        stats.count("transfers", "done", done)
        stats.data["gauges"]["held_blocks"] = {"": {rank: held}}
        stats.data["seconds"]["transfer_seconds"] = [0.5] * done
        return stats

    total = one("a", 1, 7).aggregate(one("b", 2, 5)).aggregate(one("a", 3, 1))
    assert total.reduce()["Transfers done"] == 6
    assert total.reduce()["Held blocks"] == 6
    assert total.reduce()["Avg transfer time (ms)"] == 500
    assert not total.is_empty()
    assert TransferStats().is_empty()
    total.reset()
    assert total.is_empty()


def example():
    """Stats as they leave a worker."""
    stats = TransferStats()
    stats.count("transfers", "done", 2)
    stats.count("transfers", "failed/timeout")
    stats.count("bytes", by=4096)
    stats.data["gauges"]["peers"] = {"READY": {"dp0 tp0": 1}}
    stats.data["gauges"]["held_blocks"] = {"": {"dp0 tp0": 3}}
    stats.data["seconds"]["transfer_seconds"] = [0.25, 0.5]
    return stats


def samples(registry, name):
    """Values of a metric by its labels."""
    return {
        tuple(v for k, v in s.labels.items() if k != "le"): s.value
        for family in registry.collect() for s in family.samples if s.name == name
    }  # fmt: skip


def test_prometheus_gets_every_label(tmp_path, fresh_registry):
    """vLLM's own front end code writes our stats to `vllm:moriio_*`, and our log line is made from them."""
    config = vllm_config(tmp_path, "D", "READ")
    prom = KVConnectorProm(config, ["model", "engine"], {0: ["m", "0"]})
    prom.observe(example().to_dict(), 0)
    prom.observe(example().to_dict(), 0)
    transfers = samples(fresh_registry, "vllm:moriio_transfers_total")
    assert transfers == {("m", "0", "consumer", "done", ""): 4, ("m", "0", "consumer", "failed", "timeout"): 2}
    assert samples(fresh_registry, "vllm:moriio_held_blocks") == {("m", "0", "consumer"): 3}
    assert samples(fresh_registry, "vllm:moriio_peers") == {("m", "0", "consumer", "READY"): 1}
    assert samples(fresh_registry, "vllm:moriio_transfer_seconds_sum") == {("m", "0", "consumer"): 1.5}
    lines = []
    logging = KVConnectorLogging(config.kv_transfer_config)
    logging.observe(example().to_dict())
    logging.observe(example().to_dict())
    logging.log(lambda _, line: lines.append(line))
    assert "Transfers done=4, Transfers failed=2" in lines[0]


def test_w_stats_multi_inside_a_multi_connector(tmp_path, fresh_registry):
    """W-STATS-MULTI: as a MultiConnector's child, stats and metrics are both there, and survive another process."""
    config = vllm_config(tmp_path, "D", "READ")
    child = {
        "kv_connector": "MoRIIOConnector", "kv_connector_module_path": "moriio_vllm", "kv_role": "kv_consumer",
        "kv_connector_extra_config": config.kv_transfer_config.kv_connector_extra_config,
    }  # fmt: skip
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_consumer", kv_connector_extra_config={"connectors": [child]}
    )
    multi = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    prom = KVConnectorProm(config, ["model", "engine"], {0: ["m", "0"]})

    def arrived():
        sent = msgspec.msgpack.encode({"MoRIIOConnector": example().to_dict()})
        return multi.build_kv_connector_stats(msgspec.msgpack.decode(sent))

    rebuilt = arrived()
    assert isinstance(rebuilt.data["MoRIIOConnector"], TransferStats)
    assert rebuilt.aggregate(arrived()).reduce()["MoRIIOConnector"]["Transfers done"] == 4
    prom.observe(arrived().to_dict(), 0)
    assert samples(fresh_registry, "vllm:moriio_bytes_total") == {("m", "0", "consumer"): 4096}
