"""Offer: one transfer on the prefill node (P).

Theory of operation
-------------------
P computes the blocks of a prompt and lends them.  WRITE and READ are two paths through one table:

    WRITE  computing -> claiming -> pushing -> notifying -> freed      P writes into D's blocks: P is the accessor
    READ   computing -> offered -> leased -> freed                     D reads P's blocks: D is the accessor

- vLLM owns the blocks until it *hands them over* (`cmd_finish`, `cmd_abort`); from then on they are ours until
  `Settled`, which is emitted once, when they are handed over *and* nothing can touch them any more.  Either order of
  the two happens: a fast D may be served before vLLM has finished the request.
- D's announcement (`recv_blocks`) may come before vLLM has the request (EXPECTED), while it computes, or after it
  is done (OFFERED).  A duplicate is a row in every state.
- In WRITE nothing is posted before D granted a lease on *its* blocks, and nothing after the lease ended.
- DRAINING is between "decided" and "free": posted operations are still under way.  It goes on claiming, so that D
  keeps its blocks as long as we may touch them.
- NOTIFYING: our blocks are quiet and settled; D is being told (`write_done`, failed or not) until it acknowledges
  with `release`.  To a peer without acknowledgements it is sent once.
- `cmd_preempt`: vLLM took the blocks back and computes them again into others.  What was posted is garbage-tolerant
  (D has not been told), but must end before anything is posted again: `stale` counts it.
- FREED answers late messages until it is forgotten.

What the table cannot say: `cmd_progress` always posts at least one rectangle when it completes the goal, because the
last block of the goal is never complete before; so completion is always seen in `cq_done`.
"""

from __future__ import annotations

from typing import Final

from moriio_proto.machines._offer_record import Offer
from moriio_proto.machines._states import OfferState
from moriio_proto.machines._table import compile_machine, declare, row

__all__ = ["MACHINE", "TABLE", "Offer", "OfferState"]

S = OfferState
_PUSH = [S.CLAIMING, S.PUSHING]

