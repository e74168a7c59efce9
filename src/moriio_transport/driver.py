"""Carries a core's effects out, and brings what they owe back.  No thread, no clock, no socket: `now` is an argument.

The reactor drives it with real sockets and a real transport, the simulator with fakes: the same code between them.

    control.received -> on_notify / on_hello --+
    transport.poll() -> on_transport ----------+--> core.receive --> effects --> control.send, transport.post, settled
    worker half      -> on_commands -----------+
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import attrs

from moriio_proto.core import Core
from moriio_proto.dialects import descriptors
from moriio_proto.effects import Cancel, Connect, Dial, Disconnect, Effect, Forget, Post, Reply, Send, Settled
from moriio_proto.errors import DecodeError, IllegalEventError, LocalProtocolError, ProtocolError
from moriio_proto.events import (
    Connected,
    Disconnected,
    Endpoint,
    Event,
    HelloReceived,
    Load,
    OpEnded,
    Preempt,
    Progress,
    Received,
)
from moriio_proto.geometry import CacheGeometry, PlanError
from moriio_proto.geometry.plan import Pairing, split
from moriio_proto.wire.codec import decode_hello, decode_notify, encode
from moriio_transport import base
from moriio_transport.base import Description, Direction, Outcome, Session, Transport

__all__ = ["Control", "Driver", "collapse"]

log = logging.getLogger(__name__)


class Control(Protocol):
    """What the driver needs of a control channel.  Frames may be lost, never altered."""

    def dial(self, endpoint: Endpoint) -> None:
        """Ask the handshake port for its hello; replaces a dial under way."""

    def forget(self, endpoint: Endpoint) -> None:
        """Close the connections to an address; what is queued for it, and a dial under way, are void."""

    def send(self, endpoint: Endpoint, frame: bytes) -> None:
        """To the notify port; frames to one endpoint keep their order."""

    def reply(self, route: object, frame: bytes) -> None:
        """On the connection that `route` names; dropped when it is gone."""


@attrs.define(eq=False)
class _Link:
    """The transport session of one peer."""

    endpoint: Endpoint
    epoch: int
    session: Session
    pairing: Pairing | None
    hung_up: bool = False


@attrs.define(eq=False)
class _Parts:
    """A core's post, split into several posts of the transport."""

    token: int
    left: int
    tokens: list[int]
    nbytes: int = 0
    outcome: str = "done"
    reason: str = ""


_RANK = {"done": 0, "refused": 1, "failed": 2}  # the worst part decides; a refused part is posted again whole
_OUTCOME = {
    Outcome.DONE: "done",
    Outcome.REFUSED: "refused",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "failed",
    Outcome.EXPIRED: "failed",
}


def collapse(commands: Iterable[Event]) -> list[Event]:
    """Drop every `Progress` that a later one of the same transfer includes.

    Progress is cumulative, so a reactor that falls behind posts fewer and larger batches at its own pace.
    """
    given, out = list(commands), list[Event]()
    if len(given) < 2:
        return given
    newer: set[str] = set()
    for event in reversed(given):
        if isinstance(event, Progress):
            if event.transfer_id in newer:
                continue
            newer.add(event.transfer_id)
        elif isinstance(event, Preempt):
            newer.discard(event.transfer_id)
        out.append(event)
    out.reverse()
    return out


