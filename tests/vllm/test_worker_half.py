"""Worker halves over real caches: every byte in both modes and every layout, and nothing left behind."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.transport.nodes import HOST, eventually, free_ports
from tests.vllm.workers import (
    LAYERS,
    LAYOUTS,
    leg,
    make_half,
    make_worker,
    pair,
    read,
    shared,
    torch,
    write,
)

from moriio_proto.core import Timing
from moriio_proto.errors import ConfigurationError
from moriio_proto.events import Endpoint
from moriio_transport.base import TransportError, TransportUnavailableError
from moriio_transport.reactor import ReactorDiedError
from moriio_vllm import worker as worker_module
from moriio_vllm.device import DeviceFence
from moriio_vllm.metadata import Chunk, LoadPlan, OfferPlan, StepPlan

both_modes = pytest.mark.parametrize("mode", ["WRITE", "READ"])


def open_fds() -> int:
    """File descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def our_threads() -> list[str]:
    """Threads that this project starts."""
    return [t.name for t in threading.enumerate() if t.name.startswith("moriio")]


# --- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@both_modes
def test_every_layout_arrives_whole(mode, layout):
    """Blocks computed step by step on P are those that D holds when its load is done; other blocks stay zero."""
    with pair(mode, layout) as (p, d):
        source, target = [3, 7, 1, 20, 11], [5, 2, 23, 8, 9]
        (write if mode == "WRITE" else read)(p, d, "t", source, target, 1)
        d.wait(lambda: "t" in d.received)
        p.wait(lambda: "t" in p.sent)
        assert not d.failed
        assert d.holds(target, 1)
        untouched = set(range(24)) - set(target)
        assert not any(d.block(layer, block).any() for layer in LAYERS for block in untouched)


@both_modes
def test_a_suffix_is_moved_by_position(mode):
    """D has the first two blocks: it gets the others, into the blocks of their positions."""
    with pair(mode) as (p, d):
        source, target = [3, 7, 1, 20, 11], [23, 8, 9]
        d.step(StepPlan(loads=[LoadPlan("t", leg("D", "t", p, source), target, 2)]))
        p.step(
            StepPlan(offers=[OfferPlan("t", leg("P", "t", d), 5)], chunks=[Chunk("t", 0, 5, source)]),
            lambda layer: p.fill(layer, source, 4),
        )
        p.step(StepPlan(finishes=["t"]))
        d.wait(lambda: "t" in d.received)
        assert d.holds(target, 4, first=2)
        p.wait(lambda: "t" in p.sent)


def test_layers_that_never_say_so_are_sent_at_the_end_of_the_step():
    """WRITE: a forward pass that never calls `save_kv_layer` (a replayed graph) still delivers every layer, once."""
    with pair("WRITE") as (p, d):
        source, target = [3, 7, 1], [5, 2, 23]
        d.step(StepPlan(loads=[LoadPlan("t", leg("D", "t", p), target, 0)]))
        p.half.begin_step(StepPlan(offers=[OfferPlan("t", leg("P", "t", d), 3)], chunks=[Chunk("t", 0, 3, source)]))
        for layer in LAYERS:
            p.fill(layer, source, 2)
        p.half.end_step()
        p.half.begin_step(StepPlan(finishes=["t"]))
        p.half.end_step()
        d.wait(lambda: "t" in d.received)
        assert d.holds(target, 2)


def test_a_layer_out_of_order_waits_for_the_end_of_the_step():
    """WRITE: what a layer's hook says counts only when all layers before it have said so."""
    with pair("WRITE") as (p, d):
        source, target = [3, 7], [5, 2]
        d.step(StepPlan(loads=[LoadPlan("t", leg("D", "t", p), target, 0)]))
        p.half.begin_step(StepPlan(offers=[OfferPlan("t", leg("P", "t", d), 2)], chunks=[Chunk("t", 0, 2, source)]))
        p.half.layer_computed(LAYERS[2])
        p.half.layer_computed("a layer without a cache")
        assert p.half._computed == 0
        for layer in LAYERS:
            p.fill(layer, source, 3)
        p.half.end_step()
        p.half.begin_step(StepPlan(finishes=["t"]))
        d.wait(lambda: "t" in d.received)
        assert d.holds(target, 3)


