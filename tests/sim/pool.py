"""vLLM's block pool, reduced: reference counts, a free queue in order of release, a prefix cache over full blocks."""

from __future__ import annotations

from collections import OrderedDict

from tests.sim.content import BLOCK_TOKENS

__all__ = ["BlockPool"]


class BlockPool:
    """`size` blocks; ids from 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(size))
        self._references = [0] * size
        self._word_of: dict[int, int] = {}  # cached block -> the word of its last position
        self._by_word: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses; cached ones among them."""
        return len(self._free)

    @property
    def cached(self) -> dict[int, int]:
        """Block by the word of its last position."""
        return self._by_word

    def lookup(self, words: list[int]) -> list[int]:
        """The longest cached prefix in full blocks; the last token is never part of it."""
        found: list[int] = []
        for end in range(BLOCK_TOKENS, len(words), BLOCK_TOKENS):
            block = self._by_word.get(words[end - 1])
            if block is None:
                break
            found.append(block)
        return found

    def use(self, cached: list[int], fresh: int) -> list[int] | None:
        """Reference the cached blocks and take `fresh` new ones; None, and nothing changed, if there are too few."""
        idle = sum(1 for block in cached if not self._references[block])
        if fresh > len(self._free) - idle:
            return None
        for block in cached:
            self._references[block] += 1
            self._free.pop(block, None)
        return [self._take() for _ in range(fresh)]

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        word = self._word_of.pop(block, None)
        if word is not None:
            del self._by_word[word]
        self._references[block] = 1
        return block

    def cache(self, block: int, word: int) -> None:
        """A full block holds the positions up to the one of `word`."""
        if word not in self._by_word and block not in self._word_of:
            self._by_word[word], self._word_of[block] = block, word

    def forget_cached(self) -> None:
        """Nothing is found in the prefix cache any more."""
        self._word_of.clear()
        self._by_word.clear()

    def release(self, blocks: list[int]) -> None:
        """Give blocks back; the first of a request are reused last."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released twice"
            if not self._references[block]:
                self._free[block] = None