class Driver:
    """One core, its transport and its control channel."""

    def __init__(self, core: Core, transport: Transport, control: Control, geometry: CacheGeometry) -> None:
        self.core, self.transport, self.control, self.geometry = core, transport, control, geometry
        self.settled: deque[Settled] = deque()  # for the worker half
        self.refused_frames = 0
        self.missing_rows = 0
        self._links: dict[Endpoint, _Link] = {}
        self._sessions: dict[int, _Link] = {}
        self._parts: dict[int, _Parts] = {}  # transport token -> the core's post
        self._posts: dict[int, _Parts] = {}  # core token -> the same
        self._next = 1
        self._owed: deque[Event] = deque()  # answers to effects that could not be carried out
        self._carriers: dict[type, Callable[[Any], None]] = {
            Post: self._post,
            Send: lambda e: self.control.send(e.endpoint, encode(e.message)),
            Reply: lambda e: self.control.reply(e.route, encode(e.message)),
            Settled: self.settled.append,
            Cancel: self._cancel,
            Dial: lambda e: self.control.dial(e.endpoint),
            Forget: lambda e: self.control.forget(e.endpoint),
            Connect: self._connect,
            Disconnect: self._disconnect,
        }

    # --- inputs ---------------------------------------------------------------------------------------------------

    def on_commands(self, commands: Iterable[Event], now: float) -> None:
        """What the worker half said since the last call, in order."""
        for event in collapse(commands):
            self._step(event, now)

    def on_notify(self, frame: bytes, route: object, now: float) -> None:
        """One frame from the notify port, or an answer on one of our connections."""
        try:
            message = decode_notify(frame)
        except DecodeError as e:
            self._refuse_frame(route, e)
            return
        self._step(Received(message, route), now)

    def on_hello(self, endpoint: Endpoint, first: bytes, second: bytes, now: float) -> None:
        """The two messages that answer a dial."""
        try:
            hello, layers = decode_hello(first, second)
        except DecodeError as e:
            self._refuse_frame(endpoint, e)
            return
        self._step(HelloReceived(endpoint, hello, layers), now)

    def on_transport(self, now: float) -> None:
        """Everything the transport has to say."""
        for event in self.transport.poll():
            if isinstance(event, base.Completed):
                self._completed(event, now)
            elif isinstance(event, base.Connected):
                link = self._sessions.get(event.session.id)
                if link is not None:
                    self._step(Connected(link.endpoint, link.epoch), now)
            else:
                self._session_lost(event, now)

    def tick(self, now: float) -> None:
        """The core's next deadline has come."""
        self._carry_out(self._survive(lambda: self.core.tick(now)))
        self._pay(now)

    # --- effects --------------------------------------------------------------------------------------------------

    def _step(self, event: Event, now: float) -> None:
        try:
            effects = self._receive(event, now)
        except LocalProtocolError as e:
            log.exception("refused")
            if isinstance(event, Load):  # vLLM waits for its end, whatever went wrong
                self.settled.append(Settled(event.transfer_id, event.owner, "failed", str(e)))
            return
        except ProtocolError as e:
            log.warning("dropped: %s", e)
            return
        self._carry_out(effects)
        self._pay(now)

    def _pay(self, now: float) -> None:
        while self._owed:
            self._carry_out(self._receive(self._owed.popleft(), now))

    def _receive(self, event: Event, now: float) -> list[Effect]:
        return self._survive(lambda: self.core.receive(event, now))

    def _survive(self, step: Callable[[], list[Effect]]) -> list[Effect]:
        """A trigger without a row is a bug of ours: it costs the record it was meant for, not the worker."""
        try:
            return step()
        except IllegalEventError:
            self.missing_rows += 1
            log.exception("no row; the record stays as it is")
            return self._survive(self.core.resume)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._carriers[type(effect)](effect)

    def _cancel(self, effect: Cancel) -> None:
        parts = self._posts.get(effect.token)
        for token in parts.tokens if parts is not None else ():
            self.transport.release(token)

    def _post(self, post: Post) -> None:
        link = self._links.get(post.endpoint)
        if link is None or link.pairing is None:
            self._owed.append(OpEnded(post.token, "failed", reason="no session with the peer"))
            return
        capabilities = self.transport.capabilities
        try:
            plan = link.pairing.plan(
                post.layer_start, post.layer_end, post.local_blocks, post.remote_blocks, capabilities.max_op_bytes
            )
        except PlanError as e:
            self._owed.append(OpEnded(post.token, "failed", reason=str(e)))
            return
        plans = split(plan, capabilities.max_ops_per_post)
        tokens = list(range(self._next, self._next + len(plans)))
        self._next += len(plans)
        parts = self._posts[post.token] = _Parts(post.token, len(plans), tokens)
        direction = Direction.WRITE if post.write else Direction.READ
        for token, part in zip(tokens, plans, strict=True):
            self._parts[token] = parts
            self.transport.post(token, link.session, direction, part, post.not_after)

    def _completed(self, event: base.Completed, now: float) -> None:
        parts = self._parts.pop(event.token)
        parts.left -= 1
        parts.nbytes += event.nbytes
        outcome = _OUTCOME[event.outcome]
        if _RANK[outcome] > _RANK[parts.outcome]:
            parts.outcome, parts.reason = outcome, event.reason or event.outcome.value
        if not parts.left:
            del self._posts[parts.token]
            self._step(OpEnded(parts.token, parts.outcome, parts.nbytes, parts.reason), now)

    # --- sessions -------------------------------------------------------------------------------------------------

    def _connect(self, effect: Connect) -> None:
        try:
            regions = descriptors(effect.hello, effect.layers)
            session = self.transport.connect(Description(effect.hello.agent_metadata, regions))
        except base.TransportError as e:
            self._owed.append(Disconnected(effect.endpoint, effect.epoch, str(e)))
            return
        remote = self.core.peers[effect.endpoint].geometry
        assert remote is not None
        link = _Link(effect.endpoint, effect.epoch, session, Pairing(self.geometry, remote))
        self._links[effect.endpoint] = self._sessions[session.id] = link

    def _disconnect(self, effect: Disconnect) -> None:
        for link in list(self._sessions.values()):
            if (link.endpoint, link.epoch) == (effect.endpoint, effect.epoch) and not link.hung_up:
                link.hung_up = True
                if self._links.get(link.endpoint) is link:
                    del self._links[link.endpoint]
                self.transport.disconnect(link.session)
                self._sessions.pop(link.session.id)
                self._owed.append(Disconnected(link.endpoint, link.epoch, "the session was ended"))

    def _session_lost(self, event: base.SessionLost, now: float) -> None:
        link = self._sessions.pop(event.session.id, None)
        if link is None:
            return
        if self._links.get(link.endpoint) is link:
            del self._links[link.endpoint]
        log.warning("peer %s: session lost: %s", link.endpoint, event.reason)
        self._step(Disconnected(link.endpoint, link.epoch, event.reason, event.proven), now)

    def _refuse_frame(self, source: object, why: DecodeError) -> None:
        self.refused_frames += 1
        log.warning("frame from %s refused: %s", source, why)