@both_modes
def test_an_aborted_load_settles_once(mode):
    """The client of a load leaves before P began: D's blocks come back, and P's when its request ends."""
    with pair(mode) as (p, d):
        d.step(StepPlan(loads=[LoadPlan("t", leg("D", "t", p, [1, 2]), [5, 6], 0)]))
        d.step(StepPlan(aborts=["t"]))
        d.wait(lambda: "t" in d.received)
        assert not d.failed
        p.step(StepPlan(offers=[OfferPlan("t", leg("P", "t", d), 2)], chunks=[Chunk("t", 0, 2, [1, 2])]))
        p.step(StepPlan(finishes=["t"]))
        p.wait(lambda: "t" in p.sent)


@both_modes
def test_a_transfer_id_used_again_fails_its_second_request_only(mode):
    """The id of a transfer that is over: P settles the second request, D fails its load; neither half dies."""
    with pair(mode) as (p, d):
        move = write if mode == "WRITE" else read
        move(p, d, "t", [1, 2], [3, 4], 1)
        d.wait(lambda: "t" in d.received)
        p.wait(lambda: "t" in p.sent)
        p.step(StepPlan(offers=[OfferPlan("again", leg("P", "t", d), 2)]))
        p.step(StepPlan(finishes=["t"]))
        d.step(StepPlan(expects=[leg("D", "t", p, [1, 2])]))
        d.step(StepPlan(loads=[LoadPlan("again", leg("D", "t", p, [1, 2]), [5, 6], 0)]))
        d.wait(lambda: "again" in d.received)
        p.wait(lambda: "again" in p.sent)
        assert d.failed == {"again"}
        move(p, d, "other", [1, 2], [3, 4], 2)
        d.wait(lambda: "other" in d.received)
        assert d.failed == {"again"}


def test_nothing_overtakes_what_a_device_still_computes(monkeypatch):
    """P: on an accelerator the layers of a step are told when they are done; a later preemption or end waits."""
    done = threading.Event()

    class Work:
        def synchronize(self):
            done.wait(20)

    with pair("WRITE") as (p, d):
        told = []
        monkeypatch.setattr(p.half, "_submit", told.extend)
        monkeypatch.setattr(p.half, "_fence", DeviceFence(torch.device("cpu"), record=lambda _: Work()))
        p.step(StepPlan(offers=[OfferPlan("t", leg("P", "t", d), 2)], chunks=[Chunk("t", 0, 2, [1, 2])]))
        p.step(StepPlan(preempts=["t"]))
        p.step(StepPlan(chunks=[Chunk("t", 0, 2, [3, 4])]))
        p.step(StepPlan(finishes=["t"]))
        assert told == []
        done.set()
        eventually(lambda: len(told) == 1 + 3 + 1 + 3 + 1)
        kinds = [type(event).__name__ for event in told]
        assert kinds == ["StartOffer", *["Progress"] * 3, "Preempt", *["Progress"] * 3, "Finish"]
        assert told[3].blocks == [1, 2]
        assert told[7].blocks == [3, 4]


def test_an_unusable_load_is_reported_as_failed():
    """A load whose parameters lead nowhere fails in the next report, without a word to anybody."""
    with pair("READ") as (_, d):
        d.step(StepPlan(loads=[LoadPlan("t", None, [1], 0, "remote_host=None: expected a host")]))
        assert d.failed == {"t"}


# --- start --------------------------------------------------------------------------------------------------------


class BrokenTransport:
    """A transport that cannot register memory; only what is called before that."""

    def __init__(self):
        self.closed = False

    def register(self, regions):
        raise TransportError("region 0 (4 KiB at 0x1000): registration refused: no device")

    def close(self):
        self.closed = True


class Plugin:
    """Stands for a backend."""

    def __init__(self, create):
        self.create, self.options = create, {}


def no_device(**_):
    """What a backend without its hardware answers."""
    raise TransportUnavailableError("backend=rdma: no active device in /sys/class/infiniband; use loopback")


def test_a_taken_port_is_a_clean_error():
    """A port that somebody has is named at start, and no thread, socket or file stays."""
    taken, free = free_ports(2)
    before = (our_threads(), open_fds())
    with socket.create_server((HOST, taken)):
        half = make_half("P", "WRITE", (free, taken))
        with pytest.raises(ConfigurationError, match=f"notify_port={taken}"):
            half.register_kv_caches(shared())
    half.shutdown()
    eventually(lambda: (our_threads(), open_fds()) == before)


