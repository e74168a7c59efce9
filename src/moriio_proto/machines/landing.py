"""Landing: one transfer on the decode node (D).

Theory of operation
-------------------
D allocates blocks for a prompt that P computes, and waits for them.  WRITE and READ are two paths through one table:

    WRITE  queued -> announced -> closed                       P writes into D's blocks: P is the accessor
    READ   queued -> claiming -> pulling -> releasing -> closed   D reads P's blocks: D is the accessor

- QUEUED: the request waits for blocks in vLLM; claims keep P from giving the transfer up.
- In WRITE, D's blocks are lent: P may write while it holds a lease that D granted.  So an aborted landing whose
  lease was granted is FENCING: it is settled on P's word (`released`, or the end of the transfer), on its proven
  death, or at the end of the lease.  One that was never granted can be settled at once: P may not have written.
- In READ the reads are D's own: DRAINING waits for their completions.  Data counts only if the last read ended
  before the lease did, on D's clock.
- RELEASING: settled; P is being told until it acknowledges, so that its blocks are free soon.
- Each `Load` is settled exactly once.  CLOSED answers late messages until it is forgotten.
"""

from __future__ import annotations

from typing import Final

from moriio_proto.machines._landing_record import Landing
from moriio_proto.machines._states import LandingState
from moriio_proto.machines._table import compile_machine, declare, row

__all__ = ["MACHINE", "TABLE", "Landing", "LandingState"]

S = LandingState
_FRESH = [S.NEW, S.QUEUED]
_OVER = [S.RELEASING, S.CLOSED]

