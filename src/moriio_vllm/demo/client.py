"""A small HTTP client for OpenAI-style servers: what the demo asks, counts and cuts short."""

from __future__ import annotations

import json
import re
import select
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moriio_vllm.demo.prompts import Prompt

REQUEST_TIMEOUT_S = 180.0
_HEALTH_TIMEOUT_S = 2.0


class RequestError(RuntimeError):
    """A server answered a request with something other than an answer."""


@dataclass(frozen=True)
class Answer:
    """What a server answered to one prompt.

    Attributes:
        token_ids: the generated tokens.
        text: the same as text.
        finish_reason: why it ended, as the server says (``stop`` or ``length``).
        prompt_tokens: the prompt's length in tokens, as the server counts it.
        first_token_s: seconds from sending to the first token; the whole time for an answer that was not streamed.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    first_token_s: float

    def same_as(self, other: Answer) -> bool:
        """Whether both are the same answer, token by token, whatever the time each took."""
        return (self.token_ids, self.text, self.finish_reason, self.prompt_tokens) == (
            other.token_ids,
            other.text,
            other.finish_reason,
            other.prompt_tokens,
        )


@dataclass(frozen=True)
class Endpoint:
    """A server's HTTP address."""

    host: str
    port: int

    def healthy(self) -> bool:
        """Whether ``GET /health`` answers 200."""
        try:
            return self._get("/health", _HEALTH_TIMEOUT_S)[0] == 200
        except (OSError, HTTPException):
            return False

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a Prometheus metric that have all of ``labels``.

        Raises:
            KeyError: the server has no such sample.
        """
        body = self._get("/metrics", REQUEST_TIMEOUT_S)[1]
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        found = re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", body, re.MULTILINE)
        values = [float(value) for has, value in found if wanted <= set(has.split(","))]
        if not values:
            raise KeyError(f"{name} with {labels} at {self.host}:{self.port}")
        return sum(values)

    def ask(self, prompt: Prompt) -> Answer:
        """Send ``prompt`` and return the answer, read as the prompt says (streamed or at once).

        Raises:
            RequestError: the status is not 200, or the stream ended early.
            OSError: the connection failed or timed out.
        """
        connection = HTTPConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S)
        try:
            started = time.monotonic()
            response = _post(connection, prompt)
            if response.status != 200:
                raise RequestError(f"{prompt.name}: HTTP {response.status}: {response.read().decode(errors='replace')}")
            return _read_stream(prompt, response, started) if prompt.stream else _read_whole(response, started)
        finally:
            connection.close()

    def ask_all(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Send all prompts at the same time, each on a connection of its own; answers come in the order of prompts.

        Raises:
            RequestError: one was not answered.
        """
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(pool.map(self.ask, prompts))

    def ask_and_leave(self, prompt: Prompt, after_s: float) -> bool:
        """Send ``prompt``, read whatever comes for ``after_s`` seconds, and hang up.

        Returns:
            Whether the server was still busy with the answer when we left.
        """
        connection = HTTPConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S)
        try:
            deadline = time.monotonic() + after_s
            connection.request("POST", prompt.path, json.dumps(prompt.body()), {"Content-Type": "application/json"})
            readable = select.poll()
            readable.register(connection.sock, select.POLLIN)
            received = b""
            while (left := deadline - time.monotonic()) > 0 and readable.poll(left * 1000):
                part = connection.sock.recv(65536)
                if not part:
                    return False
                # The end mark may come in two parts, so look at the end of everything.
                received = (received + part)[-64:]
                if b"data: [DONE]" in received:
                    return False
            return True
        finally:
            connection.close()

    def _get(self, path: str, timeout_s: float) -> tuple[int, str]:
        connection = HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def _post(connection: HTTPConnection, prompt: Prompt) -> HTTPResponse:
    connection.request("POST", prompt.path, json.dumps(prompt.body()), {"Content-Type": "application/json"})
    return connection.getresponse()


def _read_whole(response: HTTPResponse, started: float) -> Answer:
    body = json.loads(response.read())
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    elapsed = time.monotonic() - started
    return Answer(tuple(choice["token_ids"]), text, choice["finish_reason"], body["usage"]["prompt_tokens"], elapsed)


def _events(prompt: Prompt, response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream of server-sent events.

    Raises:
        RequestError: the stream ended without its end mark, or carries an error.
    """
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            event = json.loads(data)
            if "choices" not in event:
                raise RequestError(f"{prompt.name}: {data}")
            yield event
    raise RequestError(f"{prompt.name}: the stream ended without [DONE]")


def _read_stream(prompt: Prompt, response: HTTPResponse, started: float) -> Answer:
    token_ids: list[int] = []
    text = finish_reason = ""
    first_token_s = 0.0
    prompt_tokens = 0
    for event in _events(prompt, response):
        if usage := event.get("usage"):
            prompt_tokens = usage["prompt_tokens"]
        for choice in event["choices"]:
            if choice.get("token_ids") and not token_ids:
                first_token_s = time.monotonic() - started
            token_ids += choice.get("token_ids") or ()
            text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            finish_reason = choice["finish_reason"] or finish_reason
    return Answer(tuple(token_ids), text, finish_reason, prompt_tokens, first_token_s)
