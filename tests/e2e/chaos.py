"""What the fault tests do to running servers: kill, stop and restart whole process trees, and read what is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path

from moriio_vllm.demo.client import Answer, Endpoint, RequestError
from moriio_vllm.demo.process import Process
from moriio_vllm.demo.prompts import Prompt
from moriio_vllm.demo.stack import Stack, wait_ready

LEASE_S = 3.0
SETTLE_S = 90.0


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, children before theirs."""
    out, frontier = [], [pid]
    while frontier:
        parent = frontier.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            children = [int(child) for child in task.read_text().split()]
            out += children
            frontier += children
    return out


def signal_tree(process: Process, number: signal.Signals) -> None:
    """Send a signal to every process of a server at once (the guard above them is ours and goes on)."""
    for pid in descendants(process.pid):
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it ended between the look and the signal
            continue


@dataclass
class Outcome:
    """What became of one request."""

    prompt: Prompt
    answer: Answer | None
    error: str
    seconds: float


def ask_all(endpoint: Endpoint, prompts: Sequence[Prompt]) -> list[Outcome]:
    """All at once; an error is an outcome, not the end."""

    def one(prompt: Prompt) -> Outcome:
        started = time.monotonic()
        try:
            answer, error = endpoint.ask(prompt), ""
        except (RequestError, OSError, HTTPException) as e:
            answer, error = None, f"{type(e).__name__}: {e}"[:300]
        return Outcome(prompt, answer, error, time.monotonic() - started)

    with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
        return list(pool.map(one, prompts))


class Servers:
    """A stack whose servers can be replaced."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._by_name: dict[str, Process] = {p.name: p for p in stack.processes}
        self._started: list[Process] = []

    def __getitem__(self, name: str) -> Process:
        return self._by_name[name]

    def kill(self, name: str) -> None:
        """kill -9, the whole tree."""
        signal_tree(self[name], signal.SIGKILL)
        self[name].ask_to_end()
        self[name].wait_ended()

    def start_again(self, name: str) -> None:
        """The same command at the same ports; not waited for."""
        self._by_name[name] = self[name].again()
        self._started.append(self[name])

    def wait_ready(self, say) -> None:
        """Every server answers, the router knows both."""
        stack = self.stack
        pairs = [(self["prefill"], stack.prefill), (self["decode"], stack.decode), (self["router"], stack.router)]
        wait_ready(pairs, [p for p, _ in pairs], say)

    def check(self) -> None:
        """Raise when a server has ended that was not killed."""
        for process in self._by_name.values():
            process.check()

    def end(self) -> None:
        """End what was started here; the stack ends its own."""
        for process in self._started:
            process.ask_to_end()
        for process in self._started:
            process.wait_ended()

    def usage(self) -> list[float]:
        """The part of its KV cache that each server uses, prefill first."""
        return [e.metric("vllm:kv_cache_usage_perc") for e in (self.stack.prefill, self.stack.decode)]

    def wait_empty(self) -> list[float]:
        """Wait until neither cache holds anything; returns what was seen last."""
        end = time.monotonic() + SETTLE_S
        while any(now := self.usage()) and time.monotonic() < end:
            time.sleep(0.5)  # noqa: TID251 - a metric can only be looked at again
        return now


def long_answers(prompts: Sequence[Prompt], tokens: int) -> Iterator[Prompt]:
    """The same prompts with more to generate, streamed."""
    for prompt in prompts:
        yield replace(prompt, max_tokens=tokens, stream=True)
