"""What KV is in the simulation: 64-bit words that tell which tokens, which position and which layer they belong to.

The word of a position is a chain over all tokens up to it, as real KV depends on all of them; each layer has its own
multiple of it.  So a block of another prompt, another position, another layer or an older computation is told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_TOKENS", "LAYERS", "Words", "chain", "expected"]

LAYERS = 2
BLOCK_TOKENS = 4

Words = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_FACTORS = np.array([0x9E3779B97F4A7C15 | 1, 0xC2B2AE3D27D4EB4F | 1], np.uint64)[:, None]


def chain(tokens: Sequence[int], start: int = 0x243F6A8885A308D3) -> list[int]:
    """The word of each position; `start` continues an earlier chain."""
    words, word = [], start
    for token in tokens:
        word = ((word ^ token) * 0x2545F4914F6CDD1D + 0x632BE59BD9B4E019) & _MASK
        word ^= word >> 29
        words.append(word)
    return words


def expected(words: Words) -> Words:
    """Content of each layer, shape [layers, positions], of a chain of shape [positions]."""
    return words[None, :] * _FACTORS
