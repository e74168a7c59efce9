"""Where the checks look: a machine, or a recorded tree of its sysfs, procfs and /dev."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

import attrs

__all__ = ["Answer", "Host"]

PROBE_S: Final = 60  # amd_mori loads ROCm's libraries


@attrs.frozen
class Answer:
    """What a question asked in another process gave."""

    lines: tuple[str, ...]  # standard output
    warnings: tuple[str, ...]  # standard error
    status: int


class Host:
    """A machine whose files lie below `root`.

    A recorded tree has, beside `sys`, `proc`, `dev`, `var` and `opt`, a `probes.json` with the answers of `probe`, the
    memlock limit and whether it binds.

    Args:
        root: "/" for this machine.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.recorded = root != Path("/")
        self._probes = json.loads((root / "probes.json").read_text("utf-8")) if self.recorded else {}

    def path(self, absolute: str) -> Path:
        """A file of the machine."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str:
        """Content of a small file without white space around it; "" where it cannot be read."""
        try:
            return self.path(absolute).read_text("utf-8", "replace").strip()
        except OSError:
            return ""

    def names(self, absolute: str) -> list[str]:
        """Entries of a folder in order; none where there is no folder."""
        try:
            return sorted(entry.name for entry in self.path(absolute).iterdir())
        except OSError:
            return []

    def usable(self, absolute: str) -> bool:
        """Whether this user may read and write a device."""
        return os.access(self.path(absolute), os.R_OK | os.W_OK)

    def memlock(self) -> int | None:
        """Bytes that this process may lock; None without limit."""
        if self.recorded:
            limit = self._probes["memlock"]
            return None if limit is None else int(limit)
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft

    def probe(self, name: str) -> Answer:
        """Ask one of `_probe`'s questions in a process of its own, which may die of it."""
        if self.recorded:
            recorded = self._probes[name]
            return Answer(tuple(recorded["lines"]), tuple(recorded["warnings"]), recorded["status"])
        try:
            done = subprocess.run(  # noqa: S603 - our own module
                [sys.executable, "-m", "moriio_vllm.doctor._probe", name],
                capture_output=True, text=True, check=False, timeout=PROBE_S, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Answer((), (f"no answer in {PROBE_S} s",), -1)
        return Answer(tuple(done.stdout.splitlines()), tuple(done.stderr.splitlines()), done.returncode)
