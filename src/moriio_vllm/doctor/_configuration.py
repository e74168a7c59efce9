"""The configuration that vLLM will be started with: valid, its ports free, its address the right one."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import TYPE_CHECKING

from moriio_vllm.doctor._report import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moriio_vllm.config import ConnectorConfig
    from moriio_vllm.doctor._host import Host
    from moriio_vllm.doctor._plan import Plan

__all__ = ["check", "default_host"]

_CONNECT_S = 2.0


def check(host: Host, plan: Plan) -> Iterator[Finding]:
    """Nothing where no configuration was given; a recorded host has no ports to try."""
    if plan.problem:
        yield Finding("configuration", Level.FAIL, plan.problem, "see the table of keys in README.md")
    if plan.config is None:
        return
    config = plan.config
    yield Finding("configuration", Level.OK, f"{config.role}, {config.mode.value}, backend {config.backend}")
    if not host.recorded:
        yield from _ports(config)
        yield from _address(config)
        yield from _router(config)


def _ports(config: ConnectorConfig) -> Iterator[Finding]:
    count = config.ranks.in_pod
    for key, first, last in (
        ("handshake_port", config.handshake_port, config.handshake_port + count - 1),
        ("notify_port", config.notify_port, config.notify_port + count - 1),
        ("http_port", config.http_port, config.http_port),
    ):
        taken = [f"{port} ({why})" for port in range(first, last + 1) if (why := _why_taken(port))]
        ports = f"{first}" if first == last else f"{first}..{last}"
        if taken:
            advice = f"stop who has them (ss -ltnp), or choose another {key}; one per rank is used, counting up"
            yield Finding(key, Level.FAIL, f"not free: {', '.join(taken)}", advice)
        else:
            yield Finding(key, Level.OK, f"{ports} free")


def _why_taken(port: int) -> str:
    try:
        with socket.create_server(("", port)):
            return ""
    except OSError as error:
        return "in use" if error.errno == errno.EADDRINUSE else str(error.strerror)


def _route_to(host: str, port: int) -> str:
    """The address of ours from which packets to another host leave; nothing is sent.

    Raises:
        OSError: there is no route, or the name does not resolve.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def default_host() -> str:
    """What vLLM takes where `host_ip` is not given: `VLLM_HOST_IP`, else the address of the default route."""
    given = os.environ.get("VLLM_HOST_IP")
    if given:
        return given
    try:
        return _route_to("8.8.8.8", 80)
    except OSError:
        return "127.0.0.1"


def _address(config: ConnectorConfig) -> Iterator[Finding]:
    """Peers and the router get this address: it must be ours, and the one that they reach."""
    try:
        own = {str(row[4][0]) for row in socket.getaddrinfo(config.host, None)}
        for address in own:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
    except OSError as error:
        yield Finding(
            "host address", Level.FAIL, f"{config.host} is no address of this machine ({error.strerror})",
            "set kv_connector_extra_config.host_ip, or VLLM_HOST_IP, to one (ip -brief address)",
        )  # fmt: skip
        return
    yield Finding("host address", Level.OK, f"{config.host} is ours")
    if config.proxy_ip is None:
        return
    try:
        route = _route_to(config.proxy_ip, config.proxy_ping_port or 1)
    except OSError as error:
        yield Finding(
            "route to router", Level.FAIL, f"{config.proxy_ip}: {error.strerror}", "check proxy_ip and routing"
        )
        return
    if route in own:
        yield Finding("route to router", Level.OK, f"{config.proxy_ip} is reached from {route}")
    else:
        local = all(ipaddress.ip_address(address).is_loopback for address in own)
        yield Finding(
            "route to router", Level.FAIL if local else Level.WARN,
            f"{config.proxy_ip} is reached from {route}, but {config.host} is announced",
            f"set host_ip to {route}, unless peers and router reach {config.host} another way",
        )  # fmt: skip


def _router(config: ConnectorConfig) -> Iterator[Finding]:
    if config.proxy_ip is None or config.proxy_ping_port is None:
        yield Finding("router", Level.NOTE, "no proxy_ip: this instance does not register")
        return
    where = f"{config.proxy_ip}:{config.proxy_ping_port}"
    try:
        socket.create_connection((config.proxy_ip, config.proxy_ping_port), _CONNECT_S).close()
    except OSError as error:
        yield Finding(
            "router", Level.WARN, f"{where}: {error}", "start the router; instances register when it is there"
        )
    else:
        yield Finding("router", Level.OK, f"{where} answers")
