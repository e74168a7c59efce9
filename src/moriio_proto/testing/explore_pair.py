"""The explored world: a prefill node, a decode node, and a network that loses, repeats and reorders.

A world is `(P, D, network, filled, deaths, faults)`: the numbers of two local states, the letters under way, which
cells of D's blocks hold the KV (a ghost: no machine knows it), and what is left of the budgets.  With `copies=0` the
network is a set: a letter once sent may come any number of times, at any later time, or never, but not after its
sender has forgotten the transfer: `Timing.forget` is longer than a lease, and longer than any message lives, which is
the one assumption about the network.

What must hold in every world (the numbers are those of the invariants in specs/protocol.md):

1. No post may touch blocks of the other side that are not lent any more.
2. Each side settles what vLLM lent it exactly once, and only when its own posts are quiet.
3. D settles "done" only when every block that it wants holds the KV, and in READ only while P still holds its blocks.
4. No event and no message meets a state without a row for it.
5. From every local state the node alone reaches its end, though the other node and the network stay silent for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from moriio_proto.core import Role
from moriio_proto.machines._table import Row
from moriio_proto.testing.explore import Exploration, Model, Move, Violation, explore
from moriio_proto.testing.explore_node import Node
from moriio_proto.testing.explore_snapshot import LEASE, Recorded
from moriio_proto.testing.explore_story import LENT, OVER, Facts, Letter, Setting, Step
from moriio_proto.wire.messages import Mode

__all__ = ["Pair", "World", "explore_setting", "rows_taken"]


class World(NamedTuple):
    """One world."""

    prefill: int
    decode: int
    network: Any  # a bit per letter, or a sorted tuple of letters' numbers
    filled: int
    deaths: int
    faults: int


class Pair(Model[World]):
    """Two nodes and a network, as a model to explore."""

    def __init__(self, setting: Setting, tables: dict[Role, tuple[Recorded, Recorded]] | None = None) -> None:
        tables = tables or {}
        self.setting = setting
        self.nodes = {role.value: Node(role, setting, tables.get(role)) for role in Role}
        self.letters: list[Letter] = []
        self._numbers: dict[Letter, int] = {}
        self._older: list[int] = []
        self._bits: dict[int, tuple[int, ...]] = {0: ()}
        wanted = range(setting.first, setting.goal)
        self.wanted = sum(1 << (layer * setting.goal + b) for layer in range(setting.layers) for b in wanted) >> 0
        self.watched: dict[str, set[int]] = {"P": set(), "D": set()}

    # --- the model --------------------------------------------------------------------------------------------------

    def initial(self) -> World:
        """Nothing has happened."""
        s = self.setting
        net: Any = () if s.copies else 0
        return World(self.nodes["P"].first, self.nodes["D"].first, net, 0, s.deaths, s.faults)

    def successors(self, world: World) -> Iterator[tuple[Move, World]]:
        """Every move of either node, of the network, and of time."""
        for name, far in (("P", "D"), ("D", "P")):
            yield from self._node_moves(world, name, far)
        yield from self._deliveries(world) if self.setting.copies else self._deliveries_of_set(world)
        if self.setting.ages:
            yield from self._tick(world)

    def check(self, world: World) -> str:
        """Invariant 1."""
        if world.prefill in self.watched["P"] or world.decode in self.watched["D"]:
            return "from here, one of the nodes alone never comes to an end"
        if self.setting.plain:
            return ""
        prefill, decode = self.nodes["P"].facts(world.prefill), self.nodes["D"].facts(world.decode)
        if decode.number in prefill.hot and decode.phase != LENT:
            return "P may still write into blocks that D has given back"
        if prefill.number in decode.hot and prefill.phase == OVER:
            return "D may still read blocks that P has given back"
        return ""

    def finished(self, world: World) -> bool:
        """Both nodes are at their end and remember nothing."""
        return self.nodes["P"].facts(world.prefill).finished and self.nodes["D"].facts(world.decode).finished

    def helpful(self, move: Move) -> bool:
        """Everything but faults and what clients do."""
        return move[0] in ("timer", "recv", "tick") or move[:2] in _WILLING or (move[0] == "post" and move[2] == "done")

    def describe(self, world: World, move: Move) -> str:
        """A move, and where it found the two nodes."""
        name = str(move[-1]) if move[0] != "tick" else ""
        what = " ".join(map(str, move[:-1])) if name else "a tick passes"
        where = f"{self.nodes['P'].facts(world.prefill).line}; {self.nodes['D'].facts(world.decode).line}"
        return f"{name:2}{what:<44} [{where}]"

    # --- moves ------------------------------------------------------------------------------------------------------

    def _node_moves(self, world: World, name: str, far: str) -> Iterator[tuple[Move, World]]:
        mine, other = self._facts(world, name), self._facts(world, far)
        for move, needs, number in mine.moves:
            if needs and (number == other.number) is not (needs == "alive"):
                continue
            if move == ("vllm", "load") and self.setting.mode is Mode.READ and world.prefill == self.nodes["P"].first:
                continue  # in READ the router turns to D with P's answer
            yield (*move, name), self._moved(world, name, move, world.network)
        if world.deaths and mine.number:
            yield ("die", name), self._moved(world, name, ("die",), world.network)._replace(deaths=world.deaths - 1)

    def _facts(self, world: World, name: str) -> Facts:
        return self.nodes[name].facts(world.prefill if name == "P" else world.decode)

    def _moved(self, world: World, name: str, move: Move, network: Any) -> World:
        node = self.nodes[name]
        step = node.step(world.prefill if name == "P" else world.decode, move)
        if step.wrong:
            raise Violation(step.wrong, [self.describe(world, (*move, name))])
        filled = self._fill(world, name, move, step)
        if step.done and name == "D" and not self.setting.plain:
            self._check_done(world, filled, [self.describe(world, (*move, name))])
        if step.forgot:
            network = self._without(network, node)
        for letter in step.sent:
            network = self._add(network, letter)
        if step.dials:
            far = self._facts(world, node.far)
            if far.number:
                mine = node.facts(step.to)
                network = self._add(network, Letter(name, mine.token, "Hello", far.token))
        if name == "P":
            return World(step.to, world.decode, network, filled, world.deaths, world.faults)
        return World(world.prefill, step.to, network, filled, world.deaths, world.faults)

    def _fill(self, world: World, name: str, move: Move, step: Step) -> int:
        if name == "D" and move in (("vllm", "load"), ("boot",)):
            return 0
        if name == "P" and step.target != self._facts(world, "D").number:
            return world.filled
        return (world.filled | step.filled) & ~step.spoilt

    def _check_done(self, world: World, filled: int, last: list[str]) -> None:
        if filled & self.wanted != self.wanted:
            raise Violation("D takes blocks for filled that do not hold the KV", last)
        prefill = self.nodes["P"].facts(world.prefill)
        if self.setting.mode is Mode.READ and prefill.number == 1 and prefill.phase == OVER:
            raise Violation("D takes for valid what it read after P had given its blocks back", last)

    def _tick(self, world: World) -> Iterator[tuple[Move, World]]:
        prefill, decode = self._later(world, "P"), self._later(world, "D")
        yield ("tick",), World(prefill, decode, self._aged(world.network), *world[3:])

    def _later(self, world: World, name: str) -> int:
        at = world.prefill if name == "P" else world.decode
        return self.nodes[name].step(at, ("tick",)).to if self.nodes[name].facts(at).ticks else at

    # --- the network ------------------------------------------------------------------------------------------------

    def _number(self, letter: Letter) -> int:
        known = self._numbers.get(letter)
        if known is None:
            known = self._numbers[letter] = len(self.letters)
            self.letters.append(letter)
            older = letter._replace(age=min(letter.age + 1, LEASE)) if letter.age >= 0 else letter
            self._older.append(known)
            self._older[known] = known if older == letter else self._number(older)
        return known

    def _add(self, network: Any, letter: Letter) -> Any:
        n = self._number(letter)
        if not self.setting.copies:
            return network | 1 << n
        return network if network.count(n) >= self.setting.copies else tuple(sorted((*network, n)))

    def _aged(self, network: Any) -> Any:
        older = self._older
        if self.setting.copies:
            return tuple(sorted(older[n] for n in network))
        out = 0
        for n in self._in_set(network):
            out |= 1 << older[n]
        return out

    def _without(self, network: Any, node: Node) -> Any:
        """No message outlives its sender's tombstone, and no lease the tombstone of who asked for it."""
        gone = {n for n, letter in enumerate(self.letters) if _is_void(letter, node)}
        if self.setting.copies:
            return tuple(n for n in network if n not in gone)
        return sum(1 << n for n in self._in_set(network) if n not in gone)

    def _in_set(self, network: int) -> tuple[int, ...]:
        known = self._bits.get(network)
        if known is None:
            known = self._bits[network] = tuple(n for n in range(network.bit_length()) if network >> n & 1)
        return known

    def _gets(self, world: World, letter: Letter) -> bool:
        there = self._facts(world, letter.to)
        return there.number > 0 and letter.only in ("", there.token)

    def _deliveries_of_set(self, world: World) -> Iterator[tuple[Move, World]]:
        for n in self._in_set(world.network):
            letter = self.letters[n]
            if self._gets(world, letter):
                yield ("recv", letter, letter.to), self._moved(world, letter.to, ("recv", letter), world.network)

    def _deliveries(self, world: World) -> Iterator[tuple[Move, World]]:
        network = world.network
        for i, n in enumerate(network):
            if i and network[i - 1] == n:
                continue
            letter, rest = self.letters[n], network[:i] + network[i + 1 :]
            if not self._gets(world, letter):
                yield ("lost", letter, letter.to), world._replace(network=rest)
                continue
            yield ("recv", letter, letter.to), self._moved(world, letter.to, ("recv", letter), rest)
            if world.faults:
                less = world._replace(faults=world.faults - 1)
                yield ("lost", letter, letter.to), less._replace(network=rest)
                yield ("twice", letter, letter.to), self._moved(less, letter.to, ("recv", letter), network)


