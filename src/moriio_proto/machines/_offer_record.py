"""What an offer knows, asks and does: the guards and actions that the table of `offer` names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from moriio_proto.machines._states import OfferState
from moriio_proto.machines._table import State
from moriio_proto.machines._transfer import Transfer
from moriio_proto.progress import Watermark, advance
from moriio_proto.wire.messages import Claim, Granted, Mode, Refused, Released, RemoteBlocks, WriteDone

if TYPE_CHECKING:
    from moriio_proto.core import Core
    from moriio_proto.events import Endpoint

__all__ = ["Offer"]

S = OfferState


def differ(digest: str, other: str) -> bool:
    """Whether both are known, and not the same."""
    return bool(digest and other and digest != other)


@attrs.define(eq=False)
class Offer(Transfer):
    """The record of one transfer on the prefill node."""

    state: State = S.NEW
    requested: bool = False  # vLLM has this request
    handed_over: bool = False  # its blocks are ours until settled
    peers: Sequence[Endpoint] = ()  # our counterparts in D, by its data-parallel rank
    goal: int = 0  # blocks of the prompt
    blocks: list[int] = attrs.field(factory=list)  # ours, by position
    announced: RemoteBlocks | None = None
    claim_stamp: int | None = None  # of D's last claim
    claimant: str = ""  # the process of D that sent it
    readers: set[str] = attrs.field(factory=set)  # READ: processes of D that were granted a lease
    releases: set[str] = attrs.field(factory=set)  # who of D's ranks has released
    consumers: int = 1  # D's TP size, as its last release says
    computed: Watermark = attrs.field(factory=Watermark)
    posted: Watermark = attrs.field(factory=Watermark)
    stale: int = 0  # tokens below it were posted before the last preemption
    failed: bool = False  # D is told a failure
    told_quiet: bool = False  # D gave up, or is gone: it hears `released` or nothing, not a failure
    d_gone: bool = False

    # --- guards ---------------------------------------------------------------------------------------------------

    def pulled(self, core: Core, event: Any) -> bool:
        """READ mode."""
        return core.mode is Mode.READ

    def claimed(self, core: Core, event: Any) -> bool:
        """READ: D claimed before vLLM handed over."""
        return core.mode is Mode.READ and self.claim_stamp is not None

    def all_released(self, core: Core, event: Any) -> bool:
        """With D's TP n times ours, n ranks of D read from us; the last one frees.

        More may read when the router sent D's leg twice: never free under one of them.
        """
        consumers = getattr(event.message, "consumer_tp_size", core.tp_size)
        released = self.releases | {self.releaser(event)}
        return self.readers <= released and len(released) >= max(1, consumers // core.tp_size)

    def all_released_early(self, core: Core, event: Any) -> bool:
        """READ: every rank of D has released before vLLM handed over."""
        return bool(self.releases) and len(self.releases) >= max(1, self.consumers // core.tp_size)

    def nobody_to_tell(self, core: Core, event: Any) -> bool:
        """D asked us to stop, or is gone."""
        return self.told_quiet

    def owed(self, core: Core, event: Any) -> bool:
        """vLLM still has to hand over, so the record must stay."""
        return self.requested and not self.settled

    def was_stale(self, core: Core, event: Any) -> bool:
        """The post belongs to a computation that vLLM has thrown away."""
        return bool(event.token < self.stale)

    def all_landed(self, core: Core, event: Any) -> bool:
        """This was the last operation, and everything up to the goal had been posted."""
        return len(self.pending) == 1 and not self.parked and self.posted.base >= self.end()

    def other_prompt(self, core: Core, event: Any) -> bool:
        """D announced blocks for another prompt than the request has: the ids were mixed up."""
        assert self.announced is not None
        return differ(self.announced.prompt_digest, event.prompt_digest)

    # --- what is known --------------------------------------------------------------------------------------------

    def adopt(self, core: Core, event: Any) -> None:
        """vLLM has the request."""
        self.requested, self.owner, self.prompt_digest = True, event.owner, event.prompt_digest
        self.peers, self.goal = event.peers, event.goal_blocks

    def turn_away(self, core: Core, event: Any) -> None:
        """Whoever announced before the request came wants another prompt."""
        assert self.announced is not None
        core.turn_away(self.announced, self.route)
        self.announced, self.incarnation, self.route = None, None, None

    def adopt_over(self, core: Core, event: Any) -> None:
        """vLLM has a request whose transfer is over already: it is settled when handed over."""
        self.requested, self.handed_over, self.settled, self.owner = True, False, False, event.owner
        self.reason = self.reason or "a transfer with this id is over already"

    def note_blocks(self, core: Core, event: Any) -> None:
        """Keep where D wants the blocks."""
        self.announced = event.message
        self.incarnation = event.message.token or None

    def note_claim(self, core: Core, event: Any) -> None:
        """Keep the stamp, to answer now or when the blocks are handed over."""
        self.claim_stamp, self.claimant = event.message.stamp, event.message.token

    def note_progress(self, core: Core, event: Any) -> None:
        """More layers or blocks are computed."""
        if len(event.blocks) > len(self.blocks):
            self.blocks = list(event.blocks)
        self.computed.reach(event.start, event.end, event.layers, core.num_layers)

    def start_over(self, core: Core, event: Any) -> None:
        """Forget what was computed; what is posted must end before anything is posted again."""
        self.computed, self.posted, self.blocks = Watermark(), Watermark(), []
        self.parked.clear()
        self.stale = core.next_token

    def meet_peer(self, core: Core, event: Any) -> None:
        """WRITE: have D's handshake done by the time it is needed."""
        if core.mode is not Mode.WRITE:
            return
        if self.peer is None:
            rank = self.announced.decode_rank if self.announced is not None else 0
            if rank < len(self.peers) and (self.announced is not None or len(self.peers) == 1):
                core.attach(self, self.peers[rank])
        if self.peer is not None:
            core.need(self)

    # --- pushing --------------------------------------------------------------------------------------------------

    def end(self) -> int:
        """One past the last position that both sides want."""
        assert self.announced is not None
        return min(self.goal, self.announced.first_block + len(self.announced.blocks[0]))

    def pump(self, core: Core, event: Any) -> None:
        """Post what is computed, wanted and not posted, when we may."""
        assert self.announced is not None
        if core.now >= self.lease_until or (self.stale and any(token < self.stale for token in self.pending)):
            return
        if self.posted.base == self.computed.base and self.posted.layers == self.computed.layers:
            return
        first, end, remote = self.announced.first_block, self.end(), self.announced.blocks[0]
        for r in advance(self.posted, self.computed, core.num_layers):
            start, stop = max(r.block_start, first), min(r.block_end, end)
            if start < stop:
                pairs = self.blocks[start:stop], remote[start - first : stop - first]
                self.post(core, (r.layer_start, r.layer_end), *pairs)

    def send_claim(self, core: Core, event: Any) -> None:
        """Ask D for the lease on its blocks, or for more of it; a D without leases is never asked."""
        if not self.leases(core, event):
            return
        core.reply(self.route, Claim(self.id, token=core.token, stamp=core.stamp()))
        self.resend_later(core, core.timing.retry)

    def claim_again(self, core: Core, event: Any) -> None:
        """Ask for (more of) the lease; meet the peer again where the connection was lost."""
        if self.peer is not None and self.peer.ready:
            self.send_claim(core, event)
        else:
            self.meet_peer(core, event)
            self.resend_later(core, core.timing.retry)

    def lease_unasked(self, core: Core, event: Any) -> None:
        """A peer without leases keeps announced blocks until it is told the end."""
        self.lease_until = math.inf

    def drain(self, core: Core, event: Any) -> None:
        """End what is posted, and keep D's blocks ours until it has."""
        self.cancel_ops(core, event)
        self.arm_retry(core, core.timing.lease / 3)

    def fail(self, core: Core, event: Any) -> None:
        """D gets a negative end."""
        self.failed = True
        self.parked.clear()

    # --- answering D ----------------------------------------------------------------------------------------------

    def grant(self, core: Core, event: Any) -> None:
        """Our blocks may be read for a lease from now (WRITE: we go on waiting for the announcement)."""
        assert self.claim_stamp is not None
        blocks = tuple(self.blocks) if core.mode is Mode.READ else ()
        if core.mode is Mode.READ:
            self.readers.add(self.claimant)
        core.reply(self.route, Granted(self.id, core.token, core.lease_ms, self.claim_stamp, blocks))

    def refuse(self, core: Core, event: Any) -> None:
        """Nothing is offered under this id (any more)."""
        core.reply(self.route, Refused(self.id, token=core.token, reason=self.reason or "not offered"))

    def refuse_blocks(self, core: Core, event: Any) -> None:
        """D waits for a transfer that is over."""
        self.fail(core, event)
        if self.announced is None and getattr(event, "message", None) is not None:
            self.note_blocks(core, event)
        self.tell_once(core)

    def releaser(self, event: Any) -> str:
        """Which rank of D releases; upstream's do not say, and send once."""
        return getattr(event.message, "token", "") or f"#{len(self.releases)}"

    def count_release(self, core: Core, event: Any) -> None:
        """One more rank of D does not need our blocks."""
        self.releases.add(self.releaser(event))
        self.consumers = getattr(event.message, "consumer_tp_size", core.tp_size)

    def give_up(self, core: Core, event: Any) -> None:
        """D does not want the transfer any more."""
        self.told_quiet = True
        self.incarnation = getattr(event.message, "token", "") or self.incarnation
        self.reason = self.reason or "the decode node gave up"

    def acknowledge(self, core: Core, event: Any) -> None:
        """Our word: nothing of ours touches D's blocks (only to a peer that waits for it)."""
        token = getattr(getattr(event, "message", None), "token", "") or self.incarnation
        if token and not self.d_gone:
            core.reply(self.route, Released(self.id, token=core.token))

    def tell(self, core: Core, event: Any) -> None:
        """Tell D the end, again and again until it acknowledges; a peer that does not is told once."""
        if self.tell_once(core) and not self.incarnation:
            core.arm(self, "due_deadline", core.now)
        else:
            self.resend_later(core, core.timing.retry)

    def tell_once(self, core: Core) -> bool:
        """Send the end to D on the way that D understands; False while that is not known."""
        if self.incarnation:
            reason = self.reason if self.failed else ""
            core.reply(self.route, WriteDone(self.id, failed=self.failed, reason=reason, token=core.token))
        elif self.peer is None:
            return True  # announced by a peer that the request does not name: nowhere to send it
        elif self.peer.ready:
            core.send_plain_end(self.peer, self.id, failed=self.failed)
        else:
            core.need(self)
            return False
        return True

    def peer_gone(self, core: Core, event: Any) -> None:
        """There is nobody left to tell."""
        self.told_quiet = self.d_gone = True

    # --- handing over and settling --------------------------------------------------------------------------------

    def hand_over(self, core: Core, event: Any) -> None:
        """vLLM leaves the blocks to us until we settle."""
        self.handed_over = True
        self.blocks = list(getattr(event, "blocks", ())) or self.blocks

    def settle_now(self, core: Core, event: Any) -> None:
        """Handed over and quiet."""
        self.settle(core, "failed" if self.reason else "done")

    def settle_if_owed(self, core: Core, event: Any) -> None:
        """Quiet: settle if vLLM has handed over; else that is done when it does."""
        if self.handed_over and not self.settled:
            self.settle_now(core, event)

    # --- entering states ------------------------------------------------------------------------------------------

    def enter_expected(self, core: Core, event: Any) -> None:
        """Wait for vLLM to schedule the request."""
        core.arm(self, "due_deadline", core.now + core.timing.transfer_timeout)

    def enter_claiming(self, core: Core, event: Any) -> None:
        """Ask for D's lease; `cq_ready` sends the claim, at once where D is known."""
        self.begin_wait(core, core.timing.transfer_timeout)

    def enter_notifying(self, core: Core, event: Any) -> None:
        """D acknowledges within its lease or never will."""
        self.begin_wait(core, core.timing.lease)

    def begin_wait(self, core: Core, seconds: float) -> None:
        """A state that resends until an answer or a deadline."""
        self.timers.clear()
        self.resends = 0
        core.arm(self, "due_deadline", core.now + seconds)

    def enter_offered(self, core: Core, event: Any) -> None:
        """Wait for D."""
        self.timers.clear()
        self.wait_longer(core, event)

    def wait_longer(self, core: Core, event: Any) -> None:
        """A D without leases reads (READ) or queues (WRITE) without a word: wait for it as long as upstream does."""
        asks = core.mode is Mode.WRITE and self.leases(core, event)
        core.arm(self, "due_lease", core.now + (core.timing.transfer_timeout if asks else core.timing.defer_timeout))

    def extend_hold(self, core: Core, event: Any) -> None:
        """The owner's end of the lease, counted from this receipt."""
        self.timers.clear()
        core.arm(self, "due_lease", core.now + core.timing.lease + core.timing.margin)

    def enter_freed(self, core: Core, event: Any) -> None:
        """Stay for a while to answer what is late."""
        self.timers.clear()
        core.detach(self)
        self.remember(core, event)

    def remember(self, core: Core, event: Any) -> None:
        """Keep the tombstone."""
        core.arm(self, "due_forget", core.now + core.timing.forget)
