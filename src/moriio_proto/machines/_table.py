"""One declared `transitions.Machine`, run at table speed.

The Machine stays the only place where states, triggers, guards and actions are written down.
`compile_machine` reads it once, at import, resolves every callback name against the record class,
refuses what it cannot honour, and returns a frozen table.  `Compiled.fire` is the hot path: 0.2 to 0.5 us
where the stock engine needs 8 to 10.

Callbacks are *names* of methods of the record class (the `transitions` idiom), so the same declaration
runs unchanged on the stock engine; `moriio_proto.testing.check_against_stock` proves the two equal, row by row.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from transitions import Machine
from transitions.core import State as StockState
from transitions.core import Transition

from moriio_proto.errors import DeclarationError, IllegalEventError

__all__ = ["Compiled", "Row", "State", "compile_machine", "declare", "row"]


class State(enum.Enum):
    """Base of the state enums.  `Enum.__hash__` is Python code; `object.__hash__` is C and as good."""

    __hash__ = object.__hash__


Guard = Callable[..., bool]
Action = Callable[..., None]


@attrs.frozen(eq=False)
class Row:
    """One line of the table: everything `fire` needs, nothing resolved late."""

    trigger: str
    source: State
    dest: State
    guards: tuple[tuple[Guard, bool], ...]
    pre: tuple[Action, ...]  # before, then source.on_exit
    post: tuple[Action, ...]  # dest.on_enter, then after
    guard_names: tuple[str, ...]
    action_names: tuple[str, ...]


@attrs.frozen(eq=False)
class Compiled:
    """A frozen table.  `table[trigger][state]` lists rows; the first whose guards hold is taken."""

    name: str
    initial: State
    final: frozenset[State]
    table: Mapping[str, Mapping[State, tuple[Row, ...]]]

    def fire(self, record: Any, trigger: str, *args: Any) -> Row:
        """Take one step.

        Returns:
            The row taken.

        Raises:
            IllegalEventError: no row for `trigger` in the record's state; the record is untouched.
        """
        try:
            rows = self.table[trigger][record.state]
        except KeyError:
            raise IllegalEventError(self.name, record.state, trigger) from None
        for candidate in rows:
            for guard, want in candidate.guards:
                if guard(record, *args) is not want:
                    break
            else:
                for action in candidate.pre:
                    action(record, *args)
                record.state = candidate.dest
                for action in candidate.post:
                    action(record, *args)
                return candidate
        raise IllegalEventError(self.name, record.state, trigger)  # unreachable: the last row is unguarded

    def rows(self) -> Iterator[Row]:
        """All rows, by trigger, then by source, in order of precedence."""
        for by_state in self.table.values():
            for rows in by_state.values():
                yield from rows


def row(trigger: str, source: State | Sequence[State], dest: State | None, *after: str, **more: Any) -> dict[str, Any]:
    """One line of a declaration; `dest=None` stays.  `conditions`/`unless` name guards."""
    return {"trigger": trigger, "source": source, "dest": dest, "after": list(after), **more}


def declare(
    name: str,
    states: type[State],
    initial: State,
    final: Sequence[State],
    rows: Sequence[dict[str, Any]],
    enter: Mapping[State, str] | None = None,
) -> Machine:
    """The stock machine of a declaration: what is compiled, drawn, exported and compared with.

    `enter` names the action that runs on entry of a state, before the actions of the row.
    """
    on_enter = enter or {}
    declared = [StockState(s, on_enter=on_enter.get(s), final=s in final) for s in states]
    return Machine(
        model=None, name=name, initial=initial, auto_transitions=False, states=declared,
        transitions=[dict(r) for r in rows],
    )  # fmt: skip


_HOOKS = ("prepare_event", "before_state_change", "after_state_change", "finalize_event", "on_exception", "on_final")


def compile_machine(machine: Machine, record_class: type) -> Compiled:
    """Freeze `machine` into a table for records of `record_class`.

    Raises:
        DeclarationError: a callback that is no method, an unknown state, a (trigger, state) whose guards have no
            unguarded last row, a row that can never be reached, a move out of a final state, or a feature of
            `transitions` that is not compiled (hooks, queued, send_event, prepare, auto transitions).
    """
    name = machine.name.removesuffix(": ") or record_class.__name__
    _refuse_unsupported(machine, name)
    compiler = _Compiler(name, machine, record_class)
    table = {trigger: compiler.by_state(trigger, event.transitions) for trigger, event in machine.events.items()}
    if machine.initial is None:
        raise DeclarationError(f"{name}: no initial state")
    final = frozenset(compiler.member(s) for s in machine.states.values() if s.final)
    compiled = Compiled(name, compiler.member(machine.states[machine.initial]), final, table)
    for r in compiled.rows():
        if r.source in final and r.dest is not r.source:  # a final state may still answer
            raise DeclarationError(f"{name}: {r.trigger} leaves the final state {r.source.name}")
    return compiled


def _refuse_unsupported(machine: Machine, name: str) -> None:
    for hook in _HOOKS:
        if getattr(machine, hook):
            raise DeclarationError(f"{name}: machine-wide {hook} is not compiled")
    if machine.has_queue or machine.send_event or machine.models or machine.auto_transitions:
        raise DeclarationError(f"{name}: declare with model=None, auto_transitions=False and the defaults")


@attrs.frozen
class _Compiler:
    name: str
    machine: Machine
    record_class: type

    def member(self, declared: StockState) -> State:
        if not isinstance(declared.value, State):
            raise DeclarationError(f"{self.name}: state {declared.name} is not a member of a State enum")
        return declared.value

    def known(self, state_name: str, trigger: str) -> StockState:  # `transitions` accepts any name here
        if state_name not in self.machine.states:
            raise DeclarationError(f"{self.name}: {trigger} names the unknown state {state_name!r}")
        return self.machine.states[state_name]

    def resolve(self, ref: object) -> Callable[..., Any]:
        if not isinstance(ref, str):
            raise DeclarationError(f"{self.name}: name a method of {self.record_class.__name__}, not {ref!r}")
        func: Callable[..., Any] | None = getattr(self.record_class, ref, None)
        if not callable(func):
            raise DeclarationError(f"{self.name}: {self.record_class.__name__} has no method {ref!r}")
        return func

    def by_state(self, trigger: str, transitions: Mapping[str, Sequence[Transition]]) -> dict[State, tuple[Row, ...]]:
        out: dict[State, tuple[Row, ...]] = {}
        for source_name, declared in transitions.items():
            if not declared:  # Event.transitions is a defaultdict: reading it can leave empty lists
                continue
            source = self.known(source_name, trigger)
            rows = tuple(self.compile_row(trigger, source, t) for t in declared)
            if rows[-1].guards:
                raise DeclarationError(f"{self.name}: {trigger} in {source_name} has no row for 'every guard refused'")
            if not all(r.guards for r in rows[:-1]):
                raise DeclarationError(f"{self.name}: a row of {trigger} in {source_name} can never be reached")
            out[self.member(source)] = rows
        return out

    def compile_row(self, trigger: str, source: StockState, declared: Transition) -> Row:
        if declared.prepare:
            raise DeclarationError(f"{self.name}: prepare on {trigger} is not compiled")
        moves = declared.dest is not None
        dest = source if declared.dest is None else self.known(declared.dest, trigger)
        pre = [*declared.before, *(source.on_exit if moves else ())]
        post = [*(dest.on_enter if moves else ()), *declared.after]
        return Row(
            trigger=trigger, source=self.member(source), dest=self.member(dest),
            guards=tuple((self.resolve(c.func), c.target) for c in declared.conditions),
            pre=tuple(map(self.resolve, pre)), post=tuple(map(self.resolve, post)),
            guard_names=tuple(("" if c.target else "not ") + str(c.func) for c in declared.conditions),
            action_names=tuple(map(str, (*pre, *post))),
        )  # fmt: skip