_WILLING = {("vllm", "progress"), ("vllm", "finish"), ("vllm", "load"), ("link", "up")}


def _is_void(letter: Letter, forgetful: Node) -> bool:
    if letter.to == forgetful.name:
        return letter.kind == "Granted"
    return letter.kind != "Hello"


def stuck_alone(node: Node) -> list[int]:
    """Local states of which the node alone never reaches its end (invariant 5)."""
    back: dict[int, list[int]] = {}
    good = []
    at = 0
    while at < len(node.locals):  # helpful moves may lead to local states that no world has: they count as well
        facts = node.facts(at)
        if facts.finished:
            good.append(at)
        for move in (*facts.helpful, *((("tick",),) if facts.ticks else ())):
            step = node.step(at, move)
            if not step.wrong:
                back.setdefault(step.to, []).append(at)
        at += 1
    seen = set(good)
    while good:
        for before in back.get(good.pop(), ()):
            if before not in seen:
                seen.add(before)
                good.append(before)
    return [i for i in range(len(node.locals)) if i not in seen]


def rows_taken(pair: Pair) -> set[Row]:
    """Every row of every table that was taken in an exploration."""
    return {row for node in pair.nodes.values() for table in node.tables for row in table.taken}


def explore_setting(pair: Pair, *, limit: int = 10_000_000) -> Exploration:
    """Explore and check everything, invariant 5 included.

    Raises:
        Violation: with the shortest trace.
    """
    seen = explore(pair, limit=limit)
    for node in pair.nodes.values():
        stuck = stuck_alone(node)
        if stuck:
            pair.watched[node.name] = set(stuck)
            explore(pair, limit=limit)  # for the trace to the nearest
            raise Violation(f"{node.facts(stuck[0]).line}: alone, it never comes to an end: {node.locals[stuck[0]]}")
    return seen
