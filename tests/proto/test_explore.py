"""The explorer: both sides' real tables under every order of moves, and the explorer itself on worlds drawn by hand."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from moriio_proto.machines import landing, offer, peer
from moriio_proto.testing.explore import Exploration, Violation, explore
from moriio_proto.testing.explore_abstract import AbstractWrite
from moriio_proto.testing.explore_campaign import main, unexplained
from moriio_proto.testing.explore_pair import Pair, explore_setting, rows_taken
from moriio_proto.testing.explore_settings import CAMPAIGN, QUICK, UNREACHED
from moriio_proto.testing.explore_story import Setting
from moriio_proto.wire.messages import Mode


@functools.cache
def explored(setting: Setting) -> tuple[Pair, Exploration]:
    pair = Pair(setting)
    return pair, explore_setting(pair)


@pytest.mark.slow
@pytest.mark.parametrize("setting", QUICK, ids=lambda s: s.name)
def test_no_order_of_moves_breaks_an_invariant(setting: Setting) -> None:
    """Every reachable world is visited, none breaks an invariant, and each node alone comes to its end."""
    _, seen = explored(setting)
    assert seen.complete
    assert seen.worlds > 500


@pytest.mark.slow
def test_at_least_a_hundred_thousand_worlds_are_visited() -> None:
    """The quick settings together are an exploration of the size that was promised."""
    assert sum(explored(setting)[1].worlds for setting in QUICK) > 100_000


@pytest.mark.slow
def test_every_row_is_taken_or_excused() -> None:
    """Each row of the three tables is taken in some world, or excused with a reason."""
    taken = {row for setting in QUICK for row in rows_taken(explored(setting)[0])}
    assert list(unexplained(taken)) == []


@pytest.mark.slow
def test_every_state_is_reached() -> None:
    """No state of the three machines is only declared."""
    taken = {row for setting in QUICK for row in rows_taken(explored(setting)[0])}
    for table in (offer.TABLE, landing.TABLE, peer.TABLE):
        assert {r.dest for r in taken if r in set(table.rows())} | {table.initial} == set(type(table.initial))


def test_excuses_name_rows_that_exist() -> None:
    """An excuse whose row has gone is found."""
    rows = {(t.name, r.trigger, r.source.name) for t in (offer.TABLE, landing.TABLE, peer.TABLE) for r in t.rows()}
    named = {(name, trigger, source) for name, trigger, sources, _, _ in UNREACHED for source in sources}
    assert named <= rows


def test_settings_have_names_of_their_own() -> None:
    """A result names one setting."""
    names = [s.name for s in [*QUICK, *CAMPAIGN]]
    assert len(names) == len(set(names))


def test_a_prefill_that_works_ends_with_the_kv_in_place() -> None:
    """The model can tell success from failure: some world has D served, with every wanted block filled."""
    pair = Pair(Setting("happy", Mode.WRITE, goal=1, aborts=False, expects=False, ages=False, copies=1))
    worlds: list[int] = []
    pair.check = lambda world: worlds.append(world.filled) or ""  # type: ignore[method-assign, func-returns-value]
    explore(pair)
    assert pair.wanted in worlds


class _Counter:
    """Counts to three, and may be stopped or fall into a trap on the way."""

    def initial(self) -> str:
        return "0"

    def successors(self, world: str) -> Iterator[tuple[tuple[object, ...], str]]:
        if world in "012":
            yield ("count",), str(int(world) + 1)
            yield ("trap",), "trap"

    def check(self, world: str) -> str:
        return ""

    def finished(self, world: str) -> bool:
        return world == "3"

    def helpful(self, move: tuple[object, ...]) -> bool:
        return move == ("count",)

    def describe(self, world: str, move: tuple[object, ...]) -> str:
        return f"{world} {move[0]}"


def test_counts_worlds_moves_and_depth() -> None:
    """The numbers are those of a graph drawn by hand."""
    seen = explore(_Counter())
    assert (seen.worlds, seen.moves, seen.depth, seen.complete) == (5, 6, 3, True)


def test_finds_stuck_worlds_with_the_shortest_way() -> None:
    """A world that nothing helpful leaves is counted, and the way to the nearest is told."""
    seen = explore(_Counter(), find_stuck=True)
    assert (seen.stuck, seen.stuck_trace) == (1, ("0 trap",))


def test_a_violation_comes_with_the_shortest_trace() -> None:
    """A broken claim names the moves that lead to it, fewest first."""
    model = _Counter()
    model.check = lambda world: "three" if world == "3" else ""  # type: ignore[method-assign]
    with pytest.raises(Violation) as found:
        explore(model)
    assert found.value.trace == ("0 count", "1 count", "2 count")


def test_stops_at_the_limit() -> None:
    """A search that is cut off says so."""
    assert not explore(AbstractWrite(), limit=100).complete


def test_the_command_reports_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """The campaign's command prints a line for each setting and ends with zero when nothing is wrong."""
    assert main(["--quick", "--only", "P's process does not fit"]) == 0
    assert "no violation" in capsys.readouterr().out
