"""Whole nodes without vLLM: a core, a driver, real ZeroMQ ports, a real transport, and memory to look at."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
import numpy as np

from moriio_proto.core import Core, CoreConfig, Role, Timing
from moriio_proto.effects import Settled
from moriio_proto.events import Endpoint, Event
from moriio_proto.geometry import CacheGeometry
from moriio_proto.testing.transcript import small_geometry
from moriio_proto.wire.codec import encode_hello
from moriio_proto.wire.messages import CAPABILITIES, Hello, HelloExtension, LayerDescriptors, Mode
from moriio_transport.base import Region, Transport
from moriio_transport.control import ZmqControl
from moriio_transport.driver import Driver
from moriio_transport.reactor import Reactor
from moriio_transport.registry import load_transport

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, each different."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@attrs.define(eq=False)
class Node:
    """One rank of one instance."""

    core: Core
    driver: Driver
    reactor: Reactor
    control: ZmqControl
    endpoint: Endpoint
    geometry: CacheGeometry
    memory: np.ndarray  # uint8, one region
    settled: list[Settled] = attrs.field(factory=list)

    def tell(self, *events: Event) -> None:
        """Commands of the worker half."""
        self.reactor.submit(events)

    def blocks(self, ids: Sequence[int]) -> np.ndarray:
        """Bytes of blocks, shape [layers, blocks, bytes]."""
        layers = len(self.geometry.layers)
        return self.memory.reshape(layers, self.geometry.num_blocks, -1)[:, list(ids)]

    def wait_settled(self, count: int, timeout: float = 20.0) -> dict[str, str]:
        """Verdict by owner, once `count` are in."""

        def enough() -> bool:
            self.settled += self.reactor.take_settled()
            return len(self.settled) >= count

        eventually(enough, timeout)
        return {s.owner: s.verdict for s in self.settled}


def eventually(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Wait for a condition with a bound that only a failure reaches."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)  # noqa: TID251 - a test may look again; what it waits for is driven by events


def make_node(
    role: Role, mode: Mode, *, token: str, ports: tuple[int, int], geometry: CacheGeometry | None = None,
    tp_size: int = 1, timing: Timing | None = None, wrap: Callable[[Transport], Transport] = lambda t: t,
    backend: str = "loopback", options: Mapping[str, object] | None = None,
) -> Node:  # fmt: skip
    """A node that is not started yet."""
    geometry = geometry or small_geometry(blocks=256, block_bytes=1024)
    memory = np.random.default_rng(hash(token) % 2**32).integers(0, 256, geometry.region_bytes[0], np.uint8)
    plugin = load_transport(backend)
    transport = wrap(plugin.create(engine_key=f"{token}-0-0", host=HOST, options=options or dict(plugin.options)))
    transport.register([Region(memory.ctypes.data, memory.nbytes)])
    own = transport.describe()
    endpoint = Endpoint(HOST, *ports)
    extension = HelloExtension(
        token=token, global_dp_rank=0, tp_rank=0, dp_size=1, dp_size_local=1, tp_size=tp_size,
        capabilities=CAPABILITIES, notify_port=ports[1], transport=backend, regions=own.regions, geometry=geometry,
        transfer_mode=mode.value,
    )  # fmt: skip
    base = tuple(memory.ctypes.data + layer.pieces[0].offset for layer in geometry.layers)
    hello = Hello(f"{HOST}:{ports[0]}", own.engine, base, geometry.num_blocks, 1024, "test", extension)
    control = ZmqControl(
        bind_host=HOST, handshake_port=ports[0], notify_port=ports[1], token=token,
        hello=encode_hello(hello, LayerDescriptors({layer.name: [own.regions[0]] for layer in geometry.layers})),
    )  # fmt: skip
    core = Core(CoreConfig(role, mode, token, geometry, timing=timing or Timing()))
    driver = Driver(core, transport, control, geometry)
    return Node(core, driver, Reactor(driver, control), control, endpoint, geometry, memory)


@contextmanager
def pair(mode: Mode, **more: object) -> Iterator[tuple[Node, Node]]:
    """A prefill and a decode node, running."""
    a, b, c, d = free_ports(4)
    nodes = (
        make_node(Role.PREFILL, mode, token="P1", ports=(a, b), **more),  # type: ignore[arg-type]
        make_node(Role.DECODE, mode, token="D1", ports=(c, d), **more),  # type: ignore[arg-type]
    )
    try:
        for node in nodes:
            node.reactor.start()
        yield nodes
    finally:
        for node in nodes:
            node.reactor.close()
