"""The harness itself, without vLLM: processes end for certain, failures show their log, answers are read as they are."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from moriio_vllm.demo import guard
from moriio_vllm.demo.client import Answer, Endpoint, RequestError
from moriio_vllm.demo.model import hugging_face_name, unpermute
from moriio_vllm.demo.ports import free_ports
from moriio_vllm.demo.process import Process, ServerError, end_all, wait_any_ended
from moriio_vllm.demo.prompts import Prompt
from moriio_vllm.demo.report import Row, summary

DEADLINE_MS = 30_000
# Deaf to SIGTERM, with a grandchild in a session of its own, both known by a pipe that they hold open.
STUBBORN = ["bash", "-c", "trap '' TERM; (setsid sleep 1000 &) ; echo up; sleep 1000"]
PROMPT = Prompt("a prompt", (1, 2, 3))


def guarded(grace_s, command, **streams):
    """Start ``command`` under the guard."""
    return subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, str(grace_s), *command], **streams)


def wait_closed(fd):
    """Wait until no process has the other end of the pipe ``fd``; return whether that came in time."""
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(DEADLINE_MS))


def test_guard_passes_the_exit_code_on():
    """A guarded command that ends by itself gives its exit code to the guard."""
    with guarded(5, ["sh", "-c", "exit 7"], stdin=subprocess.PIPE) as process:
        assert process.wait() == 7


def test_guard_reports_the_signal_that_ended_the_command():
    """A guarded command that is killed gives 128 and the signal's number, as a shell does."""
    with guarded(5, ["sh", "-c", "kill -9 $$"], stdin=subprocess.PIPE) as process:
        assert process.wait() == 128 + signal.SIGKILL


@pytest.mark.parametrize("how", ["close", "sigterm"])
def test_guard_ends_all_descendants(how):
    """Closing the guard's input, or SIGTERM to it, ends even a deaf command and a grandchild in another session."""
    with guarded(0.2, STUBBORN, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        if how == "close":
            process.stdin.close()
        else:
            process.terminate()
        assert wait_closed(process.stdout.fileno())
        assert process.wait() == 128 + signal.SIGKILL


def test_nothing_outlives_a_killed_parent(tmp_path):
    """When the process that started a server is killed with SIGKILL, the server and its descendants end, too."""
    read, write = os.pipe()
    program = (
        "import os, select, sys; from pathlib import Path; from moriio_vllm.demo.process import Process\n"
        f"p = Process('s', {STUBBORN!r}, os.environ, Path({str(tmp_path / 'log')!r}))\n"
        "print('started', flush=True); select.select([sys.stdin], [], [])"
    )
    # The guard closes descriptors above 2, so the pipe that shows life goes in as the parent's standard error's copy.
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ, pass_fds=(write,)
    )
    os.close(write)
    with parent, closing(os.fdopen(read, "rb")):
        assert parent.stdout.readline() == b"started\n"
        children = guard.descendants(parent.pid)
        pidfds = [os.pidfd_open(pid) for pid in children]
        parent.kill()
        assert pidfds
        for fd in pidfds:
            assert select.select([fd], [], [], DEADLINE_MS / 1000)[0]
            os.close(fd)
