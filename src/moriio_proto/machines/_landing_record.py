"""What a landing knows, asks and does: the guards and actions that the table of `landing` names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from moriio_proto.machines._states import LandingState
from moriio_proto.machines._table import State
from moriio_proto.machines._transfer import Transfer
from moriio_proto.wire.messages import Abort, Claim, Granted, Mode, Release, RemoteBlocks

if TYPE_CHECKING:
    from moriio_proto.core import Core

__all__ = ["NULL_BLOCK", "Landing"]

S = LandingState
NULL_BLOCK = 0  # vLLM gives it to no request and reads nothing that counts from it: anything may be written there


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
    writers: int = 0  # WRITE: P's ranks that have said that they are done

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

    def more_writers(self, core: Core, event: Any) -> bool:
        """Other ranks of P write, too, and have not all said that they are done (vLLM 0.33)."""
        return self.writers + 1 < (event.message.num_writers or 1)

    def short(self, core: Core, event: Any) -> bool:
        """READ: P offers fewer blocks than the prompt fills."""
        return core.mode is Mode.READ and len(event.remote_blocks) < event.first_block + len(event.blocks)

    def short_grant(self, core: Core, event: Any) -> bool:
        """READ: P holds fewer blocks than the prompt fills."""
        held = len(event.message.blocks or self.remote_blocks)
        return held < self.first_block + len(self.blocks)

    def all_read(self, core: Core, event: Any) -> bool:
        """The last read ended, and none waits to be tried again."""
        return len(self.pending) == 1 and not self.parked

    def in_time(self, core: Core, event: Any) -> bool:
        """P was still bound to keep the blocks when the last read ended."""
        return core.now < self.lease_until

    # --- what is known --------------------------------------------------------------------------------------------

    def meet(self, core: Core, event: Any) -> None:
        """Know P, and ask for its handshake."""
        self.prompt_digest = event.prompt_digest
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

    def blame_grant(self, core: Core, event: Any) -> None:
        """Not all of the prompt can be read."""
        self.reason = (
            f"the prefill node holds {len(event.message.blocks)} blocks of this transfer, not all of its prompt"
        )

    def count_writer(self, core: Core, event: Any) -> None:
        """One rank of P is done."""
        self.writers += 1

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
            self.announced, self.incarnation = True, self.peer.token
            core.send(self.peer, self.announcement(core, leases=leases))
        if leases:
            self.resend_later(core, core.timing.retry)

    def announcement(self, core: Core, *, leases: bool) -> RemoteBlocks:
        """Our blocks as P understands them.

        A P without our extension writes every block of the prompt from position 0 on, and none if we name fewer.  So
        the blocks before ours, which we have, and the one after, whose only token we compute, are the null block.
        """
        if leases:
            own = (list(self.blocks),)
            return RemoteBlocks(
                self.id,
                "",
                own,
                core.dp_rank,
                first_block=self.first_block,
                token=core.token,
                prompt_digest=self.prompt_digest,
            )
        whole = [NULL_BLOCK] * self.first_block + [*self.blocks, NULL_BLOCK]
        return RemoteBlocks(self.id, "", (whole,), core.dp_rank)

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
            core.reply(self.route, Abort(self.id, core.token, self.prompt_digest))

    def acknowledge(self, core: Core, event: Any) -> None:
        """We know the end: P need not tell it again (only a peer that waits for it)."""
        if event.message.token:
            core.reply(self.route, Release(self.id, core.tp_size, core.token, self.prompt_digest))

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
            core.send(self.peer, Claim(self.id, core.token, core.stamp(), self.prompt_digest))
            self.resend_later(core, core.timing.retry)

    def take_blocks(self, core: Core, event: Any) -> None:
        """P says which blocks it holds for this transfer: those are read, whatever the request's parameters say."""
        self.remote_blocks = event.message.blocks or self.remote_blocks

    def pull(self, core: Core, event: Any) -> None:
        """Read all blocks at once: position by position, only those that we do not have."""
        first = self.first_block
        remote = self.remote_blocks[first : first + len(self.blocks)]
        self.post(core, (0, core.num_layers), self.blocks, remote)

    def send_abort(self, core: Core, event: Any) -> None:
        """Ask P to stop and to say when it is quiet; repeated until it does."""
        assert self.peer is not None
        core.send(self.peer, Abort(self.id, core.token, self.prompt_digest))
        self.resend_later(core, core.timing.retry)

    def send_release(self, core: Core, event: Any) -> None:
        """Tell P that we need nothing more; repeated until it acknowledges, where it can."""
        assert self.peer is not None
        if self.peer.ready:
            token = core.token if self.peer.leases else ""
            digest = self.prompt_digest if self.peer.leases else ""
            core.send(self.peer, Release(self.id, core.tp_size, token, digest))
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
        self.unwanted = False  # that was the first request
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
