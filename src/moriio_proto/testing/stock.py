"""The compiled table and the stock engine of `transitions` do the same: proven row by row."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from transitions import Machine
from transitions.core import MachineError

from moriio_proto.errors import IllegalEventError
from moriio_proto.machines._table import State, compile_machine

__all__ = ["check_against_stock"]


def check_against_stock(machine: Machine, states: type[State]) -> int:
    """Fire every (state, trigger, guard outcome) on both engines.

    Returns:
        How many cases were compared.

    Raises:
        AssertionError: names the first case in which state or order of actions differ.
    """
    answers: dict[str, bool] = {}
    log: list[str] = []
    probe = _probe_class(machine, answers, log)
    compiled = compile_machine(machine, probe)
    engines: tuple[Callable[[Any, str], object], ...] = (
        compiled.fire,
        lambda record, trigger: machine.events[trigger].trigger(record),
    )
    checked = 0
    for state, trigger in itertools.product(states, machine.events):
        rows = compiled.table[trigger].get(state, ())
        used = sorted({g.removeprefix("not ") for r in rows for g in r.guard_names})
        for bits in itertools.product((False, True), repeat=len(used)):
            answers.clear()
            answers.update(zip(used, bits, strict=True))
            seen = []
            for fire in engines:
                record = probe()
                record.state = state
                log.clear()
                try:
                    fire(record, trigger)
                    seen.append((record.state, tuple(log)))
                except (IllegalEventError, MachineError):
                    seen.append((record.state, ("illegal",)))
            assert seen[0] == seen[1], (state, trigger, answers, seen)
            checked += 1
    return checked


def _probe_class(machine: Machine, answers: dict[str, bool], log: list[str]) -> type:
    """A record class whose guards answer from `answers` and whose actions write to `log`."""
    guards: set[str] = set()
    actions: set[str] = set()
    for state in machine.states.values():
        actions.update(map(str, (*state.on_enter, *state.on_exit)))
    for event in machine.events.values():
        for transition in itertools.chain.from_iterable(event.transitions.values()):
            guards.update(str(c.func) for c in transition.conditions)
            actions.update(map(str, (*transition.before, *transition.after)))

    def guard(name: str) -> Callable[..., bool]:
        return lambda _self, *_args: answers[name]

    def action(name: str) -> Callable[..., None]:
        return lambda self, *_args: log.append(f"{name}@{self.state.name}")

    return type("Probe", (), {**{n: guard(n) for n in guards}, **{n: action(n) for n in actions}})
