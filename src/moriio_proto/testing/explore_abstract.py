"""The WRITE transfer that specs/tla/Transfer.tla models, for the breadth-first search: both must count the same worlds.

Rows come from the real tables; what their guards and actions mean is said here a second time, in the coarsest terms
that still tell a safe protocol from an unsafe one: one block, one post, a peer that is always ready, a network that
is a set, and the lease as one rule instead of clocks: D's hold never ends before P's lease does, and a grant that
comes after the hold is void.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from moriio_proto.machines import landing, offer
from moriio_proto.machines._table import Compiled, Row
from moriio_proto.testing.explore import Model, Move

__all__ = ["AbstractWorld", "AbstractWrite"]

_TO_PREFILL: Final = {
    "blocks": "recv_blocks",
    "granted": "recv_granted",
    "release": "recv_release",
    "abort": "recv_abort",
}
_TO_DECODE: Final = {"claim": "recv_claim", "done": "recv_done", "failed": "recv_failed", "released": "recv_released"}


class AbstractWorld(NamedTuple):
    """One world; the fields are the variables of the TLA+ module."""

    p: str
    d: str
    pend: int = 0
    please: bool = False
    comp: bool = False
    posted: bool = False
    req: bool = False
    handed: bool = False
    pset: bool = False
    failed: bool = False
    quiet: bool = False
    ann: bool = False
    granted: bool = False
    gone: bool = False
    load: int = 0
    landed: bool = False
    bad: bool = False
    net: frozenset[str] = frozenset()


class AbstractWrite(Model[AbstractWorld]):
    """The model; `early_free` drops the row that fences an aborted landing."""

    def __init__(self, *, early_free: bool = False) -> None:
        self._p, self._d = _by_state(offer.TABLE), _by_state(landing.TABLE)
        if early_free:
            rows = self._d["cmd_abort", "ANNOUNCED"]
            self._d["cmd_abort", "ANNOUNCED"] = [r for r in rows if "may_be_written" not in r.guard_names]

    def initial(self) -> AbstractWorld:
        """Nothing has happened."""
        return AbstractWorld(offer.TABLE.initial.name, landing.TABLE.initial.name)

    def check(self, w: AbstractWorld) -> str:
        """What `Safe` says in TLA+."""
        if w.bad:
            return "settled twice, too early, without data, or an event without a row"
        return "P may still write into blocks that D has given back" if w.pend and w.please and w.load != 1 else ""

    def finished(self, w: AbstractWorld) -> bool:
        """What `Done` says in TLA+."""
        return w.p in ("NEW", "FREED") and w.d in ("NEW", "CLOSED") and w.req <= w.pset and w.load != 1

    def helpful(self, move: Move) -> bool:
        """The fair moves."""
        return move[0] not in ("start", "abort", "load", "D.abort")

    def describe(self, world: AbstractWorld, move: Move) -> str:
        """One line of a trace."""
        return f"{' '.join(map(str, move)):<24}[{world.p}; {world.d}]"

    def successors(self, w: AbstractWorld) -> Iterator[tuple[Move, AbstractWorld]]:
        """Every move."""
        for name, trigger in self._prefill_events(w):
            before = w._replace(comp=True) if name == "progress" else w
            yield (name,), self._fire_p(before, trigger)
        if w.pend:
            yield ("ok",), self._fire_p(w._replace(landed=True), "cq_done")
        if w.please:
            over = w._replace(please=False)
            yield ("lapse",), self._fire_p(over, "due_lease") if ("due_lease", w.p) in self._p else over
        for name, trigger in self._decode_events(w):
            yield (name,), self._fire_d(w, trigger)
        if not w.please and ("due_lease", w.d) in self._d:
            yield ("D.lease",), self._fire_d(w._replace(granted=False, net=w.net - {"granted"}), "due_lease")
        for letter in sorted(w.net):
            if letter in _TO_PREFILL:
                yield ("deliver", letter), self._fire_p(w, _TO_PREFILL[letter])
            else:
                yield ("deliver", letter), self._fire_d(w, _TO_DECODE[letter])

    def _prefill_events(self, w: AbstractWorld) -> Iterator[tuple[str, str]]:
        if not w.req:
            yield "start", "cmd_offer"
        elif not w.handed:
            yield ("finish", "cmd_finish") if w.comp else ("progress", "cmd_progress")
            yield "abort", "cmd_abort"
        if w.pend:
            yield "err", "cq_failed"
        timers = ["due_retry", "due_deadline", "due_drain", *(["due_stuck"] if w.pend else [])]
        yield from ((t, t) for t in timers if (t, w.p) in self._p)
        if w.p == "OFFERED":
            yield "expire", "due_lease"

    def _decode_events(self, w: AbstractWorld) -> Iterator[tuple[str, str]]:
        yield ("load", "cmd_load") if w.load == 0 else ("D.abort", "cmd_abort")
        yield from ((f"D.{t}", t) for t in ("due_retry", "due_deadline") if (t, w.d) in self._d)

    def _fire_p(self, w: AbstractWorld, trigger: str) -> AbstractWorld:
        row = _taken(self._p.get((trigger, w.p), []), _prefill_guards(w))
        if row is None:
            return w._replace(bad=True)
        acts = set(row.action_names)
        handed, failed = w.handed or "hand_over" in acts, w.failed or bool(acts & {"fail", "refuse_blocks"})
        please = w.please or "extend_lease" in acts
        pumps = "pump" in acts and please and w.comp and not w.posted
        pend = w.pend - ("end_op" in acts) + pumps
        settles = "settle_now" in acts or ("settle_if_owed" in acts and handed and not w.pset)
        return w._replace(
            p=row.dest.name, pend=pend, please=please, posted=w.posted or pumps, handed=handed, failed=failed,
            req=w.req or bool(acts & {"adopt", "adopt_over"}), quiet=w.quiet or bool(acts & {"give_up", "peer_gone"}),
            pset=w.pset or settles, bad=settles and (w.pset or pend > 0 or not handed),
            net=w.net | _prefill_sends(acts, row.dest.name, failed),
        )  # fmt: skip

    def _fire_d(self, w: AbstractWorld, trigger: str) -> AbstractWorld:
        row = _taken(self._d.get((trigger, w.d), []), _decode_guards(w))
        if row is None:
            return w._replace(bad=True)
        acts = set(row.action_names)
        load = 1 if "note_load" in acts else w.load
        settles = bool(acts & {"settle_done", "settle_over"})
        wrong = settles and (load != 1 or ("settle_done" in acts and not w.landed))
        return w._replace(
            d=row.dest.name, ann=w.ann or bool(acts & {"announce", "enter_announced"}),
            granted=w.granted or bool(acts & {"grant", "hold"}), gone=w.gone or "note_refused" in acts,
            load=2 if settles else load, bad=wrong, net=w.net | _decode_sends(acts),
        )  # fmt: skip


def _by_state(table: Compiled) -> dict[tuple[str, str], list[Row]]:
    return {(t, s.name): list(rows) for t, by_state in table.table.items() for s, rows in by_state.items()}


def _taken(rows: list[Row], holds: set[str]) -> Row | None:
    return next((r for r in rows if all(g in holds for g in r.guard_names)), None)


def _prefill_guards(w: AbstractWorld) -> set[str]:
    facts: dict[str, Any] = {
        "idle": w.pend == 0, "last_one": w.pend == 1, "all_landed": w.pend == 1, "nobody_to_tell": w.quiet,
        "owed": w.req and not w.pset, "leases": True, "fresh": True, "all_released": True,
    }  # fmt: skip
    return {name for name, holds in facts.items() if holds}


def _decode_guards(w: AbstractWorld) -> set[str]:
    facts = {"may_be_written": w.ann and w.granted, "refused": w.gone, "leases": True, "fresh": True}
    return {name for name, holds in facts.items() if holds}


def _prefill_sends(acts: set[str], dest: str, failed: bool) -> set[str]:
    asks = bool(acts & {"send_claim", "claim_again"}) or ("meet_peer" in acts and dest == "CLAIMING")
    ends = {"failed" if failed else "done"} if acts & {"tell", "refuse_blocks"} else set()
    return ends | ({"claim"} if asks else set()) | ({"released"} if "acknowledge" in acts else set())


_DECODE_SENDS: Final = {
    "blocks": {"announce", "enter_announced"},
    "granted": {"grant"},
    "abort": {"send_abort", "say_stop", "enter_fencing"},
    "release": {"send_release", "acknowledge", "enter_releasing"},
}


def _decode_sends(acts: set[str]) -> set[str]:
    return {letter for letter, names in _DECODE_SENDS.items() if acts & names}
