"""Loopback between two processes, against a one-thread memcpy in C and against NIXL, in one run.

    python bench/transport.py [--json] [--rounds N]

Every contender copies the same scattered blocks between buffers of its own, registered through its own API, and is
timed from post to completion seen.  Contenders take turns within each round, in random order, and every ratio is
the median of the ratios per round, so that what else the machine does hits all of them.  NIXL (UCX backend, progress
thread off) reposts a handle that is prepared once, its best case; loopback resolves the plan anew each time.
Memory: six pairs of buffers of 256 MiB.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import json
import logging
import mmap
import multiprocessing
import os
import random
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from moriio_proto.geometry import TransferPlan
from moriio_transport.base import Completed, Connected, Description, Direction, Outcome, Region
from moriio_transport.loopback import LoopbackTransport
from moriio_transport.loopback import _libc as libc

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

BUFFER_BYTES = 256 << 20
HUGE_BYTES = 2 << 20
KIB = 1 << 10

C_SOURCE = """
#include <stddef.h>
#include <string.h>
void copy_blocks(char *to, const char *from, const size_t *to_at, const size_t *from_at, size_t n, size_t nbytes) {
    for (size_t i = 0; i < n; i++) memcpy(to + to_at[i], from + from_at[i], nbytes);
}
"""


@attrs.frozen
class Case:
    """So many blocks of so many bytes, at random places of the buffers."""

    blocks: int
    block_bytes: int
    repeats: int  # transfers per turn; the turn's time is their median

    @property
    def name(self) -> str:
        """Blocks x size."""
        return f"{self.blocks}x{self.block_bytes // KIB}KiB"

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return self.blocks * self.block_bytes

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Byte offsets of the blocks on both sides, uint64 [blocks] each."""
        rng = np.random.default_rng(7)
        slots = BUFFER_BYTES // self.block_bytes
        local, remote = (rng.permutation(slots)[: self.blocks] * self.block_bytes for _ in range(2))
        return local.astype(np.uint64), remote.astype(np.uint64)


CASES = (Case(64, 9 * KIB, 41), Case(512, 16 * KIB, 9), Case(4096, 64 * KIB, 1))


class Buffer:
    """`BUFFER_BYTES` of touched anonymous memory at a multiple of 2 MiB, in pages of 4 KiB unless `huge`."""

    def __init__(self, *, huge: bool = False) -> None:
        self._map = mmap.mmap(-1, BUFFER_BYTES + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = np.frombuffer(self._map, np.uint8).ctypes.data
        self.address = -(-start // HUGE_BYTES) * HUGE_BYTES
        self.bytes = np.frombuffer(self._map, np.uint8)[self.address - start :][:BUFFER_BYTES]
        if huge:
            libc.madvise(self.address, BUFFER_BYTES, libc.MADV_HUGEPAGE)
        self.bytes[:] = 0
        if huge:
            libc.madvise(self.address, BUFFER_BYTES, libc.MADV_COLLAPSE)


# --- the process that owns the remote memory -------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Make remote ends as told, show their bytes, stop at None."""
    ends = []
    while (order := pipe.recv()) is not None:
        kind, argument = order
        if kind == "loopback":
            buffer, transport = Buffer(), LoopbackTransport()
            transport.register([Region(buffer.address, BUFFER_BYTES)])
            transport.wait_warm()
            ends.append((buffer, transport))
            pipe.send(transport.describe())
        elif kind == "nixl":
            buffer = Buffer(huge=argument)
            agent = make_agent(f"target-{len(ends)}", buffer)
            ends.append((buffer, agent))
            pipe.send((agent.get_agent_metadata(), buffer.address))
            while not pipe.poll(0):  # UCX connects only while both sides call it
                agent.get_new_notifs()
        elif kind == "show":
            end, offset, nbytes = argument
            pipe.send(ends[end][0].bytes[offset : offset + nbytes].tobytes())


# --- contenders: each is a function that copies a case once ----------------------------------------------------


class Loopback:
    """Our transport."""

    def __init__(self, pipe: Connection, num_workers: int) -> None:
        self.name = f"loopback, {num_workers} thread{'s' * (num_workers > 1)}"
        self.buffer = Buffer()
        self.transport = LoopbackTransport(num_workers=num_workers)
        self.transport.register([Region(self.buffer.address, BUFFER_BYTES)])
        self.transport.wait_warm()
        pipe.send(("loopback", None))
        description: Description = pipe.recv()
        self.session = self.transport.connect(description)
        self.ready = select.poll()
        self.ready.register(self.transport.fileno(), select.POLLIN)
        (connected,) = self.transport.poll()
        assert connected == Connected(self.session), connected

    def prepare(self, case: Case) -> Callable[[], None]:
        """A function that copies the case once and returns when its end was seen."""
        region = np.zeros(case.blocks, np.int32)
        local, remote = case.places()
        plan = TransferPlan(region, local, region, remote, np.full(case.blocks, case.block_bytes, np.uint64))

        def copy() -> None:
            self.transport.post(1, self.session, Direction.WRITE, plan, time.monotonic() + 60)
            while not (events := self.transport.poll()):
                self.ready.poll()
            assert events == [Completed(1, Outcome.DONE, case.nbytes)], events

        return copy


def make_agent(name: str, buffer: Buffer) -> object:
    logging.disable(logging.INFO)  # it logs to standard output
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(buffer.address, BUFFER_BYTES, 0, "")], "DRAM")
    return agent


