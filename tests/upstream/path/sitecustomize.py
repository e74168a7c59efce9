"""What vLLM's own connector needs on a machine without a GPU; in force where this directory is on PYTHONPATH.

1. ``torch.cuda.Event`` and ``current_stream`` as no-ops: its WRITE path records and awaits events.
2. A KV allocation that begins and ends at a page, as on ROCm: it registers whole pages.
"""

import importlib.abc
import importlib.util
import mmap
import sys

PAGE = mmap.PAGESIZE


class NoEvent:
    """Work on a CPU is done when the call returns."""

    def __init__(self, *args, **kwargs):
        """Like torch's."""

    def record(self, stream=None):
        """Nothing is in flight."""

    def synchronize(self):
        """Nothing is in flight."""


def without_cuda(_module):
    """Replace what the connector calls of torch.cuda."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.Event = NoEvent
        torch.cuda.current_stream = lambda *args, **kwargs: NoEvent()


def with_whole_pages(module):
    """Replace the raw allocation inside vLLM's function."""
    import torch

    original, real_zeros = module.allocate_kv_cache, torch.zeros

    def zeros(*size, **kwargs):
        if len(size) == 1 and isinstance(size[0], int) and kwargs.get("dtype") is torch.int8:
            return torch.frombuffer(mmap.mmap(-1, -(-size[0] // PAGE) * PAGE), dtype=torch.int8)
        return real_zeros(*size, **kwargs)

    def allocate_kv_cache(*args, **kwargs):
        torch.zeros = zeros
        try:
            return original(*args, **kwargs)
        finally:
            torch.zeros = real_zeros

    module.allocate_kv_cache = allocate_kv_cache


HOOKS = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": without_cuda,
    "vllm.v1.worker.utils": with_whole_pages,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs a hook right after its module was executed."""

    def find_spec(self, name, path=None, target=None):
        """The module's own spec, whose loader also runs the hook; None for every other module."""
        hook = HOOKS.pop(name, None)
        spec = importlib.util.find_spec(name) if hook is not None else None
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterImport())
