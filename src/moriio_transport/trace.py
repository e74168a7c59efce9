"""The trace: one JSON line for every row that a machine took, and a check of such a file against the tables.

    {"t": 12.3, "pid": 7, "machine": "offer", "id": "tx-1", "from": "COMPUTING", "on": "recv_blocks", "to": "CLAIMING"}

Off by default, and then it costs one comparison a step.  `python -m moriio_transport.trace FILE...` checks: each line
must be a row of its machine's table, and each record must go on where it stood.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from moriio_proto.machines import landing, offer, peer
from moriio_proto.machines._table import State

__all__ = ["TraceWriter", "check_trace", "main"]

_TABLES = {table.name: table for table in (offer.TABLE, landing.TABLE, peer.TABLE)}


class TraceWriter:
    """A core's trace hook that writes to a file; `{pid}` in the path is filled in."""

    def __init__(self, path: str) -> None:
        self._pid = os.getpid()
        self._file = Path(path.replace("{pid}", str(self._pid))).open("a", buffering=1)  # noqa: SIM115 - open as long as the process

    def __call__(self, machine: str, name: str, source: State, trigger: str, dest: State, now: float) -> None:
        """Write one row."""
        line = {"t": round(now, 6), "pid": self._pid, "machine": machine, "id": name}
        self._file.write(json.dumps({**line, "from": source.name, "on": trigger, "to": dest.name}) + "\n")

    def close(self) -> None:
        """Close the file.  Idempotent."""
        self._file.close()


def check_trace(lines: Iterable[str]) -> Iterator[str]:
    """What is wrong with a trace, one text per finding."""
    rows = {
        name: {(row.source.name, row.trigger, row.dest.name) for row in table.rows()} for name, table in _TABLES.items()
    }
    at: dict[tuple[int, str, str], str] = {}
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            machine, key = line["machine"], (line["pid"], line["machine"], line["id"])
            step = (line["from"], line["on"], line["to"])
            table = rows[machine]
        except (ValueError, KeyError, TypeError) as e:
            yield f"line {number}: expected an object with t, pid, machine, id, from, on, to: {e!r}"
            continue
        if step not in table:
            yield f"line {number}: {machine} has no row {step[0]} --{step[1]}--> {step[2]}"
        initial = _TABLES[machine].initial.name
        if at.get(key, initial) != step[0] and step[0] != initial:  # a forgotten record may begin anew
            yield f"line {number}: {machine} {line['id']} stood in {at.get(key, initial)}, not in {step[0]}"
        at[key] = step[2]


def main(paths: list[str]) -> int:
    """Check files; 0 when nothing is wrong and something was checked."""
    wrong = checked = 0
    for path in paths:
        with Path(path).open() as file:
            lines = file.readlines()
        checked += len(lines)
        for finding in check_trace(lines):
            wrong += 1
            sys.stderr.write(f"{path}: {finding}\n")
    sys.stdout.write(f"{checked} rows checked, {wrong} wrong\n")
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
