"""What the listener of vLLM's built-in connector survives: every other frame ends its thread."""

from __future__ import annotations

import msgpack

GET_META = b"get_meta_msg"


class ListenerEndedError(AssertionError):
    """Upstream's listener thread would have ended on this frame."""


def notify(frame: bytes, role: str, *, newer: bool = False) -> dict:
    """Read a frame as upstream's notify port of a node of `role` ("P" or "D") does; `newer` is vLLM 0.33.

    Raises:
        ListenerEndedError: the frame would have ended the thread.
    """
    try:
        fields = msgpack.loads(frame)
    except (msgpack.exceptions.ExtraData, msgpack.exceptions.UnpackException, ValueError):
        fields = None
    if not isinstance(fields, dict):
        raise ListenerEndedError(f"legacy or broken frame {frame[:40]!r}")
    expected = {
        "P": {"remote_blocks": ("transfer_id", "block_notify_list"), "release": ("transfer_id", "consumer_tp_size")},
        "D": {"write_done": ("transfer_id",), **({"write_failed": ("transfer_id",)} if newer else {})},
    }[role].get(fields.get("type"))
    if expected is None or any(not fields.get(key) for key in expected):
        raise ListenerEndedError(f"{fields!r} at {role}")
    return fields


def is_plain(frame: bytes) -> bool:
    """Whether a frame has no key that only this project knows."""
    fields = msgpack.loads(frame)
    keys = {"type", "transfer_id", "req_id", "block_notify_list", "decode_rank", "consumer_tp_size", "num_writers"}
    return isinstance(fields, dict) and fields.keys() <= keys