def test_w_no_rdma_device_is_a_clean_error(monkeypatch):
    """A backend without its device is an error with its text, and nothing was started."""
    monkeypatch.setattr(worker_module, "load_transport", lambda name: Plugin(no_device))
    before = (our_threads(), open_fds())
    half = make_half("P", "WRITE", free_ports(2))
    with pytest.raises(TransportUnavailableError, match="no active device"):
        half.register_kv_caches(shared())
    half.shutdown()
    assert (our_threads(), open_fds()) == before


def test_w_reg_refused_is_a_clean_error(monkeypatch):
    """Memory that the transport cannot register is an error at start, with region and reason, and it is closed."""
    broken = BrokenTransport()
    monkeypatch.setattr(worker_module, "load_transport", lambda name: Plugin(lambda **_: broken))
    half = make_half("P", "WRITE", free_ports(2))
    with pytest.raises(TransportError, match="region 0"):
        half.register_kv_caches(shared())
    assert broken.closed


def test_an_unknown_backend_is_refused_by_name():
    """The key, the value and what exists are in the text."""
    with pytest.raises(ConfigurationError, match=r"backend='telepathy'.*loopback"):
        make_half("P", "WRITE", (6301, 61005), backend="telepathy")


# --- end ----------------------------------------------------------------------------------------------------------


@both_modes
def test_shutdown_leaves_nothing(mode):
    """After a transfer and a shutdown there is no thread, file descriptor or child of ours."""
    with pair(mode):  # what is made once per process is made here
        pass
    before = (our_threads(), open_fds())
    with pair(mode) as (p, d):
        (write if mode == "WRITE" else read)(p, d, "t", [1, 2], [3, 4], 1)
        d.wait(lambda: "t" in d.received)
    eventually(lambda: (our_threads(), open_fds()) == before)
    assert our_threads() == []


def test_shutdown_twice_and_before_the_start_is_harmless():
    """vLLM may shut down an engine that never came up, or twice."""
    half = make_half("P", "WRITE", free_ports(2))
    half.shutdown()
    worker = make_worker("D", "READ")
    worker.half.shutdown()
    worker.half.shutdown()


@both_modes
def test_w_wait_forever_200_failed_loads_leave_nothing(mode, monkeypatch):
    """W-WAIT-FOREVER: 200 loads from 200 addresses where nobody is end as failed; threads and files are as before."""

    def quick(**given):
        return Timing(**given, handshake_timeout=0.3, redial=0.1, forget=0.2)

    monkeypatch.setattr(worker_module, "Timing", quick)
    with pair(mode, transfer_timeout=1) as (p, d):
        (write if mode == "WRITE" else read)(p, d, "warm", [1, 2], [3, 4], 1)
        d.wait(lambda: "warm" in d.received)
        before = (our_threads(), open_fds())
        nobody = free_ports(2)
        for i in range(200):
            endpoint = Endpoint(f"127.1.{i}.1", *nobody)
            d.step(StepPlan(loads=[LoadPlan(f"r{i}", leg("D", f"t{i}", endpoint, [1]), [i % 20], 0)]))
        d.wait(lambda: len(d.failed) == 200)
        d.wait(lambda: open_fds() <= before[1])
        assert our_threads() == before[0]
        driver = d.half._reactor._driver
        d.wait(lambda: len(driver.core.peers) <= 1)
        d.wait(lambda: not driver.core.transfers)
        assert not driver._posts
        (write if mode == "WRITE" else read)(p, d, "after", [1, 2], [5, 6], 2)
        d.wait(lambda: "after" in d.received)
        assert "after" not in d.failed


def test_a_dead_reactor_is_loud():
    """When the transfer thread dies by a bug, every later hook raises with its cause, and shutdown still works."""
    worker = make_worker("D", "READ")
    worker.half._reactor._driver.on_commands = lambda *_: 1 / 0
    worker.step(StepPlan(aborts=["t"]))
    eventually(lambda: "moriio-reactor" not in our_threads())
    with pytest.raises(ReactorDiedError, match="ZeroDivisionError"):
        worker.half.results()
    with pytest.raises(ReactorDiedError, match="ZeroDivisionError"):
        worker.half.begin_step(StepPlan(aborts=["t"]))
    worker.half.shutdown()
    assert our_threads() == []
