"""The harness itself, without vLLM: processes end for certain, failures show their log, answers are read right."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
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
# Deaf to SIGTERM, with a grandchild in a session of its own; both hold the named pipe "alive" open while they live.
STUBBORN = ["bash", "-c", "exec 9>alive; trap '' TERM; (setsid sleep 1000 &); echo up >&9; sleep 1000"]
PROMPT = Prompt("a prompt", (1, 2, 3))


def guarded(grace_s, command, **streams):
    """Start ``command`` under the guard."""
    return subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, str(grace_s), *command], **streams)


@pytest.fixture
def alive(tmp_path):
    """The named pipe of ``STUBBORN`` in its working directory ``tmp_path``."""
    os.mkfifo(tmp_path / "alive")
    return tmp_path / "alive"


def wait_for_end(pipe):
    """Wait until no process has the other end of ``pipe`` open; return whether that came in time."""
    poll = select.poll()
    poll.register(pipe, 0)
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
def test_guard_ends_all_descendants(how, tmp_path, alive):
    """Closing the guard's input, or SIGTERM to it, ends even a deaf command and a grandchild in another session."""
    with guarded(0.2, STUBBORN, stdin=subprocess.PIPE, cwd=tmp_path) as process, alive.open() as pipe:
        assert pipe.readline() == "up\n"
        if how == "close":
            process.stdin.close()
        else:
            process.terminate()
        assert wait_for_end(pipe)
        assert process.wait() == 128 + signal.SIGKILL


def test_nothing_outlives_a_killed_parent(tmp_path, alive):
    """When the process that started a server is killed with SIGKILL, the server and its descendants end, too."""
    program = (
        "import os, select, sys; from pathlib import Path; from moriio_vllm.demo import process\n"
        f"process.GRACE_S = 0.2; p = process.Process('s', {STUBBORN!r}, os.environ, Path({str(tmp_path)!r}) / 'log')\n"
        "select.select([sys.stdin], [], [])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, env=environment)
    with parent, alive.open() as pipe:
        assert pipe.readline() == "up\n"
        parent.kill()
        assert wait_for_end(pipe)


def test_failed_server_shows_its_log(tmp_path):
    """The error of a server that ended has its name, its exit code and the last lines of its log."""
    process = Process("prefill", ["sh", "-c", "echo no such model; exit 3"], os.environ, tmp_path / "log")
    with pytest.raises(ServerError, match=r"(?s)prefill: ended with exit code 3 .*no such model"):
        wait_any_ended([process], DEADLINE_MS / 1000)
    end_all([process])


def test_stage_follows_the_log(tmp_path):
    """The stage told to the user is the latest one whose whole line has reached the log."""
    process = Process("decode", ["cat"], os.environ, tmp_path / "log", stage="starting")
    assert process.stage() == "starting"
    with process.log.open("a") as log:
        for text, stage in (
            ("INFO Starting to load model x\nLoading weights to", "loading weights"),
            ("ok 1 s\n", "making the KV cache"),
        ):
            log.write(text)
            log.flush()
            assert process.stage() == stage
    end_all([process])


def test_free_ports_are_consecutive_and_free():
    """The ports are consecutive, below the kernel's ephemeral ports, and can all be bound."""
    ports = free_ports(17)
    assert ports == list(range(ports[0], ports[0] + 17))
    assert ports[-1] < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_unpermute_undoes_llama_cpps_order():
    """Rows that llama.cpp interleaved for its rotary embedding come back in Hugging Face's order, head by head."""
    heads, head_size, hidden = 3, 8, 5
    rows = np.arange(heads * head_size * hidden, dtype=np.float32).reshape(heads * head_size, hidden)
    # The permutation as llama.cpp's converter writes it.
    permuted = rows.reshape(heads, 2, head_size // 2, hidden).swapaxes(1, 2).reshape(rows.shape)
    assert not np.array_equal(permuted, rows)
    np.testing.assert_array_equal(unpermute(permuted, heads), rows)


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.12.attn_q", "model.layers.12.self_attn.q_proj"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj"),
    ],
)
def test_names_of_tensors(stem, name):
    """llama.cpp's module names become Hugging Face's."""
    assert hugging_face_name(stem) == name


class Canned(BaseHTTPRequestHandler):
    """Answers every request with the status and body of the class made by ``serving``."""

    status, content = 200, b""

    def do_POST(self):
        """Answer."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self):
        """Answer."""
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_):
        """Keep quiet."""


@pytest.fixture
def serving():
    """A function from a status and a body to an endpoint that answers everything with them."""
    servers = []

    def start(status, content):
        handler = type("Handler", (Canned,), {"status": status, "content": content.encode()})
        server = HTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return Endpoint("127.0.0.1", server.server_port)

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def stream(*events):
    """The body of a stream of server-sent events."""
    return "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)


CHUNKS = (
    {"choices": [{"text": "Pa", "token_ids": [4], "finish_reason": None}]},
    {"choices": [{"text": "ris", "token_ids": [5, 6], "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 3}},
)


def test_stream_is_read_whole(serving):
    """Text, tokens, the reason of the end and the prompt's length come together from the events of a stream."""
    answer = serving(200, stream(*CHUNKS, "[DONE]")).ask(PROMPT)
    assert answer.same_as(Answer((4, 5, 6), "Paris", "length", 3, 0.0))
    assert answer.first_token_s > 0


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (503, "No eligible P/D pair", "a prompt: HTTP 503: No eligible P/D pair"),
        (200, stream(*CHUNKS), "without"),
        (200, stream(CHUNKS[0], {"error": {"message": "boom"}}, "[DONE]"), "boom"),
    ],
)
def test_bad_answers_are_errors(serving, status, content, message):
    """A status other than 200, a stream cut short and an error within a stream are refused with their text."""
    with pytest.raises(RequestError, match=message):
        serving(status, content).ask(PROMPT)


def test_metric_sums_the_samples_with_the_labels(serving):
    """A metric is summed over the samples that have the labels, and a missing one is an error."""
    text = '# HELP a_total x\na_total{e="0",s="x"} 2.0\na_total{e="1",s="x"} 3\na_total{e="0",s="y"} 9\nb 0.5\n'
    endpoint = serving(200, text)
    assert endpoint.metric("a_total", s="x") == 5
    assert endpoint.metric("b") == 0.5
    with pytest.raises(KeyError, match="a_total"):
        endpoint.metric("a_total", s="z")


def test_leaving_tells_whether_the_server_was_busy(serving):
    """A client that gives up before the end of an answer says so, and one that saw the end does not."""
    assert not serving(200, stream(*CHUNKS, "[DONE]")).ask_and_leave(PROMPT, DEADLINE_MS / 1000)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert Endpoint("127.0.0.1", silent.getsockname()[1]).ask_and_leave(PROMPT, 0.05)


def test_difference_of_one_token_is_a_mismatch():
    """An answer that differs in one token is shown with both answers, and the summary says MISMATCH."""
    good = Answer((1, 2), "ab", "stop", 3, 0.1)
    bad = Row(PROMPT, "write", Answer((1, 3), "ab", "stop", 3, 0.1), good)
    assert "NO" in bad.line()
    assert "[1, 3]" in bad.line()
    assert "[1, 2]" in bad.line()
    assert summary([bad, Row(PROMPT, "write", good, good)], {"write": 6}, 1.0).startswith("MISMATCH: 1 of 2")
