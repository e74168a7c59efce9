"""Breadth-first search over the worlds of a model: every world that any order of moves can reach, shortest trace first.

A *world* is a hashable value; a *move* leads from one world to another.  The model says what the moves are, what must
hold in every world, and which worlds are finished.  Models of the protocol are in `explore_pair`; this module knows
none of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Protocol, TypeVar

import attrs

__all__ = ["Exploration", "Model", "Violation", "explore"]

W = TypeVar("W", bound=Hashable)
Move = tuple[object, ...]


class Violation(AssertionError):  # noqa: N818 - the field's term for what a checker finds
    """Something that must never happen, and the shortest way to it.

    `what`: the broken claim.  `trace`: one line per move, from the first world on.
    """

    def __init__(self, what: str, trace: Iterable[str] = ()) -> None:
        self.what, self.trace = what, tuple(trace)
        steps = "".join(f"\n  {i + 1:2} {line}" for i, line in enumerate(self.trace))
        super().__init__(f"{what}\nafter {len(self.trace)} moves:{steps}" if steps else what)


class Model(Protocol[W]):
    """What is explored."""

    def initial(self) -> W:
        """The first world."""

    def successors(self, world: W) -> Iterable[tuple[Move, W]]:
        """Every move that is possible, and the world it leads to.

        Raises:
            Violation: a move does what must not be done (its `what` is enough; the trace is added here).
        """

    def check(self, world: W) -> str:
        """What is wrong with this world; empty: nothing."""

    def finished(self, world: W) -> bool:
        """Whether everything has come to its end."""

    def helpful(self, move: Move) -> bool:
        """Whether `move` happens by itself when faults stop; only such moves lead out of a world that is not stuck."""

    def describe(self, world: W, move: Move) -> str:
        """One line of a trace."""


@attrs.frozen
class Exploration:
    """What a search has seen."""

    worlds: int
    moves: int
    depth: int  # of the farthest world
    stuck: int  # worlds from which helpful moves never lead to a finished one; 0 when not asked for
    complete: bool  # False: `limit` was reached before the last world
    stuck_trace: tuple[str, ...] = ()  # to the nearest stuck world


def explore(model: Model[W], *, limit: int = 10_000_000, find_stuck: bool = False) -> Exploration:
    """Visit every reachable world, at most `limit`.

    Args:
        model: see `Model`.
        limit: worlds; the search is complete up to the depth at which it stops.
        find_stuck: also count stuck worlds (keeps all helpful moves in memory; not for a search that is cut off).

    Raises:
        Violation: the first broken claim, with the shortest trace to it.
    """
    search = _Search(model, limit, find_stuck)
    return search.run()


class _Search:
    def __init__(self, model: Model[W], limit: int, find_stuck: bool) -> None:
        self.model, self.limit, self.find_stuck = model, limit, find_stuck
        first = model.initial()
        self.number: dict[W, int] = {first: 0}
        self.worlds: list[W] = [first]
        self.parent: list[int] = [-1]
        self.by: list[Move] = [()]
        self.depth: list[int] = [0]
        self.back: dict[int, list[int]] = {}
        self.moves = 0

    def run(self) -> Exploration:
        at = 0
        while at < len(self.worlds) and len(self.worlds) < self.limit:
            self.expand(at)
            at += 1
        complete = at == len(self.worlds)
        stuck = self.stuck() if self.find_stuck and complete else []
        trace = self.trace(stuck[0]) if stuck else ()
        return Exploration(len(self.worlds), self.moves, self.depth[-1], len(stuck), complete, trace)

    def expand(self, at: int) -> None:
        world, model = self.worlds[at], self.model
        if wrong := model.check(world):
            raise Violation(wrong, self.trace(at))
        number, worlds = self.number, self.worlds
        try:
            for move, after in model.successors(world):
                self.moves += 1
                known = number.get(after)
                if known is None:
                    known = number[after] = len(worlds)
                    worlds.append(after)
                    self.parent.append(at)
                    self.by.append(move)
                    self.depth.append(self.depth[at] + 1)
                if self.find_stuck and known != at and model.helpful(move):
                    self.back.setdefault(known, []).append(at)
        except Violation as found:
            raise Violation(found.what, (*self.trace(at), *found.trace)) from None

    def trace(self, at: int) -> tuple[str, ...]:
        """How world `at` was first reached."""
        lines: deque[str] = deque()
        while self.parent[at] >= 0:
            lines.appendleft(self.model.describe(self.worlds[self.parent[at]], self.by[at]))
            at = self.parent[at]
        return tuple(lines)

    def stuck(self) -> list[int]:
        """Worlds from which nothing helpful leads to the end, nearest first."""
        good = [i for i, world in enumerate(self.worlds) if self.model.finished(world)]
        seen = set(good)
        while good:
            for before in self.back.get(good.pop(), ()):
                if before not in seen:
                    seen.add(before)
                    good.append(before)
        return [i for i in range(len(self.worlds)) if i not in seen]
