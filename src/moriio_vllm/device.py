"""Tells when the device work that writes a cache is done, without making the forward pass wait.

On a CPU the work is done when the hook is called.  On an accelerator the hook records an event on the stream that
vLLM computes on, and a thread waits for the events in their order; the wait is in native code without the
interpreter lock.  Only torch's device-neutral API is used, so any accelerator that torch knows will do.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["DeviceFence", "FenceEvent", "record_event"]


class FenceEvent(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Wait until all work recorded before it is done."""


Callback: TypeAlias = "Callable[[BaseException | None], None]"


def record_event(device: torch.device) -> FenceEvent:
    """Mark what has been submitted so far to the current stream of an accelerator."""
    import torch  # noqa: PLC0415 - a CPU-only test of the thread needs no torch

    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    fence: FenceEvent = event
    return fence


class DeviceFence:
    """Calls back, in order, when the device work submitted before each call of `after` is done.

    Args:
        device: where the caches are.
        record: makes an event that covers the work submitted so far; None when work is done as soon as it returns.
    """

    def __init__(self, device: torch.device, record: Callable[[torch.device], FenceEvent] | None = None) -> None:
        self._device = device
        self._record = record if record is not None or device.type == "cpu" else record_event
        self._queue: queue.SimpleQueue[tuple[FenceEvent, Callback] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if self._record is not None:
            self._thread = threading.Thread(target=self._run, name="moriio-fence", daemon=True)
            self._thread.start()

    def after(self, callback: Callback) -> None:
        """Have `callback(None)` called when the work submitted so far is done; never waits.

        On a CPU it is called before this returns, else on the fence's thread.  When the device reports an error, the
        callback gets it instead of None: the cache must then not be trusted.  A callback must not raise.
        """
        if self._record is None:
            callback(None)
        else:
            self._queue.put((self._record(self._device), callback))

    def close(self) -> None:
        """Call back for everything that was asked for, then end the thread.  Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, callback = item
            callback(_outcome(event))


def _outcome(event: FenceEvent) -> BaseException | None:
    try:
        event.synchronize()
    except RuntimeError as error:  # what torch raises for every error of a device
        return error
    return None
