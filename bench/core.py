"""What the protocol costs: one core step, all control work of one transfer, and both with many transfers alive.

    python bench/core.py [--json] [--transfers N]

Two whole nodes in one thread: real cores and drivers, real frames, no socket; a transport that moves nothing and
completes at once.  Times are medians over transfers, per side:

- control: decode, core, encode and bookkeeping of a transfer whose 30 layers are posted at once,
- posting: planning of its runs and the call of the transport,
- layerwise: what is added to control, and to posting, when WRITE posts each of the 30 layers by itself.

A machine that does other things, too, is as slow as its reference, a loop of dict look-ups and method calls timed all
through the run: so every time is given in references, as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import attrs

from moriio_proto.core import Core, CoreConfig, Role
from moriio_proto.events import Endpoint, Finish, Load, Progress, StartOffer
from moriio_proto.testing.transcript import small_geometry
from moriio_proto.wire.codec import encode_hello
from moriio_proto.wire.messages import CAPABILITIES, Hello, HelloExtension, LayerDescriptors, Mode
from moriio_transport.base import Capabilities, Completed, Connected, Description, Outcome, Session
from moriio_transport.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYERS, BLOCKS = 30, 64
LIVE = (10, 100, 1_000, 10_000)
STEP_US, TRANSFER_US, FLAT = 5.0, 200.0, 1.5  # what must hold; FLAT: most over fewest live transfers
clock = time.perf_counter_ns


class NullTransport:
    """Moves nothing; every post is done at the next poll."""

    capabilities = Capabilities("null", frozenset({"cpu"}), same_host_only=True)

    def __init__(self) -> None:
        self.events: list[Any] = []

    def connect(self, peer: Description) -> Session:
        """At once."""
        session = Session(1)
        self.events.append(Connected(session))
        return session

    def post(self, token: int, session: Session, direction: Any, plan: Any, not_after: float) -> None:
        """Done at the next poll."""
        self.events.append(Completed(token, Outcome.DONE, 0))

    def poll(self) -> list[Any]:
        """What is done."""
        events, self.events = self.events, []
        return events


@attrs.define(eq=False)
class Side:
    """One node; its driver's calls are timed, and within them its posts and its core's steps."""

    name: str
    endpoint: Endpoint
    hello: tuple[bytes, bytes]
    driver: Driver
    transport: NullTransport
    queue: deque[tuple[str, tuple[Any, ...]]] = attrs.field(factory=deque)
    busy_ns: int = 0
    post_ns: int = 0
    steps_ns: list[int] = attrs.field(factory=list)
    settled: int = 0


class Wire:
    """The control channel of one side: frames go into the other's queue."""

    def __init__(self) -> None:
        self.other: Side
        self.own: Side

    def dial(self, endpoint: Endpoint) -> None:
        """The other side answers with its hello."""
        self.own.queue.append(("on_hello", (endpoint, *self.other.hello)))

    def forget(self, endpoint: Endpoint) -> None:
        """Nothing to close."""

    def send(self, endpoint: Endpoint, frame: bytes) -> None:
        """Into the other side's queue."""
        self.other.queue.append(("on_notify", (frame, "back")))

    def reply(self, route: object, frame: bytes) -> None:
        """Into the other side's queue."""
        self.other.queue.append(("on_notify", (frame, "back")))


def timed(side: Side, call: Callable[..., Any], into: str) -> Callable[..., Any]:
    """`call`, its time added to a field of `side`."""

    def run(*args: Any) -> Any:
        begin = clock()
        try:
            return call(*args)
        finally:
            took = clock() - begin
            if into == "steps_ns":
                side.steps_ns.append(took)
            else:
                setattr(side, into, getattr(side, into) + took)

    return run


def make_side(name: str, role: Role, mode: Mode) -> tuple[Side, Wire]:
    geometry = small_geometry(layers=LAYERS, blocks=40_960, block_bytes=64)
    core = Core(CoreConfig(role, mode, name, geometry))
    wire, transport = Wire(), NullTransport()
    driver = Driver(core, transport, wire, geometry)  # type: ignore[arg-type]
    extension = HelloExtension(
        token=name, global_dp_rank=0, tp_rank=0, dp_size=1, dp_size_local=1, tp_size=1, capabilities=CAPABILITIES,
        notify_port=61005, transport="null", regions=(b"r",), geometry=geometry,
    )  # fmt: skip
    hello = encode_hello(Hello("e", name.encode(), (0,), 64, 64, "bench", extension), LayerDescriptors({}))
    side = Side(name, Endpoint(name.lower(), 6301, 61005), hello, driver, transport)
    return side, wire


