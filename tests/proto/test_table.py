"""The compiled table: what it refuses at import, and that it does what the stock engine does."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
from transitions import Machine
from transitions.core import State as StockState

from moriio_proto.errors import DeclarationError, IllegalEventError
from moriio_proto.machines import landing, offer, peer, registration
from moriio_proto.machines._table import Compiled, State, compile_machine, row
from moriio_proto.testing import check_against_stock

MACHINES = [
    (offer, offer.OfferState),
    (landing, landing.LandingState),
    (peer, peer.PeerState),
    (registration, registration.R),
]


class S(State):
    A = "a"
    B = "b"
    Z = "z"


@attrs.define(eq=False)
class Record:
    state: State = S.A

    def yes(self, *_: Any) -> bool:
        return True

    def act(self, *_: Any) -> None: ...


GO = row("go", S.A, S.B)


def build(*rows: dict[str, Any], **more: Any) -> Compiled:
    args: dict[str, Any] = {
        "model": None, "states": S, "initial": S.A, "auto_transitions": False, "name": "toy", "transitions": list(rows)
    }  # fmt: skip
    return compile_machine(Machine(**{**args, **more}), Record)


@pytest.mark.parametrize(
    ("words", "rows", "more"),
    [
        ("has no method 'nope'", ({**GO, "after": "nope"},), {}),
        ("unknown state 'AA'", ({**GO, "source": "AA"},), {}),
        ("unknown state 'BB'", ({**GO, "dest": "BB"},), {}),
        ("no row for 'every guard refused'", ({**GO, "conditions": "yes"},), {}),
        ("can never be reached", (GO, {**GO, "conditions": "yes"}, GO), {}),
        ("name a method", ({**GO, "after": lambda: None},), {}),
        ("prepare on go", ({**GO, "prepare": "act"},), {}),
        ("finalize_event is not compiled", (GO,), {"finalize_event": "act"}),
        ("with model=None", (GO,), {"queued": True}),
        ("with model=None", (GO,), {"auto_transitions": True}),
        ("no initial state", (GO,), {"initial": None}),
        (
            "not a member of a State enum",
            ({"trigger": "go", "source": "x", "dest": "y"},),
            {"states": ["x", "y"], "initial": "x"},
        ),
        (
            "leaves the final state Z",
            (GO, {"trigger": "back", "source": S.Z, "dest": S.A}),
            {"states": [StockState(S.A), StockState(S.B), StockState(S.Z, final=True)]},
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_import(
    words: str, rows: tuple[dict[str, Any], ...], more: dict[str, Any]
) -> None:
    """A declaration that the table would run differently, or not at all, never compiles."""
    with pytest.raises(DeclarationError, match=words):
        build(*rows, **more)


@pytest.mark.parametrize(("module", "states"), MACHINES)
def test_tables_do_what_the_stock_engine_does(module: Any, states: type[State]) -> None:
    """Every (state, trigger, guard outcome) ends in the same state with the same actions in the same order."""
    assert check_against_stock(module.MACHINE, states) >= len(states) * len(module.TABLE.table)


@pytest.mark.parametrize(("module", "states"), MACHINES)
def test_every_cell_moves_answers_or_raises(module: Any, states: type[State]) -> None:
    """A (state, trigger) without a row raises, names all three, and leaves the record as it was."""
    for state, trigger in itertools.product(states, module.TABLE.table):
        if state in module.TABLE.table[trigger]:
            continue
        record = Record(state=state)
        with pytest.raises(IllegalEventError) as caught:
            module.TABLE.fire(record, trigger)
        assert record.state is state
        for part in (module.TABLE.name, state.name, trigger):
            assert part in str(caught.value)


@pytest.mark.parametrize(("module", "states"), MACHINES)
def test_triggers_carry_their_direction(module: Any, states: type[State]) -> None:
    """Rule 11: every trigger begins with who speaks."""
    assert all(trigger.split("_")[0] in {"recv", "cmd", "cq", "due"} for trigger in module.TABLE.table)


@pytest.mark.parametrize(("module", "states"), MACHINES)
def test_every_state_can_be_entered(module: Any, states: type[State]) -> None:
    """No state is declared that no row leads to."""
    entered = {r.dest for r in module.TABLE.rows() if r.dest is not r.source} | {module.TABLE.initial}
    assert entered == set(states)
