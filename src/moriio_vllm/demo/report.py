"""The demo's table and its summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moriio_vllm.demo.client import Answer
    from moriio_vllm.demo.prompts import Prompt

_COLUMNS = "{:<28} {:>6}  {:<6} {:>12}  {}"
HEADER = _COLUMNS.format("prompt", "tokens", "mode", "first token", "equals single server")


@dataclass(frozen=True)
class Row:
    """One prompt sent through the router in one mode, next to the single server's answer."""

    prompt: Prompt
    mode: str
    answer: Answer
    expected: Answer

    @property
    def exact(self) -> bool:
        """Whether the answer is the single server's."""
        return self.answer.same_as(self.expected)

    def line(self) -> str:
        """The row of the table, and below it both answers when they differ."""
        first = f"{self.answer.first_token_s * 1000:.0f} ms" if self.prompt.stream else "-"
        verdict = "yes" if self.exact else "NO"
        line = _COLUMNS.format(self.prompt.name, self.answer.prompt_tokens, self.mode.upper(), first, verdict)
        return line if self.exact else f"{line}\n{self.difference()}"

    def difference(self) -> str:
        """Both answers, for a reader who has to find out why they differ."""
        return f"  expected {_show(self.expected)}\n  got      {_show(self.answer)}"


def _show(answer: Answer) -> str:
    return f"{answer.text!r} {list(answer.token_ids)} ({answer.finish_reason}, prompt of {answer.prompt_tokens})"


def rows(mode: str, prompts: Sequence[Prompt], answers: Iterable[Answer], expected: Sequence[Answer]) -> list[Row]:
    """Pair prompts, answers and the single server's answers, which come in the same order."""
    return [Row(*parts) for parts in zip(prompts, [mode] * len(prompts), answers, expected, strict=True)]


def summary(table: Sequence[Row], transferred: dict[str, int], seconds: float) -> str:
    """The closing line: how many answers were exact, and how many prompt tokens' KV each mode moved."""
    exact = sum(row.exact for row in table)
    moved = ", ".join(f"{mode.upper()} {tokens}" for mode, tokens in transferred.items())
    verdict = "all exact" if exact == len(table) else "MISMATCH"
    return (
        f"{verdict}: {exact} of {len(table)} answers equal; tokens whose KV cache was moved: {moved}; {seconds:.0f} s"
    )
