"""The servers of the demo: one plain server, or prefill and decode behind the router, started and waited for."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moriio_vllm.demo.client import Endpoint
from moriio_vllm.demo.ports import free_ports
from moriio_vllm.demo.process import Process, end_all, wait_any_ended
from moriio_vllm.demo.prompts import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HOST = "127.0.0.1"
START_DEADLINE_S = 300.0
_HEALTH_INTERVAL_S = 0.25
_PROGRESS_EVERY_S = 15.0
PORTS_PER_RANGE = 8
"""How many ports from its base a server may use for handshakes, and as many for notifications."""

SERVER_ARGS = (
    "--dtype=float32",  # greedy answers in bfloat16 differ from run to run even on one server
    "--enforce-eager",
    "--max-model-len=2048",
    f"--block-size={BLOCK}",
    "--max-num-batched-tokens=512",  # long prompts are prefilled in chunks
    "--max-num-seqs=64",
)
# One compute thread a server: two servers share the machine, and a thread count that differs changes the order of sums.
SERVER_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": HOST,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

Progress = Callable[[str], None]
"""Takes one line that tells a waiting user what goes on."""


@dataclass(frozen=True)
class Connector:
    """Which KV connector the servers load.

    Attributes:
        module_path: the module that has it; None for the one built into vLLM.
        extra: keys of ``kv_connector_extra_config`` besides addresses, ports and the mode.
        env: environment variables its servers need.
        transfer: further keys of ``--kv-transfer-config`` itself, such as ``kv_load_failure_policy``.
    """

    name: str = "MoRIIOConnector"
    module_path: str | None = "moriio_vllm"
    extra: Mapping[str, Any] = field(default_factory=lambda: {"backend": "loopback"})
    env: Mapping[str, str] = field(default_factory=dict)
    transfer: Mapping[str, Any] = field(default_factory=dict)


OURS = Connector()


@dataclass(frozen=True)
class StackOptions:
    """What to start.

    Attributes:
        model: the directory of the model.
        logs: an existing directory for the servers' logs.
        mode: ``write`` or ``read``.
        prefill_args: further arguments of the prefill server; a later argument wins over ``SERVER_ARGS``.
        decode_args: the same for the decode server.
        connector: what the servers load; None for ours.
        decode_connector: what the decode server loads instead of that.
    """

    model: Path
    logs: Path
    mode: str = "write"
    prefill_args: Sequence[str] = ()
    decode_args: Sequence[str] = ()
    connector: Connector | None = None
    decode_connector: Connector | None = None

    def connector_of(self, role: str) -> Connector:
        """What the server of ``role`` (``kv_producer`` or ``kv_consumer``) loads."""
        own = self.decode_connector if role == "kv_consumer" else None
        return own or self.connector or OURS


@dataclass(frozen=True)
class Stack:
    """A running router with its two servers."""

    router: Endpoint
    prefill: Endpoint
    decode: Endpoint
    processes: Sequence[Process]

    def check(self) -> None:
        """Raise ServerError when one of the three has ended."""
        for process in self.processes:
            process.check()

    def tokens_received(self) -> int:
        """How many prompt tokens the decode server took from the prefill server instead of computing them."""
        return int(self.decode.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"))


def kv_transfer_config(options: StackOptions, role: str, ports: Mapping[str, int]) -> str:
    """Return the value of ``--kv-transfer-config`` for ``role`` (``kv_producer`` or ``kv_consumer``) as JSON."""
    connector = options.connector_of(role)
    config: dict[str, Any] = {
        "kv_connector": connector.name,
        "kv_role": role,
        **connector.transfer,
        "kv_connector_extra_config": {
            "proxy_ip": HOST,
            "proxy_ping_port": str(ports["registration"]),
            "http_port": str(ports["http"]),
            "handshake_port": str(ports["handshake"]),
            "notify_port": str(ports["notify"]),
            "read_mode": options.mode == "read",
            **connector.extra,
        },
    }
    if connector.module_path is not None:
        config["kv_connector_module_path"] = connector.module_path
    return json.dumps(config)


def _serve(name: str, options: StackOptions, port: int, args: Sequence[str], env: Mapping[str, str]) -> Process:
    command = [sys.executable, "-m", "moriio_vllm.demo.serve", "serve", str(options.model)]
    command += ["--served-model-name=model", f"--host={HOST}", f"--port={port}", *SERVER_ARGS, *args]
    return Process(name, command, {**os.environ, **SERVER_ENV, **env}, options.logs / f"{name}.log")


def _start_instance(name: str, options: StackOptions, registration: int) -> tuple[Process, Endpoint]:
    """Start one side of the pair; ``name`` is ``prefill`` or ``decode``."""
    first = free_ports(1 + 2 * PORTS_PER_RANGE)[0]
    ports = {
        "registration": registration,
        "http": first,
        "handshake": first + 1,
        "notify": first + 1 + PORTS_PER_RANGE,
    }
    producer = name == "prefill"
    role = "kv_producer" if producer else "kv_consumer"
    config = kv_transfer_config(options, role, ports)
    args = [f"--kv-transfer-config={config}", *(options.prefill_args if producer else options.decode_args)]
    process = _serve(name, options, ports["http"], args, options.connector_of(role).env)
    return process, Endpoint(HOST, ports["http"])


def _start_router(options: StackOptions, http: int, registration: int, metrics: int) -> Process:
    router = str(Path(sys.executable).with_name("vllm-router"))
    command = [router, f"--host={HOST}", f"--port={http}", f"--prometheus-port={metrics}"]
    command += ["--vllm-pd-disaggregation", "--kv-connector=moriio"]
    command += [f"--vllm-discovery-address={HOST}:{registration}", "--disable-retries", "--disable-circuit-breaker"]
    return Process("router", command, os.environ, options.logs / "router.log", "waiting for registrations")


@contextmanager
def single_server(options: StackOptions, progress: Progress) -> Iterator[Endpoint]:
    """Run one plain server without a connector; yields it ready and ends it on leaving.

    Raises:
        ServerError: it ended, or was not ready within ``START_DEADLINE_S``.
    """
    (port,) = free_ports(1)
    process = _serve("single", options, port, (), {})
    try:
        endpoint = Endpoint(HOST, port)
        wait_ready([(process, endpoint)], [process], progress)
        yield endpoint
    finally:
        end_all([process])


@contextmanager
def running_stack(options: StackOptions, progress: Progress) -> Iterator[Stack]:
    """Run the router, a prefill and a decode server; yields when both are registered and ends all on leaving.

    Raises:
        ServerError: one ended, or was not ready within ``START_DEADLINE_S``.
    """
    http, registration, metrics = free_ports(3)
    router = Endpoint(HOST, http)
    processes: list[Process] = []
    try:
        processes.append(_start_router(options, http, registration, metrics))
        endpoints = {}
        for name in ("prefill", "decode"):
            process, endpoints[name] = _start_instance(name, options, registration)
            processes.append(process)
        servers = list(zip(processes, (router, *endpoints.values()), strict=True))
        # The router's health says yes only when both kinds of server have registered: it comes last.
        wait_ready([*servers[1:], servers[0]], processes, progress)
        yield Stack(router, endpoints["prefill"], endpoints["decode"], processes)
    finally:
        end_all(processes)


def wait_ready(servers: Sequence[tuple[Process, Endpoint]], watched: Sequence[Process], progress: Progress) -> None:
    """Return when every server answers its health check, telling ``progress`` each stage on the way.

    Raises:
        ServerError: one of ``watched`` ended, or the deadline passed.
    """
    deadline = time.monotonic() + START_DEADLINE_S
    told: dict[str, tuple[str, float]] = {}
    waiting = list(servers)
    while waiting:
        wait_any_ended(watched, _HEALTH_INTERVAL_S)
        now = time.monotonic()
        for process, _ in waiting:
            _tell(process, told, now, progress)
        for process, endpoint in list(waiting):
            if not endpoint.healthy():
                break
            waiting.remove((process, endpoint))
            progress(f"{process.name}: ready after {now - process.started:.0f} s")
        if waiting and now > deadline:
            raise waiting[0][0].failure(f"not ready after {START_DEADLINE_S:.0f} s")


def _tell(process: Process, told: dict[str, tuple[str, float]], now: float, progress: Progress) -> None:
    """Report a stage that is new, or that has lasted long enough to be said again."""
    stage = process.stage()
    last_stage, last_time = told.get(process.name, ("", 0.0))
    if stage != last_stage or now - last_time > _PROGRESS_EVERY_S:
        told[process.name] = (stage, now)
        progress(f"{process.name}: {stage}, {now - process.started:.0f} s")
