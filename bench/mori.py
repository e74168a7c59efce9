"""What our transport costs over the bare MoRI-IO engine, on the same transfers in the same run.

The unmodified amd_mori wheel writes scattered blocks into another process, once called as its own examples call it
(one batch, then `Wait`), once through backend `rdma` (plan, checks, batches, window, thread, eventfd, poll).  There is
no card: the wheel runs over software verbs (`tests/transport/mori`), whose copies take the time of a memcpy between
processes.  So the difference counts, not the bandwidth.  Everything that is needed is set up on demand.

    python bench/mori.py [--json] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import attrs
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:1] = [str(ROOT), str(ROOT / "src")]  # in place of this folder, where `mori` would be this file

KIB, MIB = 1 << 10, 1 << 20
MEMORY = 320 * MIB


@attrs.frozen
class Case:
    """Scattered blocks of one size."""

    blocks: int
    block_bytes: int
    repeats: int

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.blocks} x {self.block_bytes // KIB} KiB"

    def offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the blocks lie here and there: no two are neighbours on both sides."""
        places = MEMORY // self.block_bytes
        rng = np.random.default_rng(self.blocks)
        return tuple((rng.permutation(places)[: self.blocks] * self.block_bytes).astype(np.uint64) for _ in range(2))


CASES = (Case(1, 4 * KIB, 40), Case(64, 9 * KIB, 40), Case(512, 16 * KIB, 15), Case(4096, 64 * KIB, 2))


def bare(transport, session, case: Case) -> Callable[[], None]:
    """The engine's own calls, on the session that the transport opened."""
    link = transport._by_session[session.id]
    engine_session = link._opened[0, 0]
    local, remote = (side.tolist() for side in case.offsets())
    sizes = [case.block_bytes] * case.blocks

    def copy() -> None:
        status = engine_session.batch_write(local, remote, sizes, engine_session.allocate_transfer_uid())
        status.Wait()
        assert status.Succeeded(), status.Message()

    return copy


def ours(transport, session, case: Case) -> Callable[[], None]:
    """A post and its end."""
    from moriio_proto.geometry import TransferPlan
    from moriio_transport.base import Completed, Direction, Outcome

    region = np.zeros(case.blocks, np.int32)
    local, remote = case.offsets()
    plan = TransferPlan(region, local, region, remote, np.full(case.blocks, case.block_bytes, np.uint64))
    ready = select.poll()
    ready.register(transport.fileno(), select.POLLIN)

    def copy() -> None:
        transport.post(1, session, Direction.WRITE, plan, time.monotonic() + 60)
        while not (events := transport.poll()):
            ready.poll()
        assert events == [Completed(1, Outcome.DONE, case.blocks * case.block_bytes)], events

    return copy


def measure(copies: dict[str, Callable[[], None]], case: Case, rounds: int, clocks: list[int]) -> dict[str, np.ndarray]:
    """Seconds per transfer, by contender: array of shape [rounds, 2] of wall time and of CPU time on our threads.

    Args:
        copies: by contender.
        case: what each copies.
        rounds: turns of each; the first two of them warm up and are not in the result.
        clocks: CPU clocks of the threads that count: the caller's and the link's, not the engine's busy one.
    """
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in copies}

    def now() -> np.ndarray:
        return np.array([time.perf_counter(), sum(time.clock_gettime(clock) for clock in clocks)])

    for turn in range(rounds + 2):
        for name in list(copies)[:: 1 if turn % 2 else -1]:
            start = now()
            for _ in range(case.repeats):
                copies[name]()
            rows[name].append((now() - start) / case.repeats)
    return {name: np.array(values[2:]) for name, values in rows.items()}


def inner(rounds: int) -> dict:
    """Runs in the environment of the real engine."""
    from moriio_transport._pair import Listener, ProcessTarget, open_transport

    memory = np.random.default_rng(0).integers(0, 256, MEMORY, np.uint8)
    results = []
    with (
        closing(ProcessTarget("rdma", {}, [MEMORY])) as target,
        closing(open_transport("rdma", "bench", {}, [memory])) as transport,
    ):
        session = transport.connect(target.description)
        Listener(transport).until(bool)
        for case in CASES:
            copies = {"bare": bare(transport, session, case), "ours": ours(transport, session, case)}
            link = transport._by_session[session.id]._thread
            threads = (threading.get_ident(), link.ident)
            seconds = measure(copies, case, rounds, [time.pthread_getcpuclockid(thread) for thread in threads])
            local, remote = (int(side[-1]) for side in case.offsets())
            expected = memory[local : local + case.block_bytes].tobytes()
            assert target.read(0, remote, case.block_bytes) == expected, "wrong bytes"
            row: dict[str, str | float] = {"case": case.name}
            for name, values in seconds.items():
                row[f"{name}_us"] = float(np.percentile(values[:, 0], 10)) * 1e6
                row[f"{name}_cpu_us"] = float(np.median(values[:, 1])) * 1e6
            results.append(row)
    return {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "rounds": rounds, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--rounds", type=int, default=15, help="turns of both in every case")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inner:
        Path(os.environ["BENCH_REPORT"]).write_text(json.dumps(inner(arguments.rounds)))
        return
    report = outer(arguments.rounds)
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{'':16}{'bare us':>10}{'ours us':>10}{'added':>8}{'bare CPU us':>14}{'ours CPU us':>13}{'added':>8}")
    for row in report["results"]:
        wall, cpu = (row["bare_us"], row["ours_us"]), (row["bare_cpu_us"], row["ours_cpu_us"])
        print(f"{row['case']:16}{wall[0]:>10.0f}{wall[1]:>10.0f}{wall[1] - wall[0]:>8.0f}", end="")
        print(f"{cpu[0]:>14.0f}{cpu[1]:>13.0f}{cpu[1] - cpu[0]:>8.0f}")
    print(f"\nwall time: tenth percentile of {report['rounds']} rounds; CPU time, of our threads only: median")
    print(f"{report['cpus']} CPUs, load {report['load']:.1f}")


def outer(rounds: int) -> dict:
    """Set the environment up and run there; the engine logs to standard output, so the report comes in a file."""
    from tests.transport.mori.environment import CACHE, variables

    python, environment = variables()
    path = CACHE / "bench.json"
    path.unlink(missing_ok=True)
    command = [str(python), __file__, "--inner", "--rounds", str(rounds)]
    subprocess.run(command, env={**environment, "BENCH_REPORT": str(path)}, check=True, stdout=sys.stderr)
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
