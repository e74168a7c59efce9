"""What Offer and Landing share: timers, the lease that the accessor holds, and posted operations.

A record is all there is of a transfer (rule 1): no other table knows anything of it.  Guards and actions take
`(core, event)`; actions only append effects and touch the record.

**The lease.**  Whoever touches the other side's blocks (WRITE: P, READ: D) is the *accessor*, the other is the
*owner*.  The accessor sends `claim(stamp)`, the owner answers `granted(stamp, lease)`.  The stamp is the accessor's own
clock: it counts the lease from when it *sent* the claim, the owner from when it *received* it, so the accessor always
stops first and no clocks need to agree.  Claims repeat at a third of the lease; while operations drain, too.

**Operations.**  `pending` are posts whose end has not come; `parked` are posts that the transport refused (queue full)
and that are tried again.  A record is *idle* when `pending` is empty: nothing of ours touches any block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from moriio_proto.effects import Cancel, Post, Settled

if TYPE_CHECKING:
    from moriio_proto.core import Core
    from moriio_proto.machines._table import State
    from moriio_proto.machines.peer import Peer

__all__ = ["Transfer"]


@attrs.define(eq=False)
class Transfer:
    """The record of one transfer on one side."""

    id: str
    state: State
    owner: str = ""  # whom `Settled` names
    prompt_digest: str = ""  # of the prompt that the local request has; "" = not known
    peer: Peer | None = None
    incarnation: str | None = None  # token of the peer process that this transfer is bound to, once it is
    route: object = None  # where the peer's last message came from: takes answers
    timers: dict[str, float] = attrs.field(factory=dict)  # trigger -> when it is due
    pending: dict[int, Post] = attrs.field(factory=dict)
    parked: list[Post] = attrs.field(factory=list)
    lease_until: float = -math.inf  # the accessor's end of its lease, own clock
    resends: int = 0
    verdict: str = ""
    reason: str = ""
    settled: bool = False

    # --- guards -------------------------------------------------------------------------------------------------

    def idle(self, core: Core, event: Any) -> bool:
        """No post of ours is under way."""
        return not self.pending

    def last_one(self, core: Core, event: Any) -> bool:
        """The post that ended now was the only one under way."""
        return len(self.pending) == 1

    def leases(self, core: Core, event: Any) -> bool:
        """The peer speaks our extension: leases, negative messages, acknowledgements."""
        return self.peer is not None and self.peer.leases

    # --- actions: timers ----------------------------------------------------------------------------------------

    def stop_timers(self, core: Core, event: Any) -> None:
        """On entry of a state: it waits only for what it arms itself."""
        self.timers.clear()

    def arm_retry(self, core: Core, first: float) -> None:
        """Ask for `due_retry` after `first` seconds; each resend without an answer doubles it."""
        core.arm(self, "due_retry", core.now + min(first * 2**self.resends, core.timing.lease / 3))

    def forget(self, core: Core, event: Any) -> None:
        """The tombstone has answered late messages long enough."""
        core.drop(self)

    # --- actions: the lease ---------------------------------------------------------------------------------------

    def resend_later(self, core: Core, first: float) -> None:
        """Arm the next resend, and let a peer that stays silent be suspected."""
        self.arm_retry(core, first)
        self.resends += 1
        if self.peer is not None:
            core.unanswered(self.peer, self.resends)

    def fresh(self, core: Core, event: Any) -> bool:
        """The grant answers a claim that is younger than its lease."""
        return bool(event.message.stamp / 1e6 + event.message.lease_ms / 1e3 > core.now)

    def extend_lease(self, core: Core, event: Any) -> None:
        """The owner granted: the lease counts from when our claim left."""
        granted = event.message
        sent_at = min(granted.stamp / 1e6, core.now)
        self.lease_until = max(self.lease_until, sent_at + granted.lease_ms / 1e3)
        self.resends = 0
        core.arm(self, "due_lease", self.lease_until)
        core.arm(self, "due_retry", core.now + core.timing.lease / 3)

    # --- actions: operations --------------------------------------------------------------------------------------

    def post(self, core: Core, layers: tuple[int, int], local: Sequence[int], remote: Sequence[int]) -> None:
        """Post one rectangle of blocks."""
        assert self.peer is not None
        assert len(local) == len(remote), "local and remote blocks are pairs"
        token = core.new_token(self)
        post = Post(token, self.peer.endpoint, core.writes, *layers, local, remote, self.not_after(core))
        self.pending[token] = post
        core.emit(post)
        self.watch_ops(core, None)

    def not_after(self, core: Core) -> float:
        """When the last byte of a post made now may start to move."""
        return min(self.lease_until, core.now + core.timing.transfer_timeout)

    def watch_ops(self, core: Core, event: Any) -> None:
        """Bound the wait for operations: `due_stuck` comes when none ends for `transfer_timeout`."""
        if self.pending or self.parked:
            core.arm(self, "due_stuck", core.now + core.timing.transfer_timeout)
        else:
            self.timers.pop("due_stuck", None)

    def end_op(self, core: Core, event: Any) -> None:
        """One post is quiet."""
        del self.pending[event.token]
        core.stats.bytes_moved += event.nbytes

    def park_op(self, core: Core, event: Any) -> None:
        """The queue was full: keep the post, try again soon."""
        self.parked.append(self.pending.pop(event.token))
        core.stats.refused_posts += 1
        core.arm(self, "due_repost", core.now + core.timing.repost)

    def repost(self, core: Core, event: Any) -> None:
        """Try parked posts again; the deadline of the oldest goes on."""
        parked, self.parked = self.parked, []
        for old in parked:
            token = core.new_token(self)
            post = attrs.evolve(old, token=token, not_after=self.not_after(core))
            self.pending[token] = post
            core.emit(post)

    def cancel_ops(self, core: Core, event: Any) -> None:
        """Begin to drain: nothing new starts, what runs is asked to end early."""
        self.parked.clear()
        for token in self.pending:
            core.emit(Cancel(token))
        core.arm(self, "due_drain", core.now + core.timing.drain)

    def force_quiet(self, core: Core, event: Any) -> None:
        """Draining takes too long: end the session, which ends its posts."""
        assert self.peer is not None
        core.feed(self.peer, "due_drain")
        core.arm(self, "due_drain", core.now + core.timing.drain)

    # --- actions: the end -----------------------------------------------------------------------------------------

    def settle(self, core: Core, verdict: str, reason: str = "") -> None:
        """Tell vLLM, once, that the transfer is over and its blocks are quiet."""
        assert not self.settled, f"{self.id} settled twice"
        assert not self.pending, f"{self.id} settled with operations under way"
        self.settled, self.verdict = True, verdict
        core.emit(Settled(self.id, self.owner, verdict, reason or self.reason))

    def blame(self, core: Core, event: Any) -> None:
        """Keep the first cause for the log and for the peer."""
        if not self.reason:
            self.reason = core.describe(self, event)
