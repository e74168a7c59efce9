"""Deadlines: the soonest valid one comes first, and void ones never fire."""

from __future__ import annotations

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from moriio_proto.timers import Timers


@attrs.define(eq=False)
class Record:
    timers: dict[str, float] = attrs.field(factory=dict)


def test_arming_again_replaces() -> None:
    """A timer fires once, at the time of the last arming."""
    timers, record = Timers(), Record()
    timers.arm(record, "due_x", 1.0)
    timers.arm(record, "due_x", 3.0)
    assert timers.next_deadline() == 3.0
    assert list(timers.due(2.0)) == []
    assert list(timers.due(3.0)) == [(record, "due_x")]
    assert timers.next_deadline() is None


def test_clearing_disarms() -> None:
    """A record that cleared its timers is never fired."""
    timers, record = Timers(), Record()
    timers.arm(record, "due_x", 1.0)
    record.timers.clear()
    assert timers.next_deadline() is None
    assert list(timers.due(9.0)) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.floats(0, 10)), max_size=40), st.floats(0, 10))
def test_against_a_plain_dictionary(armings: list[tuple[int, str, float]], now: float) -> None:
    """Whatever is armed in whatever order, the heap agrees with a dictionary of last armings."""
    timers, records = Timers(), [Record() for _ in range(4)]
    last: dict[tuple[int, str], float] = {}
    for i, trigger, at in armings:
        timers.arm(records[i], trigger, at)
        last[i, trigger] = at
    fired = [(records.index(record), trigger) for record, trigger in timers.due(now)]
    assert sorted(fired) == sorted(key for key, at in last.items() if at <= now)
    left = [at for at in last.values() if at > now]
    assert timers.next_deadline() == (min(left) if left else None)
