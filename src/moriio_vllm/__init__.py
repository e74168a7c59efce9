"""The vLLM adapter: `MoRIIOConnector`, loaded by `kv_connector_module_path: "moriio_vllm"`.

Importing this package imports neither vLLM nor torch, so that the registration process starts in milliseconds; the
connector is imported when it is asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MoRIIOConnector"]


def __getattr__(name: str) -> Any:
    if name == "MoRIIOConnector":
        from moriio_vllm.connector import MoRIIOConnector  # noqa: PLC0415 - see above

        return MoRIIOConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
