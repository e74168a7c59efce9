"""The registration process against a real ROUTER and real handshake listeners."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import zmq
import zmq.utils.monitor

import moriio_vllm._registrar_main as registrar_main
from moriio_proto.errors import ParameterError
from moriio_proto.wire.messages import GET_META
from moriio_vllm.registrar import Registrar

PATIENCE = 10_000  # ms; how long a test waits for what must come before it fails
SOURCE = str(Path(registrar_main.__file__).resolve().parents[1])

# What the connector built into vLLM 0.32 sent to a real router.
PING = bytes.fromhex(
    "86a474797065a150ac687474705f61646472657373af3132372e302e302e313a3231303035ab7a6d715f61646472657373d929"
    "686f73743a3132372e302e302e312c68616e647368616b653a373330312c6e6f746966793a37343031a764705f73697a6501"
    "a774705f73697a6501ad7472616e736665725f6d6f6465a55752495445"
)


class Net:
    """A ZeroMQ context that keeps hold of its sockets until the test is over."""

    def __init__(self):
        self.context, self.sockets = zmq.Context(), []

    def socket(self, kind):
        self.sockets.append(self.context.socket(kind))
        return self.sockets[-1]

    def bind(self, port=0):
        """A ROUTER and its port."""
        sock = self.socket(zmq.ROUTER)
        sock.bind(f"tcp://127.0.0.1:{port or '*'}")
        return sock, int(sock.getsockopt(zmq.LAST_ENDPOINT).rsplit(b":", 1)[1])

    def close(self):
        """Close all; when this returns, the ports are free."""
        for sock in self.sockets:
            sock.close(0)
        self.context.term()


@pytest.fixture
def net():
    """Sockets that do not outlive the test."""
    with contextlib.closing(Net()) as net:
        yield net


@pytest.fixture
def children():
    """Close what the test puts here."""
    with contextlib.ExitStack() as stack:
        yield stack


def receive(sock):
    """The next message, which must come."""
    assert sock.poll(PATIENCE), "nothing came"
    return sock.recv_multipart()


def answer(rank_socket):
    """One handshake, as a rank's listener does it; returns the request."""
    identity, request = receive(rank_socket)
    rank_socket.send_multipart([identity, b"", b"metadata"])
    rank_socket.send_multipart([identity, b"", b"regions"])
    return request


def start(children, router_port, rank_ports, interval=0.05, **more):
    """A registrar that the test ends."""
    registrar = Registrar.start(
        router=("127.0.0.1", router_port),
        ping=PING,
        ranks=[("127.0.0.1", port) for port in rank_ports],
        ping_interval=interval,
        **more,
    )
    children.callback(registrar.close)
    return registrar


def pidfd_ready(pid_fd):
    """Whether the process ends."""
    poller = select.poll()
    poller.register(pid_fd, select.POLLIN)
    return bool(poller.poll(PATIENCE))


def test_ping_is_the_bytes_given_and_comes_again(net, children):
    """The router sees exactly the recorded heartbeat, from one connection, again and again."""
    router, router_port = net.bind()
    rank, rank_port = net.bind()
    start(children, router_port, [rank_port])
    assert answer(rank) == b"get_meta_msg"
    first, *others = [receive(router) for _ in range(4)]
    assert first[1:] == [PING]
    assert others == [first] * 3


def test_no_ping_before_every_rank_answered(net, children, capfd):
    """A silent rank keeps the router from hearing of the instance, and the log names it; its answer frees the ping."""
    router, router_port = net.bind()
    ranks = [net.bind() for _ in range(3)]
    start(children, router_port, [port for _, port in ranks], probe_interval=0.1)
    answer(ranks[2][0])
    answer(ranks[0][0])
    for _ in range(3):  # the silent rank is asked again and again, on connections of its own
        receive(ranks[1][0])
    assert not router.poll(0)
    assert f"no handshake answer from tcp://127.0.0.1:{ranks[1][1]}" in capfd.readouterr().err
    answer(ranks[1][0])
    assert receive(router)[1:] == [PING]
    assert not ranks[0][0].poll(0)


def test_answer_that_is_no_handshake_does_not_count(net, children):
    """Something else that listens on a rank's port is asked again, not taken for the rank."""
    router, router_port = net.bind()
    rank, rank_port = net.bind()
    start(children, router_port, [rank_port], probe_interval=0.1)
    identity, _ = receive(rank)
    rank.send_multipart([identity, b"who are you?"])
    identity, _ = receive(rank)
    assert not router.poll(0)
    rank.send_multipart([identity, b"", b"metadata"])
    assert receive(router)[1:] == [PING]


def test_w_router_restart_registers_again_each_time(net, children):
    """W-ROUTER-RESTART: a router that starts last, and one that is restarted ten times, each hear the instance."""
    with contextlib.closing(Net()) as reserved:
        _, router_port = reserved.bind()
    rank, rank_port = net.bind()
    registrar = start(children, router_port, [rank_port])
    answer(rank)
    for _ in range(11):
        with contextlib.closing(Net()) as restarted:
            router, _ = restarted.bind(router_port)
            assert receive(router)[1:] == [PING]
    assert registrar.alive


def worker(children, script, *arguments):
    """A process that plays the worker; its standard error is that of its registrar too."""
    source = textwrap.dedent(script)
    process = subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    children.callback(process.wait)
    children.callback(process.kill)
    for pipe in (process.stdin, process.stdout, process.stderr):
        children.callback(pipe.close)
    return process