ROWS: Final = [
    # the caller
    row("cmd_expect", S.NEW, S.QUEUED),
    row("cmd_expect", _OVER, None),  # P told its end before we knew the request, or the id is used again
    row("cmd_load", S.QUEUED, S.CLOSED, "note_load", "settle_over", conditions="refused"),
    row("cmd_load", _FRESH, S.RELEASING, "note_load", "blame_short", "settle_over", "meet", conditions="short"),
    row("cmd_load", _FRESH, S.CLAIMING, "note_load", conditions="pulls"),
    row("cmd_load", _FRESH, S.ANNOUNCED, "note_load"),
    row("cmd_load", _OVER, None, "settle_again"),
    row("cmd_skip", _FRESH, S.RELEASING, "meet"),
    row("cmd_skip", _OVER, None),
    row("cmd_abort", S.QUEUED, S.RELEASING),
    row("cmd_abort", S.ANNOUNCED, S.FENCING, "unwant", conditions="may_be_written"),
    row("cmd_abort", [S.ANNOUNCED, S.CLAIMING], S.RELEASING, "unwant", "settle_over"),
    row("cmd_abort", S.PULLING, S.RELEASING, "unwant", "settle_over", conditions="idle"),
    row("cmd_abort", S.PULLING, S.DRAINING, "unwant"),
    row("cmd_abort", [S.FENCING, S.DRAINING], None, "unwant"),
    row("cmd_abort", [S.NEW, *_OVER], None),  # vLLM may be slow to hear that the transfer is over, and forgotten
    # P writes (WRITE)
    row("recv_claim", S.ANNOUNCED, None, "grant"),
    row("recv_claim", S.FENCING, None, "hold", "send_abort"),
    row("recv_claim", [S.NEW, *_OVER], None, "say_stop"),
    row("recv_claim", [S.QUEUED, S.CLAIMING, S.PULLING, S.DRAINING], None),
    row("recv_done", [S.ANNOUNCED, S.FENCING], None, "count_writer", conditions="more_writers"),
    row("recv_done", S.ANNOUNCED, S.CLOSED, "settle_done", "acknowledge"),
    row("recv_done", S.FENCING, S.CLOSED, "settle_over", "acknowledge"),
    row("recv_done", [S.NEW, *_OVER], None, "acknowledge"),
    row("recv_done", [S.QUEUED, S.CLAIMING, S.PULLING, S.DRAINING], None),
    row("recv_failed", S.QUEUED, None, "note_refused", "acknowledge"),
    row("recv_failed", S.ANNOUNCED, S.CLOSED, "note_refused", "settle_over", "acknowledge"),
    row("recv_failed", S.FENCING, S.CLOSED, "settle_over", "acknowledge"),
    row("recv_failed", [S.NEW, *_OVER], None, "acknowledge"),
    row("recv_failed", [S.CLAIMING, S.PULLING, S.DRAINING], None),
    # the lease on P's blocks (READ), or P's patience (WRITE, queued)
    row("recv_granted", S.QUEUED, None, "extend_queue", conditions="fresh"),
    row("recv_granted", S.CLAIMING, S.RELEASING, "settle_over", conditions="short_grant", before="blame_grant"),
    row("recv_granted", S.CLAIMING, S.PULLING, "extend_lease", "take_blocks", "pull", conditions="fresh"),
    row("recv_granted", S.PULLING, None, "extend_lease", conditions="fresh"),
    row("recv_granted", list(S), None),
    row("recv_refused", S.QUEUED, None, "note_refused"),
    row("recv_refused", S.CLAIMING, S.CLOSED, "note_refused", "settle_over"),
    row("recv_refused", S.PULLING, S.RELEASING, "note_refused", "settle_over", conditions="idle"),
    row("recv_refused", S.PULLING, S.DRAINING, "note_refused"),
    row("recv_refused", [S.NEW, S.ANNOUNCED, S.FENCING, S.DRAINING, *_OVER], None),
    # P's word that it is quiet
    row("recv_released", S.FENCING, S.CLOSED, "settle_over"),
    row("recv_released", S.RELEASING, S.CLOSED),
    row("recv_released", [S.NEW, S.QUEUED, S.ANNOUNCED, S.CLAIMING, S.PULLING, S.DRAINING, S.CLOSED], None),
    # the peer's connection
    row("cq_ready", S.QUEUED, None, "send_claim"),
    row("cq_ready", S.ANNOUNCED, None, "announce"),
    row("cq_ready", S.CLAIMING, None, "send_claim", conditions="leases"),
    row("cq_ready", S.CLAIMING, S.PULLING, "lease_unasked", "pull"),
    row("cq_ready", S.RELEASING, None, "send_release"),
    row("cq_ready", [S.PULLING, S.DRAINING, S.FENCING, S.CLOSED], None),
    row("cq_lost", S.QUEUED, None, "note_lost", before="blame"),
    row("cq_lost", [S.ANNOUNCED, S.CLAIMING], S.CLOSED, "settle_over", before="blame"),
    row("cq_lost", S.FENCING, S.CLOSED, "settle_over"),
    row("cq_lost", S.PULLING, S.CLOSED, "settle_over", conditions="idle", before="blame"),
    row("cq_lost", S.PULLING, S.DRAINING, before="blame"),
    row("cq_lost", S.DRAINING, None),
    row("cq_lost", S.RELEASING, S.CLOSED),
    row("cq_lost", S.CLOSED, None),  # a peer is buried and another one met in one step: both say so
    # reads
    row("cq_done", S.PULLING, S.RELEASING, "end_op", "settle_done", conditions=["all_read", "in_time"]),
    row("cq_done", S.PULLING, S.RELEASING, "end_op", "settle_over", conditions="all_read", before="blame_late"),
    row("cq_done", S.PULLING, None, "end_op", "watch_ops"),
    row("cq_failed", S.PULLING, S.RELEASING, "end_op", "settle_over", conditions="last_one", before="blame"),
    row("cq_failed", S.PULLING, S.DRAINING, "end_op", before="blame"),
    row("cq_refused", S.PULLING, None, "park_op"),
    *[
        r
        for trigger in ("cq_done", "cq_failed", "cq_refused")
        for r in (
            row(trigger, S.DRAINING, S.RELEASING, "end_op", "settle_over", conditions="last_one"),
            row(trigger, S.DRAINING, None, "end_op"),
        )
    ],
    # timers
    row("due_retry", [S.QUEUED, S.CLAIMING, S.PULLING], None, "claim_again"),
    row("due_retry", S.ANNOUNCED, None, "announce"),
    row("due_retry", S.FENCING, None, "send_abort"),
    row("due_retry", S.RELEASING, None, "send_release"),
    row("due_repost", S.PULLING, None, "repost"),
    row("due_lease", S.ANNOUNCED, S.CLOSED, "settle_over", "say_stop", before="blame"),
    row("due_lease", S.FENCING, S.CLOSED, "settle_over"),
    *[
        r
        for trigger in ("due_lease", "due_stuck", "due_deadline")
        for r in (
            row(trigger, S.PULLING, S.RELEASING, "settle_over", conditions="idle", before="blame"),
            row(trigger, S.PULLING, S.DRAINING, before="blame"),
        )
    ],
    row("due_drain", S.DRAINING, None, "force_quiet"),
    row("due_deadline", S.ANNOUNCED, S.FENCING, conditions="may_be_written", before="blame"),
    row("due_deadline", [S.ANNOUNCED, S.CLAIMING], S.RELEASING, "settle_over", before="blame"),
    row("due_deadline", S.RELEASING, S.CLOSED),
    row("due_forget", S.CLOSED, None, "forget"),
]

MACHINE: Final = declare(
    "landing", LandingState, S.NEW, [S.CLOSED], ROWS,
    enter={
        S.QUEUED: "enter_queued", S.ANNOUNCED: "enter_announced", S.FENCING: "enter_fencing",
        S.CLAIMING: "enter_claiming", S.PULLING: "enter_pulling", S.DRAINING: "enter_draining",
        S.RELEASING: "enter_releasing", S.CLOSED: "enter_closed",
    },
)  # fmt: skip

TABLE: Final = compile_machine(MACHINE, Landing)
