"""The digest of a prompt: both legs of a request have the same, whoever mixed their ids up has not.

It covers what decides a prompt's KV: token ids, the adapter, and what stands for images and the like.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

__all__ = ["prompt_digest"]


def prompt_digest(request: Any) -> str:
    """16 hex digits for a vLLM request; "" for a prompt that is not given as token ids.

    Args:
        request: has `prompt_token_ids`, and perhaps `lora_request` and `mm_features`.
    """
    if not request.prompt_token_ids:
        return ""
    digest = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=8)
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        digest.update(b"\0lora:" + str(lora.lora_name).encode())
    for feature in getattr(request, "mm_features", None) or ():
        place = feature.mm_position
        digest.update(f"\0{feature.identifier}@{place.offset}+{place.length}".encode())
    return digest.hexdigest()