class World:
    """Both nodes, and the time that they are told."""

    def __init__(self, mode: Mode) -> None:
        self.mode, self.now, self.count = mode, 1.0, 0
        (self.p, p_wire), (self.d, d_wire) = make_side("P", Role.PREFILL, mode), make_side("D", Role.DECODE, mode)
        p_wire.own = d_wire.other = self.p
        d_wire.own = p_wire.other = self.d

    def measure(self, *, steps: bool) -> None:
        """Time steps of the core, or calls of the driver and its posts; one run times one of them."""
        for side in (self.p, self.d):
            if steps:
                side.driver.core.receive = timed(side, side.driver.core.receive, "steps_ns")  # type: ignore[method-assign]
            else:
                side.driver._carriers = {
                    kind: timed(side, carry, "post_ns") if kind.__name__ == "Post" else carry
                    for kind, carry in side.driver._carriers.items()
                }

    def call(self, side: Side, name: str, *args: Any) -> None:
        """One timed call of a driver."""
        begin = clock()
        getattr(side.driver, name)(*args, self.now)
        side.busy_ns += clock() - begin

    def run(self) -> None:
        """Deliver all frames and completions."""
        busy = True
        while busy:
            busy = False
            for side in (self.p, self.d):
                if side.transport.events:
                    self.call(side, "on_transport")
                    busy = True
                while side.queue:
                    name, args = side.queue.popleft()
                    self.call(side, name, *args)
                    busy = True

    def begin(self, name: str) -> None:
        """D wants a transfer that P computes."""
        ids = list(range(BLOCKS))
        self.call(self.p, "on_commands", [StartOffer(name, name, (self.d.endpoint,), BLOCKS)])
        self.call(self.d, "on_commands", [Load(name, name, self.p.endpoint, ids, 0, ids)])
        self.run()

    def transfer(self, posts: int = LAYERS) -> None:
        """One transfer from its first word to its last, its layers in so many posts."""
        self.count += 1
        name, ids = f"transfer-{self.count}", list(range(BLOCKS))
        self.now += 0.001
        self.begin(name)
        if self.mode is Mode.WRITE:
            for layers in range(LAYERS // posts, LAYERS + 1, LAYERS // posts):
                self.call(self.p, "on_commands", [Progress(name, 0, BLOCKS, layers, ids)])
                self.run()
        self.call(self.p, "on_commands", [Finish(name)])
        self.run()
        for side in (self.p, self.d):
            side.settled += len(side.driver.settled)
            side.driver.settled.clear()
            deadline = side.driver.core.next_deadline()
            if deadline is not None and deadline <= self.now:
                self.call(side, "tick")
        self.run()


class Reference:
    """A loop of what such code is made of: a dict look-up, a method call, an attribute, an append."""

    def __init__(self) -> None:
        self.table = {i: str(i) for i in range(64)}
        self.state = ""
        self.out: list[str] = []

    def step(self, key: int) -> None:
        """One round of the loop."""
        self.state = self.table[key & 63]
        self.out.append(self.state)

    def us(self) -> float:
        """Time of 20 rounds, in microseconds: the unit of all ratios."""
        begin = clock()
        for i in range(2_000):
            self.step(i)
        self.out.clear()
        return (clock() - begin) / 1e3 / 100


def percentiles(values: list[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile."""
    cuts = statistics.quantiles(values, n=100)
    return {"median": round(cuts[49], 3), "p90": round(cuts[89], 3), "p99": round(cuts[98], 3)}


def core_steps(mode: Mode, transfers: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Microseconds of `Core.receive` on both sides, and of one row of a table with all that belongs to it."""
    world = World(mode)
    for _ in range(20):
        world.transfer()
    rows = {side.name: count_rows(side) for side in (world.p, world.d)}
    world.transfer()
    world.p.driver.core._trace = world.d.driver.core._trace = None
    world.measure(steps=True)
    sums: dict[str, list[float]] = {"P": [], "D": []}
    for _ in range(transfers):
        before = {side.name: len(side.steps_ns) for side in (world.p, world.d)}
        world.transfer()
        for side in (world.p, world.d):
            sums[side.name].append(sum(side.steps_ns[before[side.name] :]) / 1e3)
    for side in (world.p, world.d):
        taken = len(rows[side.name])
        times = percentiles([ns / 1e3 for ns in side.steps_ns])
        row_us = statistics.median(sums[side.name]) / taken
        yield side.name, {"row": round(row_us, 3), **times, "events": len(side.steps_ns) / transfers, "rows": taken}


def count_rows(side: Side) -> list[str]:
    """The triggers of all rows that a side takes from now on."""
    taken: list[str] = []
    side.driver.core._trace = lambda _m, _i, _s, trigger, _d, _t: taken.append(trigger)
    return taken


def control_work(mode: Mode, transfers: int, reference: Reference) -> dict[int, dict[str, Any]]:
    """Microseconds of one transfer on both sides, by how many others are alive; all take turns, so noise hits all."""
    worlds = {live: World(mode) for live in LIVE}
    for live, world in worlds.items():
        for i in range(live):
            world.begin(f"live-{i}")
        for _ in range(20):
            world.transfer()
        world.measure(steps=False)
    samples: dict[int, dict[str, list[float]]] = {live: {} for live in LIVE}
    for _ in range(transfers):
        for live, world in worlds.items():
            one_transfer(world, mode, samples[live])
            samples[live].setdefault("reference", []).append(reference.us())
    assert all(w.p.settled == w.d.settled == w.count for w in worlds.values()), "every transfer is over on both sides"
    return {live: summary(mode, by_name) for live, by_name in samples.items()}


def one_transfer(world: World, mode: Mode, samples: dict[str, list[float]]) -> None:
    """One transfer with one post, and in WRITE one with a post per layer."""
    for posts in (1, LAYERS) if mode is Mode.WRITE else (1,):
        for side in (world.p, world.d):
            side.busy_ns = side.post_ns = 0
        world.transfer(posts)
        for side in (world.p, world.d):
            for kind, ns in (("control", side.busy_ns - side.post_ns), ("posting", side.post_ns)):
                samples.setdefault(f"{side.name} {kind} {posts}", []).append(ns / 1e3)


def summary(mode: Mode, samples: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, in microseconds and in references."""
    median = {name: statistics.median(values) for name, values in samples.items()}
    out = {f"{side} {kind}": median[f"{side} {kind} 1"] for side in "PD" for kind in ("control", "posting")}
    if mode is Mode.WRITE:
        for kind in ("control", "posting"):
            out[f"P layerwise {kind}"] = median[f"P {kind} {LAYERS}"] - median[f"P {kind} 1"]
    unit = median["reference"]
    return {
        **{name: round(value, 1) for name, value in out.items()}, "reference_us": round(unit, 3),
        "in_references": {name: round(value / unit, 1) for name, value in out.items()},
    }  # fmt: skip


def measure(transfers: int) -> dict[str, Any]:
    """All numbers, and whether what must hold does."""
    gc.disable()  # as the collector's pauses belong to whoever made the garbage
    reference = Reference()
    result: dict[str, Any] = {"layers": LAYERS, "blocks": BLOCKS, "transfers": transfers}
    result["step_us"] = {f"{mode.name} {name}": times for mode in Mode for name, times in core_steps(mode, transfers)}
    result["transfer_us"] = {mode.name: control_work(mode, transfers, reference) for mode in Mode}
    steps = {mode: [result["step_us"][f"{mode.name} {name}"] for name in "PD"] for mode in Mode}
    worst_step = max(
        round(sum(side["row"] * side["rows"] for side in sides) / sum(side["rows"] for side in sides), 3)
        for sides in steps.values()
    )
    rows = [row for by_live in result["transfer_us"].values() for row in by_live.values()]
    worst_transfer = max(row[f"{side} control"] for row in rows for side in "PD")
    growth = max(
        by_live[LIVE[-1]]["in_references"][f"{side} control"] / by_live[LIVE[0]]["in_references"][f"{side} control"]
        for by_live in result["transfer_us"].values() for side in "PD"
    )  # fmt: skip
    result["checks"] = {
        f"a core step (one row, mean of both sides) takes at most {STEP_US} us": [worst_step, worst_step <= STEP_US],
        f"control work of a transfer takes at most {TRANSFER_US} us": [worst_transfer, worst_transfer <= TRANSFER_US],
        f"10,000 live transfers cost at most {FLAT} times as much as 10": [round(growth, 2), growth <= FLAT],
    }
    return result


def show(result: dict[str, Any]) -> None:
    """Tables for people."""
    print("core, us: per row; per event median, p90, p99; events and rows of a transfer")
    for name, times in result["step_us"].items():
        print(f"  {name:<10}", *(f"{value:>9}" for value in times.values()))
    print(f"one transfer of {LAYERS} layers, us (in references)")
    for mode, by_live in result["transfer_us"].items():
        for live, row in by_live.items():
            shown = "  ".join(f"{k} {row[k]} ({v})" for k, v in row["in_references"].items() if v)
            print(f"  {mode:<6}{live:>7} live  {shown}")
    for what, (value, holds) in result["checks"].items():
        print(f"{'ok  ' if holds else 'MISS'} {what}: {value}")


def main() -> None:
    """Measure and print; exit 1 when something that must hold does not."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--transfers", type=int, default=300, help="of each measurement")
    given = parser.parse_args()
    result = measure(given.transfers)
    if given.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    raise SystemExit(0 if all(holds for _, holds in result["checks"].values()) else 1)


if __name__ == "__main__":
    main()
