"""Seeded bugs: each is noticed by the tool that is said to notice it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moriio_proto.testing.explore_mutants import MUTANTS, Mutant, killed_by_explorer, killed_by_transcripts

pytestmark = pytest.mark.slow

TRANSCRIPTS = Path(__file__).parents[1] / "testdata" / "core"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.bug)
def test_mutant_is_killed(mutant: Mutant) -> None:
    """The bug is found by its tool."""
    if mutant.tool == "explorer":
        assert killed_by_explorer(mutant) is not None
    else:
        assert killed_by_transcripts(mutant, TRANSCRIPTS)


def test_the_machines_as_they_are_change_no_transcript() -> None:
    """What kills a mutant is its bug: a mutant without one survives the transcripts."""
    unharmed = Mutant("none", MUTANTS[0].machine, "write: the lease")
    assert killed_by_transcripts(unharmed, TRANSCRIPTS) == ""
