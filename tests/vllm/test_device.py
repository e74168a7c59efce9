"""The device fence with events of our own making."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import moriio_vllm.device
from moriio_vllm.device import DeviceFence, record_event

CPU, GPU = SimpleNamespace(type="cpu"), SimpleNamespace(type="gpu")
PATIENCE = 10  # s; how long a test waits for what must come before it fails


class Work:
    """Device work that ends when the test says so; an instance is the event that covers it."""

    def __init__(self, error=None):
        self.done, self.error = threading.Event(), error

    def synchronize(self):
        """As torch's: wait, then report an error of the device."""
        assert self.done.wait(PATIENCE)
        if self.error is not None:
            raise self.error


@pytest.fixture
def recorded():
    """The events that a fence will record, in order."""
    return [Work(), Work(), Work()]


@pytest.fixture
def fence(recorded):
    """A fence over `recorded`, ended after the test."""
    upcoming = iter(recorded)
    fence = DeviceFence(GPU, lambda device: next(upcoming))
    yield fence
    for work in recorded:
        work.done.set()
    fence.close()


def test_cpu_calls_back_at_once_and_starts_nothing():
    """On a CPU the callback runs in the caller, before `after` returns, without a thread."""
    before, called = threading.active_count(), []
    fence = DeviceFence(CPU)
    fence.after(lambda error: called.append((error, threading.current_thread())))
    assert called == [(None, threading.current_thread())]
    assert threading.active_count() == before
    fence.close()


def test_callback_waits_for_the_device_and_the_caller_does_not(fence, recorded):
    """`after` returns while the work runs; the callback comes when it is done."""
    outcomes = queue.SimpleQueue()
    fence.after(outcomes.put)
    assert outcomes.empty()
    recorded[0].done.set()
    assert outcomes.get(timeout=PATIENCE) is None


def test_callbacks_keep_the_order_of_submission(fence, recorded):
    """Work that ends early does not overtake."""
    order = queue.SimpleQueue()
    for index in range(3):
        fence.after(lambda error, index=index: order.put(index))
    recorded[2].done.set()
    recorded[1].done.set()
    assert order.empty()
    recorded[0].done.set()
    assert [order.get(timeout=PATIENCE) for _ in range(3)] == [0, 1, 2]


def test_error_of_the_device_reaches_its_callback_alone(fence, recorded):
    """A failed event is reported to the callback it belongs to; the thread goes on."""
    outcomes, recorded[0].error = queue.SimpleQueue(), RuntimeError("device lost")
    fence.after(outcomes.put)
    fence.after(outcomes.put)
    recorded[0].done.set()
    recorded[1].done.set()
    assert outcomes.get(timeout=PATIENCE) is recorded[0].error
    assert outcomes.get(timeout=PATIENCE) is None


def test_close_serves_what_was_asked_and_ends_the_thread(fence, recorded):
    """No callback is lost at the end, the thread is gone, and a second close does nothing."""
    outcomes = []
    for work in recorded:
        fence.after(outcomes.append)
        work.done.set()
    fence.close()
    assert outcomes == [None, None, None]
    assert "moriio-fence" not in {thread.name for thread in threading.enumerate()}
    fence.close()


def test_events_are_made_with_the_device_neutral_api(monkeypatch):
    """The event belongs to the device and is recorded on its current stream; torch.cuda is not touched."""
    calls = []

    class Event:
        def __init__(self, device):
            calls.append(("event", device))

        def record(self, stream):
            calls.append(("record", stream))

    accelerator = SimpleNamespace(current_stream=lambda device: ("stream of", device))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Event=Event, accelerator=accelerator))
    assert isinstance(record_event(GPU), Event)
    assert calls == [("event", GPU), ("record", ("stream of", GPU))]


def test_api_exists_in_torch():
    """The installed torch has what the fake stands for."""
    torch = pytest.importorskip("torch")
    assert callable(torch.accelerator.current_stream)
    assert {"record", "synchronize"} <= set(dir(torch.Event))


def test_module_does_not_import_torch():
    """Importing the fence does not import torch."""
    code = "import sys, moriio_vllm.device; print('torch' in sys.modules)"
    source = str(Path(moriio_vllm.device.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": source}
    )
    assert done.stdout == "False\n"
