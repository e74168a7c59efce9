"""A server process: started under a guard, watched through its log, ended for certain."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from moriio_vllm.demo import guard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

GRACE_S = 20.0
"""How long a server may take to end after SIGTERM before it is killed."""
TAIL_LINES = 40
# What a server's log shows, in the order in which it shows it, and what that tells a waiting user.
_STAGES = (
    ("non-default args", "reading the model's configuration"),
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "making the KV cache"),
    ("init engine", "starting the HTTP server"),
    ("Application startup complete", "up"),
)


class ServerError(RuntimeError):
    """A server ended, or was not ready in time; the message holds the end of its log."""


class Process:
    """One running server, its guard and its log."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, stage: str = "starting Python"
    ) -> None:
        self.name = name
        self.log = log
        self._command, self._env = command, env
        self.started = time.monotonic()
        self._seen = 0
        self._stage = stage
        guarded = [sys.executable, "-I", "-S", guard.__file__, str(GRACE_S), *command]
        with log.open("wb") as out:
            self._guard = subprocess.Popen(  # noqa: S603 - the callers build the command from their own words
                guarded,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env=dict(env),
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self._guard.pid)

    @property
    def pid(self) -> int:
        """The id of the guard; the server is its only child."""
        return self._guard.pid

    def again(self) -> Process:
        """Start the same server again, at the same ports, with a log of its own; this one must have ended."""
        return Process(self.name, self._command, self._env, self.log.with_suffix(f".{time.monotonic_ns()}.log"))

    def running(self) -> bool:
        """Whether the server has not ended."""
        return self._guard.poll() is None

    def stage(self) -> str:
        """Return in a few words how far the start has come, read from what the log gained since the last call."""
        with self.log.open("rb") as file:
            file.seek(self._seen)
            fresh = file.read()
        # A line cut by the read is looked at again, whole, the next time.
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._seen += len(whole)
        text = whole.decode(errors="replace")
        for pattern, meaning in _STAGES:
            if pattern in text:
                self._stage = meaning
        return self._stage

    def tail(self) -> str:
        """Return the last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def failure(self, what: str) -> ServerError:
        """Return the error that says ``what`` happened to this server and shows its log."""
        return ServerError(f"{self.name}: {what}\n--- end of {self.log}\n{self.tail()}\n---")

    def check(self) -> None:
        """Raise when the server has ended.

        Raises:
            ServerError: with the exit code and the end of the log.
        """
        code = self._guard.poll()
        if code is not None:
            raise self.failure(f"ended with exit code {code} after {time.monotonic() - self.started:.0f} s")

    def ask_to_end(self) -> None:
        """Close the guard's input: it ends the server and all its descendants. Returns at once; may be repeated."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()

    def wait_ended(self) -> None:
        """Return when nothing of the server is left; call ``ask_to_end`` first."""
        if self.pidfd < 0:
            return
        if not _readable([self.pidfd], GRACE_S + 10):
            self._guard.kill()
        self._guard.wait()
        os.close(self.pidfd)
        self.pidfd = -1


def end_all(processes: Sequence[Process]) -> None:
    """End the servers, all at the same time."""
    for process in processes:
        process.ask_to_end()
    for process in processes:
        process.wait_ended()


def wait_any_ended(processes: Sequence[Process], timeout_s: float) -> None:
    """Wait for ``timeout_s``, or until one of the servers ends.

    Raises:
        ServerError: one ended.
    """
    _readable([process.pidfd for process in processes], timeout_s)
    for process in processes:
        process.check()


def _readable(fds: Sequence[int], timeout_s: float) -> bool:
    events = select.poll()
    for fd in fds:
        events.register(fd, select.POLLIN)
    return bool(events.poll(timeout_s * 1000))