class Nixl:
    """NIXL's UCX backend without its progress thread."""

    def __init__(self, pipe: Connection, *, huge: bool) -> None:
        self.name = "NIXL, huge pages" if huge else "NIXL"
        self.buffer = Buffer(huge=huge)
        self.agent = make_agent(f"initiator-{huge}", self.buffer)
        pipe.send(("nixl", huge))
        metadata, self.remote_address = pipe.recv()
        self.peer = self.agent.add_remote_agent(metadata)
        self.prepare(CASES[0])()

    def prepare(self, case: Case) -> Callable[[], None]:
        """A function that copies the case once and returns when its end was seen."""
        agent = self.agent
        sides = []
        for peer, base, places in zip(
            ("NIXL_INIT_AGENT", self.peer), (self.buffer.address, self.remote_address), case.places(), strict=True
        ):
            rows = [(base + at, case.block_bytes, 0) for at in places.tolist()]
            sides.append(agent.prep_xfer_dlist(peer, rows, "DRAM"))
        indices = list(range(case.blocks))
        handle = agent.make_prepped_xfer("WRITE", sides[0], indices, sides[1], indices)

        def copy() -> None:
            state = agent.transfer(handle)
            while state != "DONE":
                assert state == "PROC", state
                state = agent.check_xfer_state(handle)

        return copy


class Memcpy:
    """The limit: memcpy of every block, in C, in one process; a second thread shows what the machine has left."""

    def __init__(self, library: Path, threads: int) -> None:
        self.name = f"memcpy in C, {threads} thread{'s' * (threads > 1)}"
        self.copy_blocks = ctypes.CDLL(str(library)).copy_blocks
        self.copy_blocks.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t] * 2
        self.buffer, self.target = Buffer(), Buffer()
        self.pool = concurrent.futures.ThreadPoolExecutor(threads)
        self.threads = threads

    def prepare(self, case: Case) -> Callable[[], None]:
        """A function that copies the case once and returns when its end was seen."""
        local, remote = case.places()
        share = case.blocks // self.threads

        def part(first: int) -> None:
            at = (remote[first:].ctypes.data, local[first:].ctypes.data)
            self.copy_blocks(self.target.address, self.buffer.address, *at, share, case.block_bytes)

        def copy() -> None:
            if self.threads == 1:
                part(0)
            else:
                list(self.pool.map(part, range(0, case.blocks, share)))

        return copy


