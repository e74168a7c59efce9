"""The core: everything one worker knows of its transfers and peers.  Pure: events in, effects out.

    effects = core.receive(event, now)      # something happened
    effects = core.tick(now)                # core.next_deadline() has come

Time is an argument.  The host owes: effects are carried out in order; each `Post` is answered by one `OpEnded`, each
`Connect` by `Connected` or `Disconnected`; `tick` is called when `next_deadline()` has come.  One thread owns a core.

What the machines need from each other goes through `feed`: an action puts a trigger for another record in line, and
the core fires it when the present step is done.  So no step runs inside another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import attrs

from moriio_proto.dialects import dialect_of, judge
from moriio_proto.effects import Effect, Forget, Reply, Send
from moriio_proto.errors import IllegalEventError, LocalProtocolError, RemoteProtocolError
from moriio_proto.events import (
    Connected,
    Disconnected,
    Endpoint,
    Event,
    HelloReceived,
    OpEnded,
    Received,
)
from moriio_proto.machines import landing, offer, peer
from moriio_proto.machines._offer_record import differ
from moriio_proto.machines._table import Compiled, State
from moriio_proto.machines._transfer import Transfer
from moriio_proto.machines.landing import Landing
from moriio_proto.machines.offer import Offer
from moriio_proto.machines.peer import Peer
from moriio_proto.settings import CoreConfig, Role, Stats, Timing
from moriio_proto.timers import Timers
from moriio_proto.wire.messages import (
    Abort,
    BareId,
    Claim,
    Granted,
    Mode,
    NotifyMessage,
    Refused,
    Release,
    Released,
    RemoteBlocks,
    WriteDone,
)

__all__ = ["Core", "CoreConfig", "Role", "Stats", "Timing"]

_AT_PREFILL: Final[dict[type, str]] = {
    RemoteBlocks: "recv_blocks",
    Claim: "recv_claim",
    Granted: "recv_granted",
    Release: "recv_release",
    Abort: "recv_abort",
}
_ENDS: Final = {"done": "cq_done", "failed": "cq_failed", "refused": "cq_refused"}
_AT_DECODE: Final[dict[type, str]] = {
    Claim: "recv_claim",
    WriteDone: "recv_done",
    Granted: "recv_granted",
    Refused: "recv_refused",
    Released: "recv_released",
}


TraceHook = Callable[[str, str, State, str, State, float], None]  # machine, id, source, trigger, destination, now


class Core:
    """All records of one worker.  Raises `ProtocolError` for an event without an answer; nothing else changes then."""

    def __init__(self, config: CoreConfig, trace: TraceHook | None = None) -> None:
        self.config = config
        self.mode, self.role, self.token, self.timing = config.mode, config.role, config.token, config.timing
        self.tp_size, self.dp_rank = config.tp_size, config.dp_rank
        self.lease_ms = int(config.timing.lease * 1000)
        self.num_layers = len(config.geometry.layers)
        prefill = config.role is Role.PREFILL
        self.writes = config.mode is Mode.WRITE
        self.is_accessor = prefill is self.writes
        self.stats = Stats()
        self.transfers: dict[str, Transfer] = {}
        self.peers: dict[Endpoint, Peer] = {}
        self.now = 0.0
        self.next_token = 1
        self._table: Compiled = offer.TABLE if prefill else landing.TABLE
        self._peer_table: Compiled = peer.TABLE
        self._record: type[Offer | Landing] = Offer if prefill else Landing
        self._triggers = _AT_PREFILL if prefill else _AT_DECODE
        self._ops: dict[int, Transfer] = {}
        self._timers = Timers()
        self._fed: deque[tuple[Transfer | Peer, str, Any]] = deque()
        self._out: list[Effect] = []
        self._trace = trace
        self._handlers: dict[type, Callable[[Any], None]] = {
            Received: self._on_message,
            OpEnded: self._on_op,
            HelloReceived: self._on_hello,
            Connected: self._on_session,
            Disconnected: self._on_session,
        }

    # --- the host's side ------------------------------------------------------------------------------------------

    def receive(self, event: Event, now: float) -> list[Effect]:
        """One event, and all that follows from it.

        Raises:
            LocalProtocolError: the caller did what the transfer's state does not allow.
            RemoteProtocolError: a peer did.
        """
        self.now = now
        self._handlers.get(type(event), self._on_command)(event)
        return self._finish()

    def tick(self, now: float) -> list[Effect]:
        """Fire every timer that is due."""
        self.now = now
        for record, trigger in self._timers.due(now):
            self._fire(record, trigger, None)
            self._run_fed()
        return self._finish()

    def resume(self) -> list[Effect]:
        """After an `IllegalEventError`: what the step that it interrupted still has to do."""
        return self._finish()

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest; None: not before the next event."""
        return self._timers.next_deadline()

    # --- what actions may do --------------------------------------------------------------------------------------

    def emit(self, effect: Effect) -> None:
        """Ask the host for something."""
        self._out.append(effect)

    def send(self, to: Peer, message: NotifyMessage) -> None:
        """To the peer's notify port."""
        self._out.append(Send(to.address, message))

    def reply(self, route: object, message: NotifyMessage) -> None:
        """On the connection that the peer's last message came from."""
        if route is not None:
            self._out.append(Reply(route, message))

    def send_plain_end(self, to: Peer, transfer_id: str, *, failed: bool) -> None:
        """The end of a WRITE, to a peer without our extension; a failure stays unsaid where it would end a listener."""
        assert to.hello is not None, "only a peer that has said hello is ready"
        if not failed or dialect_of(to.hello).knows_failure:
            self.send(to, WriteDone(transfer_id, failed=failed))

    def feed(self, record: Transfer | Peer, trigger: str, event: Any = None) -> None:
        """Fire `trigger` on another record after this step."""
        self._fed.append((record, trigger, event))

    def arm(self, record: Transfer | Peer, trigger: str, at: float) -> None:
        """Fire `trigger` at `at`."""
        self._timers.arm(record, trigger, at)

    def stamp(self) -> int:
        """Our clock in microseconds: what a claim carries and a grant brings back."""
        return int(self.now * 1e6)

    def new_token(self, record: Transfer) -> int:
        """A name for a post."""
        token = self.next_token
        self.next_token += 1
        self._ops[token] = record
        return token

    def attach(self, record: Transfer, endpoint: Endpoint) -> None:
        """Let `record` hear of the peer at `endpoint`."""
        found = self.peers.get(endpoint)
        if found is None:
            found = self.peers[endpoint] = Peer(endpoint)
        record.peer = found
        found.transfers[record.id] = record

    def detach(self, record: Transfer) -> None:
        """`record` does not need its peer any more."""
        if record.peer is not None:
            record.peer.transfers.pop(record.id, None)

    def need(self, record: Transfer) -> None:
        """Have the record's peer READY: it hears `cq_ready`, or `cq_lost` when that cannot be.

        A record that is bound to another process than the known one waits until the address has said who is there.
        """
        assert record.peer is not None
        if record.peer.ready and not record.peer.suits(record):
            self.feed(record.peer, "due_silence")
        elif record.peer.ready:
            self.feed(record, "cq_ready", record.peer)
        elif record.peer.state is peer.PeerState.REFUSED:
            self.feed(record, "cq_lost", record.peer)
        else:
            self.feed(record.peer, "cmd_need")

    def unanswered(self, silent: Peer, resends: int) -> None:
        """A transfer has resent so often: after the fourth time, look whether the peer is still the same."""
        if resends > 4 and silent.state is peer.PeerState.READY:
            self.feed(silent, "due_silence")

    def drop(self, record: Transfer) -> None:
        """Forget a transfer."""
        self.detach(record)
        if self.transfers.get(record.id) is record:
            del self.transfers[record.id]

    def drop_peer(self, gone: Peer) -> None:
        """Forget an address."""
        self.peers.pop(gone.endpoint, None)
        self.close_connections(gone)

    def close_connections(self, lost: Peer) -> None:
        """What was queued for the process that answered there, or never did, is void."""
        self._out.append(Forget(lost.endpoint))
        if lost.endpoint.other:
            self._out.append(Forget(lost.endpoint.turned))

    def describe(self, record: Transfer, event: Any) -> str:
        """Why `record` fails, for the log and the peer."""
        state = record.state
        if event is None:
            return f"no progress in time while {state.name.lower()} ({state.value})"
        return str(getattr(event, "reason", "")) or "the request was aborted"

    # --- events ---------------------------------------------------------------------------------------------------

    def _on_command(self, event: Any) -> None:
        record = self.transfers.get(event.transfer_id)
        if record is None:
            record = self._record(event.transfer_id)
        try:
            self._fire(record, event.trigger, event)
        except IllegalEventError as e:
            raise LocalProtocolError(f"{event.transfer_id}: {e}") from e

    def _on_message(self, event: Received) -> None:
        message = self._meant(event.message)
        if message is not event.message:
            event = attrs.evolve(event, message=message)
        trigger = self._triggers.get(type(message))
        if trigger is None:
            raise RemoteProtocolError(f"{type(message).__name__} does not go to a {self.role.name.lower()} node")
        if isinstance(message, WriteDone) and message.failed:
            trigger = "recv_failed"
        record = self.transfers.get(message.transfer_id) or self._open(message)
        if record is None:
            return
        token = getattr(message, "token", "")
        if record.incarnation and token and token != record.incarnation:
            self.stats.strangers += 1
            if record.peer is not None:
                self.feed(record.peer, "due_silence")
            return
        if differ(record.prompt_digest, getattr(message, "prompt_digest", "")):
            self.turn_away(message, event.route)
            return
        if event.route is not None:
            record.route = event.route
        try:
            self._fire(record, trigger, event)
        except IllegalEventError as e:
            self.stats.illegal += 1
            raise RemoteProtocolError(f"{message.transfer_id}: {e}") from e

    def turn_away(self, message: NotifyMessage, route: object) -> None:
        """D names our transfer but wants another prompt: it is told so, and the transfer goes on without it."""
        self.stats.mixed_up += 1
        reason = "another prompt was prefilled under this transfer id"
        if isinstance(message, RemoteBlocks):  # without our token, so that D does not answer with a release
            self.reply(route, WriteDone(message.transfer_id, failed=True, reason=reason))
        elif isinstance(message, Claim):
            self.reply(route, Refused(message.transfer_id, self.token, reason))
        else:
            self.reply(route, Released(message.transfer_id, self.token))

    def _meant(self, message: NotifyMessage) -> NotifyMessage:
        """What an upstream peer means by a frame that says it in another way."""
        if isinstance(message, BareId):  # what it means depends on who receives it
            return (Release if self.role is Role.PREFILL else WriteDone)(message.transfer_id)
        if isinstance(message, RemoteBlocks):
            if len(message.blocks) != 1:
                raise RemoteProtocolError(
                    f"{message.transfer_id}: {len(message.blocks)} groups of blocks: expected one"
                )
            if not message.blocks[0]:  # 0.32: D has all of the prompt
                return Release(message.transfer_id, token=message.token)
        return message

    def _open(self, message: NotifyMessage) -> Transfer | None:
        """A record for a transfer that only the peer knows; it is kept if the message moves it on."""
        if len(self.transfers) >= self.config.max_transfers:
            self.stats.dropped += 1
            return None
        return self._record(message.transfer_id)

    def _on_op(self, event: OpEnded) -> None:
        record = self._ops.pop(event.token, None)
        if record is None:
            raise LocalProtocolError(f"post {event.token} has ended already")
        self._fire(record, _ENDS[event.outcome], event)

    def _on_hello(self, event: HelloReceived) -> None:
        known = self.peers.get(event.endpoint)
        if known is None and event.endpoint.other:
            known = self.peers.get(event.endpoint.turned)
        if known is None:
            return
        plain = event.hello.extension is None
        if event.endpoint.other and plain is (event.endpoint == known.endpoint):
            return  # where the two kinds of peer listen at different ports, this answer is that of another rank
        shared = {"tp_size": self.tp_size, "transfer_mode": self.mode.value, "transport": self.config.transport}
        self._fire(known, "recv_hello", judge(event, self.config.geometry, shared))

    def _on_session(self, event: Connected | Disconnected) -> None:
        known = self.peers.get(event.endpoint)
        if known is not None and known.epoch == event.epoch and known.session:
            self._fire(known, event.trigger, event)

    # --- firing ---------------------------------------------------------------------------------------------------

    def _fire(self, record: Any, trigger: str, event: Any) -> None:
        table = self._peer_table if isinstance(record, Peer) else self._table
        source = record.state
        table.fire(record, trigger, self, event)
        if self._trace is not None:
            name = str(record.endpoint) if isinstance(record, Peer) else record.id
            self._trace(table.name, name, source, trigger, record.state, self.now)
        if source is table.initial and record.state is not source and isinstance(record, Transfer):
            self.transfers[record.id] = record

    def _run_fed(self) -> None:
        fed = self._fed
        while fed:
            record, trigger, event = fed.popleft()
            self._fire(record, trigger, event)

    def _finish(self) -> list[Effect]:
        self._run_fed()
        out, self._out = self._out, []
        return out
