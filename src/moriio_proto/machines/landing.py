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

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from moriio_proto.machines._table import State, compile_machine, declare, row
from moriio_proto.machines._transfer import Transfer
from moriio_proto.wire.messages import Abort, Claim, Granted, Mode, Release, RemoteBlocks

if TYPE_CHECKING:
    from moriio_proto.core import Core

__all__ = ["MACHINE", "TABLE", "Landing", "LandingState"]


class LandingState(State):
    """Where a landing is."""

    NEW = "nothing known"
    QUEUED = "the request waits for blocks"
    ANNOUNCED = "WRITE: blocks are P's to fill"
    FENCING = "WRITE: given up, P may still write"
    CLAIMING = "READ: the lease on P's blocks is asked for"
    PULLING = "READ: reads are posted"
    DRAINING = "READ: given up, reads are under way"
    RELEASING = "settled, P is being told"
    CLOSED = "over; answers late messages"


S = LandingState
_OVER = [S.RELEASING, S.CLOSED]

ROWS: Final = [
    # the caller
    row("cmd_expect", S.NEW, S.QUEUED),
    row("cmd_expect", S.CLOSED, None),  # P told its end before we knew the request
    row("cmd_load", S.QUEUED, S.CLOSED, "note_load", "settle_over", conditions="refused"),
    row("cmd_load", [S.NEW, S.QUEUED], S.RELEASING, "note_load", "blame_short", "settle_over", "meet", conditions="short"),
    row("cmd_load", [S.NEW, S.QUEUED], S.CLAIMING, "note_load", conditions="pulls"),
    row("cmd_load", [S.NEW, S.QUEUED], S.ANNOUNCED, "note_load"),
    row("cmd_load", S.CLOSED, None, "settle_again"),
    row("cmd_skip", [S.NEW, S.QUEUED], S.RELEASING, "meet"),
    row("cmd_skip", S.CLOSED, None),
    row("cmd_abort", S.QUEUED, S.RELEASING),
    row("cmd_abort", S.ANNOUNCED, S.FENCING, "unwant", conditions="may_be_written"),
    row("cmd_abort", [S.ANNOUNCED, S.CLAIMING], S.RELEASING, "unwant", "settle_over"),
    row("cmd_abort", S.PULLING, S.RELEASING, "unwant", "settle_over", conditions="idle"),
    row("cmd_abort", S.PULLING, S.DRAINING, "unwant"),
    row("cmd_abort", [S.FENCING, S.DRAINING], None, "unwant"),
    row("cmd_abort", _OVER, None),
    # P writes (WRITE)
    row("recv_claim", S.ANNOUNCED, None, "grant"),
    row("recv_claim", S.FENCING, None, "hold", "send_abort"),
    row("recv_claim", [S.NEW, *_OVER], None, "say_stop"),
    row("recv_claim", [S.QUEUED, S.CLAIMING, S.PULLING, S.DRAINING], None),
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
    row("recv_granted", S.CLAIMING, S.PULLING, "extend_lease", "pull", conditions="fresh"),
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
    row("cq_ready", [S.PULLING, S.DRAINING, S.FENCING], None),
    row("cq_lost", S.QUEUED, None, "note_lost", before="blame"),
    row("cq_lost", [S.ANNOUNCED, S.CLAIMING], S.CLOSED, "settle_over", before="blame"),
    row("cq_lost", S.FENCING, S.CLOSED, "settle_over"),
    row("cq_lost", S.PULLING, S.CLOSED, "settle_over", conditions="idle", before="blame"),
    row("cq_lost", S.PULLING, S.DRAINING, before="blame"),
    row("cq_lost", S.DRAINING, None),
    row("cq_lost", S.RELEASING, S.CLOSED),
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


@attrs.define(eq=False)
class Landing(Transfer):
    """The record of one transfer on the decode node."""

    state: State = S.NEW
    blocks: Sequence[int] = ()  # ours, from position `first_block`
    first_block: int = 0
    remote_blocks: Sequence[int] = ()  # P's, by position (READ)
    known_at: float = math.inf  # when the request came to this node
    announced: bool = False  # WRITE: P has been told our blocks
    granted_until: float = -math.inf  # WRITE: P may write until then, own clock
    unwanted: bool = False  # the request was aborted
    gone: bool = False  # P said that it will not deliver, or is gone

    # --- guards ---------------------------------------------------------------------------------------------------

    def pulls(self, core: Core, event: Any) -> bool:
        """READ mode."""
        return core.mode is Mode.READ

    def refused(self, core: Core, event: Any) -> bool:
        """P has already said no."""
        return self.gone

    def may_be_written(self, core: Core, event: Any) -> bool:
        """P holds a lease on our blocks, or is a peer that takes an announcement for one."""
        leases = self.peer is not None and self.peer.leases
        return self.announced and (not leases or core.now < self.granted_until)

    def short(self, core: Core, event: Any) -> bool:
        """READ: P offers fewer blocks than the prompt fills."""
        return core.mode is Mode.READ and len(event.remote_blocks) < event.first_block + len(event.blocks)

    def all_read(self, core: Core, event: Any) -> bool:
        """The last read ended, and none waits to be tried again."""
        return len(self.pending) == 1 and not self.parked

    def in_time(self, core: Core, event: Any) -> bool:
        """P was still bound to keep the blocks when the last read ended."""
        return core.now < self.lease_until

    # --- what is known --------------------------------------------------------------------------------------------

    def meet(self, core: Core, event: Any) -> None:
        """Know P, and ask for its handshake."""
        core.attach(self, event.peer)
        core.need(self)

    def note_load(self, core: Core, event: Any) -> None:
        """Keep where the blocks go."""
        self.owner = event.owner
        self.blocks, self.first_block, self.remote_blocks = event.blocks, event.first_block, event.remote_blocks

    def blame_short(self, core: Core, event: Any) -> None:
        """Not all of the prompt can be read."""
        have, want = len(event.remote_blocks), event.first_block + len(event.blocks)
        self.reason = f"the prefill node offers {have} blocks, expected at least {want}"

    def note_refused(self, core: Core, event: Any) -> None:
        """P will not deliver."""
        self.gone = True
        self.reason = self.reason or event.message.reason or "the prefill node gave up"

    def note_lost(self, core: Core, event: Any) -> None:
        """P is dead, or cannot be reached."""
        self.gone = True

    def lease_unasked(self, core: Core, event: Any) -> None:
        """A peer without leases keeps its blocks for upstream's timer, counted from before we heard of it."""
        self.lease_until = self.known_at + core.timing.upstream_hold
        core.arm(self, "due_lease", self.lease_until)

    # --- WRITE: lending our blocks --------------------------------------------------------------------------------

    def announce(self, core: Core, event: Any) -> None:
        """Tell P our blocks; repeated until P claims them, where it can."""
        assert self.peer is not None
        leases = self.peer.leases
        if leases and not self.announced:
            core.arm(self, "due_lease", core.now + core.timing.transfer_timeout)  # P claims by then, or never
        if self.peer.ready and (leases or not self.announced):
            first, token = (self.first_block, core.token) if leases else (0, "")
            self.announced, self.incarnation = True, self.peer.token
            blocks = (list(self.blocks),)
            core.send(self.peer, RemoteBlocks(self.id, req_id="", blocks=blocks, decode_rank=core.dp_rank, first_block=first, token=token))
        if leases:
            self.resend_later(core, core.timing.retry)

    def grant(self, core: Core, event: Any) -> None:
        """P may write for a lease from its claim; we count from now, and a margin on top."""
        assert self.peer is not None
        self.resends = 0
        self.timers.pop("due_retry", None)
        self.hold(core, event)
        core.send(self.peer, Granted(self.id, token=core.token, lease_ms=core.lease_ms, stamp=event.message.stamp))

    def hold(self, core: Core, event: Any) -> None:
        """P says that it still touches our blocks."""
        self.granted_until = core.now + core.timing.lease + core.timing.margin
        core.arm(self, "due_lease", self.granted_until)

    def say_stop(self, core: Core, event: Any) -> None:
        """P may think that this transfer is alive: ask it to stop."""
        if self.route is not None:
            core.reply(self.route, Abort(self.id, token=core.token))

    def acknowledge(self, core: Core, event: Any) -> None:
        """We know the end: P need not tell it again (only a peer that waits for it)."""
        if event.message.token:
            core.reply(self.route, Release(self.id, consumer_tp_size=core.tp_size, token=core.token))

    # --- READ: reading P's blocks ---------------------------------------------------------------------------------

    def extend_queue(self, core: Core, event: Any) -> None:
        """P waits for us; keep it waiting."""
        self.resends = 0
        core.arm(self, "due_retry", core.now + core.timing.lease / 3)

    def claim_again(self, core: Core, event: Any) -> None:
        """Ask for (more of) the lease; meet the peer again where the connection was lost."""
        assert self.peer is not None
        if self.peer.ready:
            self.send_claim(core, event)
        else:
            core.need(self)
            self.resend_later(core, core.timing.retry)

    def send_claim(self, core: Core, event: Any) -> None:
        """Ask for the lease, or for more of it."""
        assert self.peer is not None
        self.incarnation = self.peer.token
        if self.peer.leases:
            core.send(self.peer, Claim(self.id, token=core.token, stamp=core.stamp()))
        self.resend_later(core, core.timing.retry)

    def pull(self, core: Core, event: Any) -> None:
        """Read all blocks at once: position by position, only those that we do not have."""
        first = self.first_block
        remote = self.remote_blocks[first : first + len(self.blocks)]
        self.post(core, (0, core.num_layers), self.blocks, remote)

    def send_abort(self, core: Core, event: Any) -> None:
        """Ask P to stop and to say when it is quiet; repeated until it does."""
        assert self.peer is not None
        core.send(self.peer, Abort(self.id, token=core.token))
        self.resend_later(core, core.timing.retry)

    def send_release(self, core: Core, event: Any) -> None:
        """Tell P that we need nothing more; repeated until it acknowledges, where it can."""
        assert self.peer is not None
        if self.peer.ready:
            token = core.token if self.peer.leases else ""
            core.send(self.peer, Release(self.id, consumer_tp_size=core.tp_size, token=token))
            if not self.peer.leases:
                core.arm(self, "due_deadline", core.now)
        self.resend_later(core, core.timing.retry)

    # --- settling -------------------------------------------------------------------------------------------------

    def settle_done(self, core: Core, event: Any) -> None:
        """The blocks are filled, and it is proven."""
        self.settle(core, "done")

    def settle_over(self, core: Core, event: Any) -> None:
        """The blocks are quiet and not filled."""
        self.settle(core, "aborted" if self.unwanted else "failed")

    def settle_again(self, core: Core, event: Any) -> None:
        """A second request came with the id of a transfer that is over."""
        self.owner, self.settled, self.reason = event.owner, False, "a transfer with this id is over already"
        self.settle_over(core, event)

    def unwant(self, core: Core, event: Any) -> None:
        """The request that wanted the blocks has ended."""
        self.unwanted = True
        self.reason = self.reason or "the request was aborted"

    def blame_late(self, core: Core, event: Any) -> None:
        """The data came after the lease ended."""
        self.reason = self.reason or "the prefill node's lease ended before the last read did"

    # --- entering states ------------------------------------------------------------------------------------------

    def enter_queued(self, core: Core, event: Any) -> None:
        """Let P know that somebody is coming."""
        self.known_at = core.now
        self.meet(core, event)

    def enter_announced(self, core: Core, event: Any) -> None:
        """Announce as soon as P's handshake says how."""
        self.begin(core, event)
        core.arm(self, "due_deadline", core.now + core.timing.recv_abort_timeout)

    def enter_claiming(self, core: Core, event: Any) -> None:
        """Claim as soon as there is a session to read through."""
        self.begin(core, event)
        core.arm(self, "due_deadline", core.now + core.timing.transfer_timeout)

    def begin(self, core: Core, event: Any) -> None:
        """What the two ways of loading share."""
        self.timers.clear()
        self.resends = 0
        self.known_at = min(self.known_at, core.now)
        self.meet(core, event)

    def enter_pulling(self, core: Core, event: Any) -> None:
        """Reads are bounded by the lease, by silence of the transport, and by the caller's patience."""
        self.timers.clear()
        core.arm(self, "due_deadline", core.now + core.timing.recv_abort_timeout)

    def enter_draining(self, core: Core, event: Any) -> None:
        """Wait for our own reads."""
        self.timers.clear()
        self.cancel_ops(core, event)

    def enter_fencing(self, core: Core, event: Any) -> None:
        """Wait for P's word; without one, for the end of what it was granted."""
        self.timers.clear()
        self.resends = 0
        until = self.granted_until if self.leases(core, event) else core.now + core.timing.upstream_hold
        core.arm(self, "due_lease", until)
        if self.leases(core, event):
            self.send_abort(core, event)

    def enter_releasing(self, core: Core, event: Any) -> None:
        """Tell P, as soon as its handshake says how; give up when it stays silent."""
        self.timers.clear()
        self.resends = 0
        self.parked.clear()
        core.arm(self, "due_deadline", core.now + core.timing.transfer_timeout)
        if self.peer is not None:
            core.need(self)

    def enter_closed(self, core: Core, event: Any) -> None:
        """Stay for a while to answer what is late."""
        self.timers.clear()
        self.parked.clear()
        core.detach(self)
        core.arm(self, "due_forget", core.now + core.timing.forget)


TABLE: Final = compile_machine(MACHINE, Landing)
