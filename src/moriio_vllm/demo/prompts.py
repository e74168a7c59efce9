"""The prompts of the demo and of the end-to-end tests.

Completions are given as token ids, so their lengths in tokens are exact: one token, around the size of a block, and
over the 512 tokens that one step of prefill takes. Each prompt begins differently, so that no server's prefix cache
makes a transfer smaller than its name says; prompts that share a prefix on purpose have a set of their own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 32
"""Tokens in a KV cache block of the demo's servers: the smallest that vLLM has on a CPU, so that prompts span many."""
BURST = 32
"""How many requests the tests send at once."""
LONG_ANSWERS = 12
"""How many requests together outgrow the small cache of the preemption test."""
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, 511, 512, 513, 1024, 1500)
# The first word of each prompt, because a prompt of one token has nothing else to differ in.
_STARTS = ("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve")
_SENTENCES = (
    "The harbour was quiet before the first boats came in.",
    "A letter arrived on Tuesday, and nobody opened it.",
    "Water boils at a lower temperature on a high mountain.",
    "She counted the steps to the lighthouse twice and got two different numbers.",
    "The old bridge was built by three brothers who never agreed on anything.",
    "In the garden behind the school there grew a single apple tree.",
    "Light from the nearest star takes more than four years to reach us.",
    "He repaired clocks for a living and was always late.",
    "The library keeps its oldest maps in a room without windows.",
    "Rain fell on the market square until the musicians went home.",
    "A good question is worth more than a quick answer.",
    "The train to the north leaves at seven in the morning.",
    "Bees find their way back by the position of the sun.",
    "Nobody in the village remembered who had painted the door blue.",
    "The baker gave away the last loaf and closed the shop.",
    "Copper turns green when it stands in the rain for years.",
    "Their boat was small, but it had crossed the bay a hundred times.",
    "On the fourth day the wind changed and the snow began to melt.",
    "The judge read the sentence slowly, as if it were a poem.",
    "Some rivers disappear into the ground and come out again far away.",
)


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        name: what the report calls it; unique within a set.
        content: token ids for a completion, the user's message for a chat.
        max_tokens: the most tokens to generate.
        stream: whether the answer is streamed.
    """

    name: str
    content: tuple[int, ...] | str
    max_tokens: int = 16
    stream: bool = True

    @property
    def path(self) -> str:
        """The URL path that this prompt is sent to."""
        return "/v1/chat/completions" if isinstance(self.content, str) else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the request: greedy, with the ids of the generated tokens in the answer."""
        body: dict[str, Any] = {
            "model": "model",
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": self.stream,
            "return_token_ids": True,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if isinstance(self.content, str):
            body["messages"] = [{"role": "user", "content": self.content}]
        else:
            body["prompt"] = list(self.content)
        return body


class PromptMaker:
    """Makes prompts of exact lengths with the model's tokenizer."""

    def __init__(self, model: Path) -> None:
        # Imported here: it comes with vLLM.
        from tokenizers import Tokenizer  # noqa: PLC0415

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def tokens(self, length: int, seed: str) -> tuple[int, ...]:
        """Return ``length`` tokens of prose that depends on ``seed`` alone and begins with it."""
        order = random.Random(seed)  # noqa: S311
        text = f"{seed}."
        ids: list[int] = []
        while len(ids) < length:
            text += " " + " ".join(order.sample(_SENTENCES, len(_SENTENCES)))
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tuple(ids[:length])

    def demo(self) -> list[Prompt]:
        """The prompts of the demo: completions of all ``LENGTHS``, and chats, streamed and not."""
        prompts: list[Prompt] = []
        for n in LENGTHS:
            name = f"completion of {n} token{'s' if n > 1 else ''}"
            prompts.append(
                Prompt(name, self.tokens(n, f"{_STARTS[len(prompts)]} things"), stream=len(prompts) % 3 != 2)
            )
        story = self._tokenizer.decode(list(self.tokens(600, "A story")))
        return [
            *prompts,
            Prompt("chat, capital of France", "What is the capital of France?", 32),
            Prompt("chat, not streamed", "Name three colours of the rainbow.", 32, stream=False),
            Prompt("chat, long message", f"{story}\nWhat was this about?", 32),
        ]

    def burst(self, count: int = BURST) -> list[Prompt]:
        """``count`` different prompts of 5 to 300 tokens, to be sent at once; every fourth is a chat."""
        order = random.Random(count)  # noqa: S311
        prompts = []
        for i in range(count):
            length = order.randint(5, 300)
            ids = self.tokens(length, f"{i} of {count}")
            content = self._tokenizer.decode(list(ids)) if i % 4 == 3 else ids
            prompts.append(Prompt(f"burst {i}", content, order.randint(1, 24), stream=i % 2 == 0))
        return prompts

    def shared_prefix(self) -> list[Prompt]:
        """Prompts that begin alike for whole blocks, part of a block, all of it, and one that is sent twice."""
        prefix = self.tokens(6 * BLOCK, "A common beginning")
        tails = {"itself": 0, "one more": 1, "a block more": BLOCK, "200 more": 200}
        prompts = [
            Prompt(f"prefix and {name}", prefix + self.tokens(n, name) if n else prefix) for name, n in tails.items()
        ]
        inside = prefix[: 3 * BLOCK + 5] + self.tokens(40, "leaves within a block")
        return [*prompts, Prompt("prefix left within a block", inside), Prompt("prefix once more", prefix)]

    def long_answers(self, count: int = LONG_ANSWERS) -> list[Prompt]:
        """``count`` prompts of 2 blocks that each generate 3 blocks more: they outgrow a small cache together."""
        return [
            Prompt(f"long answer {i}", self.tokens(2 * BLOCK, f"Tale {i}"), 3 * BLOCK, stream=i % 2 == 0)
            for i in range(count)
        ]
