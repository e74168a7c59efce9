"""Findings, and how they are shown."""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Finding", "Level", "as_json", "as_text", "exit_code"]


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"  # seen, and of no consequence for what is to run
    WARN = "warn"  # works perhaps
    FAIL = "fail"  # does not work


@attrs.frozen
class Finding:
    """One thing that was looked at."""

    check: str  # what was looked at, two or three words
    level: Level
    seen: str
    advice: str = ""  # what to do; empty where nothing is to be done


def as_text(findings: Sequence[Finding]) -> str:
    """One line each, with the advice below, and a count at the end."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.value:4}  {finding.check:{width}}  {finding.seen}")
        if finding.advice:
            lines.append(f"      {'':{width}}  -> {finding.advice}")
    counts = ", ".join(f"{sum(f.level is level for f in findings)} {level.value}" for level in Level)
    return "\n".join([*lines, "", counts])


def as_json(findings: Sequence[Finding]) -> str:
    """An object with the exit code and all findings."""
    rows = [attrs.asdict(finding, value_serializer=_plain) for finding in findings]
    return json.dumps({"exit_code": exit_code(findings), "findings": rows}, indent=2)


def _plain(_instance: object, _field: object, value: object) -> object:
    return value.value if isinstance(value, Level) else value


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when nothing fails, 1 else."""
    return int(any(finding.level is Level.FAIL for finding in findings))