# fmt: off
ROWS: Final = [
    # the caller
    row("cmd_offer", S.NEW, S.COMPUTING, "adopt", "meet_peer"),
    row("cmd_offer", S.EXPECTED, S.COMPUTING, "turn_away", "adopt", "meet_peer", conditions="other_prompt"),
    row("cmd_offer", S.EXPECTED, S.CLAIMING, "adopt", "meet_peer"),
    row("cmd_offer", [S.NOTIFYING, S.FREED], None, "adopt_over"),  # D gave up first, or the id is used again
    row("cmd_progress", [S.COMPUTING, S.CLAIMING], None, "note_progress"),
    row("cmd_progress", S.PUSHING, None, "note_progress", "pump"),
    row("cmd_progress", [S.NOTIFYING, S.DRAINING, S.FREED], None),
    row("cmd_preempt", [S.COMPUTING, S.CLAIMING, S.PUSHING], None, "start_over"),
    row("cmd_preempt", [S.NOTIFYING, S.DRAINING, S.FREED], None),
    row("cmd_finish", S.COMPUTING, S.FREED, "hand_over", "settle_now", conditions="all_released_early"),
    row("cmd_finish", S.COMPUTING, S.LEASED, "hand_over", "grant", conditions="claimed"),
    row("cmd_finish", S.COMPUTING, S.OFFERED, "hand_over"),
    row("cmd_finish", [S.CLAIMING, S.PUSHING, S.DRAINING], None, "hand_over"),
    row("cmd_finish", [S.NOTIFYING, S.FREED], None, "hand_over", "settle_now"),
    row("cmd_abort", S.COMPUTING, S.FREED, "hand_over", "settle_now", before="blame"),
    row("cmd_abort", _PUSH, S.NOTIFYING, "fail", "hand_over", "settle_now", "tell", conditions="idle", before="blame"),
    row("cmd_abort", _PUSH, S.DRAINING, "fail", "hand_over", "drain", before="blame"),
    row("cmd_abort", S.DRAINING, None, "hand_over"),
    row("cmd_abort", [S.NOTIFYING, S.FREED], None, "hand_over", "settle_now"),
    # D's blocks (WRITE)
    row("recv_blocks", S.NEW, S.EXPECTED, "note_blocks"),
    row("recv_blocks", [S.COMPUTING, S.OFFERED], S.CLAIMING, "note_blocks", "meet_peer"),
    row("recv_blocks", [S.EXPECTED, S.CLAIMING, S.PUSHING, S.DRAINING, S.LEASED], None),
    row("recv_blocks", S.NOTIFYING, None, "tell"),
    row("recv_blocks", S.FREED, None, "refuse_blocks"),
    # D's interest: in READ it is about to read, in WRITE it queues
    row("recv_claim", S.NEW, None, "refuse", conditions="pulled"),
    row("recv_claim", [S.NEW, S.EXPECTED, S.CLAIMING, S.PUSHING, S.DRAINING, S.NOTIFYING], None),
    row("recv_claim", S.COMPUTING, None, "note_claim", conditions="pulled"),
    row("recv_claim", S.COMPUTING, None, "note_claim", "grant"),
    row("recv_claim", S.OFFERED, S.LEASED, "note_claim", "grant", conditions="pulled"),
    row("recv_claim", S.OFFERED, None, "note_claim", "grant", "wait_longer"),
    row("recv_claim", S.LEASED, None, "note_claim", "grant", "extend_hold"),
    row("recv_claim", S.FREED, None, "refuse"),
    # the lease on D's blocks (WRITE)
    row("recv_granted", S.CLAIMING, S.PUSHING, "extend_lease", "pump", conditions="fresh"),
    row("recv_granted", S.PUSHING, None, "extend_lease", "pump", conditions="fresh"),
    row("recv_granted", list(S), None),
    # D has what it needs, or gives up
    row("recv_release", S.COMPUTING, None, "count_release", "acknowledge", conditions="pulled"),
    *[
        r
        for trigger in ("recv_release", "recv_abort")
        for r in (
            row(trigger, [S.NEW, S.EXPECTED, S.COMPUTING], S.FREED, "give_up", "acknowledge"),
            row(trigger, [S.OFFERED, S.LEASED], S.FREED, "settle_if_owed", "acknowledge", conditions="all_released"),
            row(trigger, [S.OFFERED, S.LEASED], None, "count_release", "acknowledge"),
            row(trigger, S.CLAIMING, S.FREED, "give_up", "settle_if_owed", "acknowledge"),
            row(trigger, S.PUSHING, S.FREED, "give_up", "settle_if_owed", "acknowledge", conditions="idle"),
            row(trigger, S.PUSHING, S.DRAINING, "give_up", "drain"),
            row(trigger, S.DRAINING, None, "give_up"),
            row(trigger, [S.NOTIFYING, S.FREED], S.FREED, "acknowledge"),
        )
    ],
    # the peer's connection
    row("cq_ready", S.CLAIMING, None, "send_claim", conditions="leases"),
    row("cq_ready", S.CLAIMING, S.PUSHING, "lease_unasked", "pump"),
    row("cq_ready", S.NOTIFYING, None, "tell"),
    row("cq_ready", [S.COMPUTING, S.PUSHING, S.OFFERED, S.LEASED, S.DRAINING, S.FREED], None),
    row("cq_lost", S.CLAIMING, S.FREED, "settle_if_owed", before="blame"),
    row("cq_lost", S.PUSHING, S.FREED, "settle_if_owed", conditions="idle", before="blame"),
    row("cq_lost", S.PUSHING, S.DRAINING, "peer_gone", "drain", before="blame"),
    row("cq_lost", S.NOTIFYING, S.FREED),
    row("cq_lost", S.DRAINING, None, "peer_gone"),
    row("cq_lost", [S.COMPUTING, S.OFFERED, S.LEASED, S.FREED], None),
    # posted operations
    row("cq_done", S.PUSHING, S.NOTIFYING, "end_op", "settle_if_owed", "tell", conditions="all_landed"),
    row("cq_done", S.PUSHING, None, "end_op", "watch_ops", "pump"),
    row("cq_failed", S.PUSHING, None, "end_op", "watch_ops", "pump", conditions="was_stale"),
    row(
        "cq_failed", S.PUSHING, S.NOTIFYING, "fail", "end_op", "settle_if_owed", "tell",
        conditions="last_one", before="blame",
    ),
    row("cq_failed", S.PUSHING, S.DRAINING, "fail", "end_op", "drain", before="blame"),
    row("cq_refused", S.PUSHING, None, "end_op", "watch_ops", "pump", conditions="was_stale"),
    row("cq_refused", S.PUSHING, None, "park_op"),
    *[
        r
        for trigger in ("cq_done", "cq_failed", "cq_refused")
        for r in (
            row(
                trigger, S.DRAINING, S.FREED, "end_op", "settle_if_owed", "acknowledge",
                conditions=["last_one", "nobody_to_tell"],
            ),
            row(trigger, S.DRAINING, S.NOTIFYING, "end_op", "settle_if_owed", "tell", conditions="last_one"),
            row(trigger, S.DRAINING, None, "end_op"),
        )
    ],
    # timers
    row("due_retry", [S.CLAIMING, S.PUSHING, S.DRAINING], None, "claim_again"),
    row("due_retry", S.NOTIFYING, None, "tell"),
    row("due_repost", S.PUSHING, None, "repost"),
    row("due_lease", [S.OFFERED, S.LEASED], S.FREED, "settle_if_owed", before="blame"),
    *[
        r
        for trigger in ("due_lease", "due_stuck")
        for r in (
            row(trigger, S.PUSHING, S.NOTIFYING, "fail", "settle_if_owed", "tell", conditions="idle", before="blame"),
            row(trigger, S.PUSHING, S.DRAINING, "fail", "drain", before="blame"),
        )
    ],
    row("due_drain", S.DRAINING, None, "force_quiet"),
    row("due_deadline", S.EXPECTED, S.FREED, "refuse_blocks", before="blame"),
    row("due_deadline", S.CLAIMING, S.NOTIFYING, "fail", "settle_if_owed", "tell", before="blame"),
    row("due_deadline", S.NOTIFYING, S.FREED),
    row("due_forget", S.FREED, None, "remember", conditions="owed"),
    row("due_forget", S.FREED, None, "forget"),
]
# fmt: on

MACHINE: Final = declare(
    "offer", OfferState, S.NEW, [S.FREED], ROWS,
    enter={
        S.EXPECTED: "enter_expected", S.COMPUTING: "stop_timers", S.CLAIMING: "enter_claiming",
        S.PUSHING: "stop_timers", S.NOTIFYING: "enter_notifying", S.OFFERED: "enter_offered",
        S.LEASED: "extend_hold", S.DRAINING: "stop_timers", S.FREED: "enter_freed",
    },
)  # fmt: skip

TABLE: Final = compile_machine(MACHINE, Offer)