def read_until(pipe, pattern):
    """The first line that matches; the pipe's end is a failure."""
    for line in pipe:
        if re.search(pattern, line.decode()):
            return line.decode()
    raise AssertionError(f"no line with {pattern!r}")


START = """
import sys
from moriio_proto.errors import ParameterError
from moriio_proto.wire.messages import GET_META
from moriio_vllm.registrar import Registrar
registrar = Registrar.start(router=("127.0.0.1", int(sys.argv[1])), ping=bytes.fromhex(sys.argv[3]),
    ranks=[("127.0.0.1", int(sys.argv[2]))], ping_interval=0.05, forget_after=2.0)
print(registrar.pid, flush=True)
"""


def test_no_stale_ping_after_an_outage(net, children):
    """Pings that fell into an outage are gone: a router that comes back to a draining instance hears nothing."""
    rank, rank_port = net.bind()
    first = Net()
    children.callback(first.close)
    router, router_port = first.bind()
    script = START + "\nsys.stdin.readline(); registrar.drain(); print(registrar.wait(20), flush=True)"
    process = worker(children, script, router_port, rank_port, PING.hex())
    answer(rank)
    receive(router)
    first.close()
    assert str(router_port) in read_until(process.stderr, "no connection to router")
    process.stdin.write(b"\n")
    process.stdin.flush()
    read_until(process.stderr, "draining")

    router = net.socket(zmq.ROUTER)
    monitor = router.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    net.sockets.append(monitor)
    router.bind(f"tcp://127.0.0.1:{router_port}")
    assert monitor.poll(PATIENCE), "the registrar did not connect again"
    zmq.utils.monitor.recv_monitor_message(monitor)
    assert read_until(process.stdout, r"^\d+$")  # its process id
    assert read_until(process.stdout, r"^-?\d+$") == "0\n"
    marker = net.socket(zmq.DEALER)
    marker.connect(f"tcp://127.0.0.1:{router_port}")
    marker.send(b"marker")
    assert receive(router)[1:] == [b"marker"]


def test_pings_while_the_worker_holds_the_interpreter_lock(net, children):
    """A worker stuck in native code without releasing the lock is still registered."""
    router, router_port = net.bind()
    rank, rank_port = net.bind()
    # PyDLL keeps the lock during the call: no Python code of the worker runs until the test writes a byte.
    script = START + "\nimport ctypes; ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1); print('free')"
    process = worker(children, script, router_port, rank_port, PING.hex())
    answer(rank)
    read_until(process.stdout, r"^\d+$")
    for _ in range(20):
        assert receive(router)[1:] == [PING]
    assert not select.select([process.stdout], [], [], 0)[0]
    process.stdin.write(b"x")
    process.stdin.flush()
    assert read_until(process.stdout, "free")


@pytest.mark.parametrize("pinging", [False, True])
def test_ends_when_the_worker_is_killed(net, children, pinging):
    """SIGKILL of the worker ends the child, though a fork of the worker keeps its standard input open."""
    router, router_port = net.bind()
    rank, rank_port = net.bind()
    fork = "\nimport os\nif os.fork() == 0: os.read(0, 1); os._exit(0)\nprint('forked', flush=True); os.read(0, 1)"
    process = worker(children, START + fork, router_port, rank_port, PING.hex())
    pid_fd = os.pidfd_open(int(read_until(process.stdout, r"^\d+$")))
    children.callback(os.close, pid_fd)
    read_until(process.stdout, "forked")
    if pinging:
        answer(rank)
        receive(router)
    else:
        receive(rank)
    process.send_signal(signal.SIGKILL)
    assert pidfd_ready(pid_fd), "the registrar outlived its worker"


def test_close_ends_the_child_with_zero_and_twice_is_once(net, children):
    """`close` is idempotent and works at any time, also while nobody listens anywhere."""
    registrar = start(children, 9, [9])
    assert registrar.alive
    assert registrar.returncode is None
    registrar.close()
    registrar.close()
    registrar.drain()
    assert not registrar.alive
    assert registrar.returncode == 0


def test_drain_ends_the_child_when_the_router_has_forgotten(net, children):
    """After `drain` the child leaves by itself, with 0."""
    router, router_port = net.bind()
    rank, rank_port = net.bind()
    registrar = start(children, router_port, [rank_port], forget_after=0.1)
    answer(rank)
    receive(router)
    registrar.drain()
    assert registrar.wait(20) == 0


def test_child_that_was_killed_is_seen(net, children):
    """A child that ended unasked shows as not alive, with its signal; commands to it are harmless."""
    registrar = start(children, 9, [9])
    os.kill(registrar.pid, signal.SIGKILL)
    assert registrar.wait(20) == -signal.SIGKILL
    registrar.drain()
    assert not registrar.alive


def test_address_that_is_none_is_refused_before_a_process_starts(children):
    """The error names the value."""
    with pytest.raises(ParameterError, match="not a host"):
        Registrar.start(router=("not a host", 1), ping=PING, ranks=[("127.0.0.1", 9)], ping_interval=1.0)


def test_child_needs_neither_torch_nor_vllm():
    """The child starts with few imports: no torch, no vLLM, no numpy."""
    code = "import sys, moriio_vllm._registrar_main; print(*sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == ""


def test_asks_ranks_as_every_peer_does():
    """The probe is the wire's handshake request."""
    assert registrar_main.GET_META == GET_META
