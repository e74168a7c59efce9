"""Transcripts: each file tells a story and pins down, effect by effect, what two cores do in it.

`MORIIO_REWRITE=1 pytest tests/proto/test_transcripts.py` writes today's output into the files: review it as a diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moriio_proto.testing.transcript import run_transcript

SCRIPTS = sorted((Path(__file__).parents[1] / "testdata" / "core").glob("*.txt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_transcript(script: Path) -> None:
    """The cores do exactly what the transcript says."""
    text = script.read_text()
    got = run_transcript(text)
    if os.environ.get("MORIIO_REWRITE"):
        script.write_text(got)
    assert got == text