def compile_memcpy(folder: str) -> Path | None:
    gcc = shutil.which("gcc")
    if gcc is None:
        print("gcc is missing: no memcpy limit", file=sys.stderr)
        return None
    source, library = Path(folder, "copy.c"), Path(folder, "copy.so")
    source.write_text(C_SOURCE, encoding="ascii")
    subprocess.run([gcc, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


# --- measuring -------------------------------------------------------------------------------------------------


def check(contender: Loopback | Nixl, end: int, case: Case, pipe: Connection) -> None:
    """The remote end holds what was copied; raises where it does not."""
    for local, remote in list(zip(*(side.tolist() for side in case.places()), strict=True))[:: case.blocks // 16]:
        pipe.send(("show", (end, remote, case.block_bytes)))
        expected = contender.buffer.bytes[local : local + case.block_bytes].tobytes()
        assert pipe.recv() == expected, f"{contender.name}: wrong bytes at {remote}"


def measure(contenders: list, case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn, by contender; two more rounds warm up."""
    copies = {contender.name: contender.prepare(case) for contender in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in copies}
    for _ in range(rounds + 2):
        for name in random.sample(list(copies), len(copies)):
            turns = []
            for _ in range(case.repeats):
                start = time.perf_counter()
                copies[name]()
                turns.append(time.perf_counter() - start)
            seconds[name].append(statistics.median(turns))
    return {name: values[2:] for name, values in seconds.items()}


def summarize(case: Case, seconds: dict[str, list[float]]) -> dict:
    def per_round(name: str, other: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True))

    rows = {}
    for name, values in seconds.items():
        rows[name] = {
            "gbps_p10": case.nbytes / float(np.percentile(values, 10)) / 1e9,
            "gbps_median": case.nbytes / statistics.median(values) / 1e9,
            "us_p10": float(np.percentile(values, 10)) * 1e6,
            "us_median": statistics.median(values) * 1e6,
            "ratio": {other: per_round(name, other) for other in seconds if other != name},
        }
    return {"case": case.name, "rounds": len(next(iter(seconds.values()))), "contenders": rows}


def goals(results: list[dict]) -> list[dict]:
    """What we promise: bandwidth over NIXL's, median of rounds."""
    found = []
    for case, name, least in (
        ("64x9KiB", "loopback, 1 thread", 1.0),
        ("512x16KiB", "loopback, 1 thread", 1.0),
        ("4096x64KiB", "loopback, 1 thread", 1.0),
        ("4096x64KiB", "loopback, 2 threads", 1.5),
    ):
        rows = next(r["contenders"] for r in results if r["case"] == case)
        if "NIXL" in rows:
            ratio = rows[name]["ratio"]["NIXL"]
            found.append({"case": case, "contender": name, "least": least, "ratio": ratio, "met": ratio >= least})
    return found


def show(report: dict) -> None:
    """Print the report as tables."""
    others = ("memcpy in C, 1 thread", "NIXL", "NIXL, huge pages")
    for result in report["results"]:
        rows = result["contenders"]
        columns = [other for other in others if other in rows]
        print(f"\n{result['case']:22}{'GB/s p10':>10}{'median':>9}{'us p10':>10}{'median':>10}", end="")
        print("".join(f"{'/ ' + other:>25}" for other in columns))
        for name, row in rows.items():
            figures = (
                f"{row['gbps_p10']:>10.2f}{row['gbps_median']:>9.2f}{row['us_p10']:>10.1f}{row['us_median']:>10.1f}"
            )
            print(f"{name:22}{figures}" + "".join(f"{row['ratio'].get(other, 1.0):>25.2f}" for other in columns))
    print("\np10: tenth percentile of the times; '/ X': bandwidth over X's, median of the rounds")
    for goal in report["goals"]:
        print(
            f"{'met' if goal['met'] else 'MISSED':7}{goal['contender']}, {goal['case']}: "
            f"{goal['ratio']:.2f} x NIXL, goal {goal['least']}"
        )


def run(rounds: int, folder: str) -> dict:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    target = context.Process(target=serve, args=(theirs,), daemon=True)
    target.start()
    remote_ends: list[Loopback | Nixl] = [Loopback(pipe, 1), Loopback(pipe, 2)]
    try:
        remote_ends += [Nixl(pipe, huge=False), Nixl(pipe, huge=True)]
    except ImportError as error:
        print(f"NIXL is missing ({error}): pip install nixl", file=sys.stderr)
    library = compile_memcpy(folder)
    contenders = [*([Memcpy(library, 1), Memcpy(library, 2)] if library else []), *remote_ends]
    rng = np.random.default_rng()
    for contender in contenders:
        contender.buffer.bytes[:] = rng.integers(0, 256, BUFFER_BYTES, np.uint8)
    results = []
    for case in CASES:
        results.append(summarize(case, measure(contenders, case, rounds)))
        for end, contender in enumerate(remote_ends):
            check(contender, end, case, pipe)
    pipe.send(None)
    target.join()
    return {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "results": results, "goals": goals(results)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--rounds", type=int, default=25, help="turns of every contender in every case")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(arguments.rounds, folder)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


if __name__ == "__main__":
    main()
