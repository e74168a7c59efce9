"""The registration of one instance with its router.

Theory of operation
-------------------
The router learns of an instance from pings and forgets it some 5 s after the last one.  It never answers, so the
only thing to know about it is whether the socket takes a ping: the socket keeps nothing for a router that is not
connected, hence what it takes goes out now, and no stale ping can pile up.

    UNREGISTERED  Some rank of the instance does not listen yet, or the router is out of reach.  Silent ranks are
                  asked again every `probe_interval`.  When the last one answers, the first ping is tried.  A ping
                  that the socket refuses is tried again when the socket says that the router is back, however
                  long that takes; there is no count of attempts.
    REGISTERED    The last ping went out.  One ping every `ping_interval`.  A refused one leads back.
    DRAINING      The caller wants no new requests.  No pings any more; running transfers go on elsewhere.  After
                  `forget_after` since the last ping the router has surely forgotten the instance.
    CLOSED        Final.  Nothing is sent and nothing is answered.

Triggers: `recv_` a rank of this instance, `cq_` the router socket, `due_` a timer, `cmd_` the caller.
The record keeps two timers at most; `deadline` is the earliest, infinity when only an event can help.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import attrs

from moriio_proto.machines._table import State, compile_machine, declare, row

__all__ = ["MACHINE", "TABLE", "AwaitRouter", "Entered", "Probe", "R", "Registration", "RegistrationEffect", "SendPing"]


class R(State):
    """Where the registration stands."""

    UNREGISTERED = "a rank does not listen yet, or the router is out of reach"
    REGISTERED = "the last ping went out"
    DRAINING = "no more pings; the router is forgetting the instance"
    CLOSED = "nothing is sent any more"


@attrs.frozen
class Probe:
    """Ask this rank (an index) for its handshake answer, on a new connection."""

    rank: int


@attrs.frozen
class SendPing:
    """Offer one ping to the router's socket; answer with `cq_sent` or `cq_refused`."""


@attrs.frozen
class AwaitRouter:
    """Answer with `cq_writable` when the router's socket takes a ping again."""


@attrs.frozen
class Entered:
    """The registration moved to another state: worth a line in the log."""

    state: R


RegistrationEffect: TypeAlias = Probe | SendPing | AwaitRouter | Entered

_ALIVE = [R.UNREGISTERED, R.REGISTERED]
_QUIET = [R.DRAINING, R.CLOSED]

MACHINE: Final = declare(
    "registration",
    R,
    initial=R.UNREGISTERED,
    final=[R.CLOSED],
    rows=[
        # A rank that is still missing is asked again, those that answered are not.
        row("due_probe", R.UNREGISTERED, None, "probe_missing"),
        row("due_probe", [R.REGISTERED, *_QUIET], None),
        # The last answer releases the first ping; a repeated answer changes nothing.
        row("recv_listening", R.UNREGISTERED, None, "note_rank", "send_ping", conditions="last_missing"),
        row("recv_listening", R.UNREGISTERED, None, "note_rank"),
        row("recv_listening", [R.REGISTERED, *_QUIET], None),
        # Only a registered instance pings by the clock.
        row("due_ping", R.REGISTERED, None, "send_ping"),
        row("due_ping", [R.UNREGISTERED, *_QUIET], None),
        # What became of a ping.  After cmd_drain it no longer matters, except that the router heard it.
        row("cq_sent", R.UNREGISTERED, R.REGISTERED, "note_sent", "entered"),
        row("cq_sent", R.REGISTERED, None, "note_sent"),
        row("cq_sent", R.DRAINING, None, "note_sent_late"),
        row("cq_sent", R.CLOSED, None),
        row("cq_refused", R.UNREGISTERED, None, "await_router"),
        row("cq_refused", R.REGISTERED, R.UNREGISTERED, "await_router", "entered"),
        row("cq_refused", _QUIET, None),
        # The router came (back): register at once instead of at the next tick.
        row("cq_writable", R.UNREGISTERED, None, "send_ping", conditions="all_listening"),
        row("cq_writable", R.UNREGISTERED, None),
        row("cq_writable", [R.REGISTERED, *_QUIET], None),
        # Draining ends by the clock; an instance that never pinged has nothing to be forgotten.
        row("cmd_drain", _ALIVE, R.DRAINING, "start_forgetting", "entered", conditions="ever_sent"),
        row("cmd_drain", _ALIVE, R.CLOSED, "stop_timers", "entered"),
        row("cmd_drain", _QUIET, None),
        row("due_forgotten", R.DRAINING, R.CLOSED, "stop_timers", "entered"),
        row("due_forgotten", [*_ALIVE, R.CLOSED], None),
        row("cmd_close", [*_ALIVE, R.DRAINING], R.CLOSED, "stop_timers", "entered"),
        row("cmd_close", R.CLOSED, None),
    ],
)


@attrs.define(eq=False)
class Registration:
    """The record of one instance's registration; all times in seconds of one monotonic clock.

    Args:
        missing: indices of the ranks that have not answered yet; not empty.
        ping_interval: from one ping to the next.
        probe_interval: after which a silent rank is asked again.
        forget_after: after which a router has forgotten an instance that stopped pinging.
    """

    missing: set[int]
    ping_interval: float
    probe_interval: float
    forget_after: float
    state: R = R.UNREGISTERED
    timer: tuple[float, str] = (-math.inf, "due_probe")  # the one timer that the state needs, and its trigger
    last_sent: float = -math.inf
    out: list[RegistrationEffect] = attrs.field(factory=list)

    @classmethod
    def of(cls, ranks: int, *, ping_interval: float, probe_interval: float, forget_after: float) -> Registration:
        """A registration that waits for `ranks` ranks; its first deadline is at once."""
        return cls(set(range(ranks)), ping_interval, probe_interval, forget_after)

    def handle(self, trigger: str, now: float, rank: int = -1) -> list[RegistrationEffect]:
        """Take one step and return what is to be done, in order.

        Args:
            trigger: the name of a row of the table.
            now: seconds; never decreases from call to call.
            rank: which rank listens, for `recv_listening` only.

        Raises:
            IllegalEventError: the table has no such trigger.
        """
        TABLE.fire(self, trigger, now, rank)
        out, self.out = self.out, []
        return out

    def due(self, now: float) -> list[RegistrationEffect]:
        """Fire the timer if its time has come."""
        at, trigger = self.timer
        return self.handle(trigger, now) if now >= at else []

    @property
    def deadline(self) -> float:
        """When `due` wants to be called; infinity when only an event can help."""
        return self.timer[0]

    # Guards.

    def last_missing(self, now: float, rank: int) -> bool:
        """Every other rank has answered, and this one had not."""
        return self.missing == {rank}

    def all_listening(self, now: float, rank: int) -> bool:
        """No rank is missing."""
        return not self.missing

    def ever_sent(self, now: float, rank: int) -> bool:
        """The router may know this instance."""
        return self.last_sent > -math.inf

    # Actions.

    def probe_missing(self, now: float, rank: int) -> None:
        """Ask every rank that has not answered."""
        self.out.extend(Probe(r) for r in sorted(self.missing))
        self.timer = (now + self.probe_interval if self.missing else math.inf, "due_probe")

    def note_rank(self, now: float, rank: int) -> None:
        """This rank listens."""
        self.missing.discard(rank)

    def send_ping(self, now: float, rank: int) -> None:
        """Offer a ping; the next one is counted from its outcome."""
        self.out.append(SendPing())
        self.timer = (math.inf, "due_ping")

    def note_sent(self, now: float, rank: int) -> None:
        """The ping left."""
        self.last_sent = now
        self.timer = (now + self.ping_interval, "due_ping")

    def note_sent_late(self, now: float, rank: int) -> None:
        """A ping left after draining began: the router remembers for longer."""
        self.last_sent = now
        self.timer = (now + self.forget_after, "due_forgotten")

    def await_router(self, now: float, rank: int) -> None:
        """Wait for the socket, not for the clock."""
        self.out.append(AwaitRouter())
        self.timer = (math.inf, "due_ping")

    def start_forgetting(self, now: float, rank: int) -> None:
        """The router's patience counts from the last ping."""
        self.timer = (self.last_sent + self.forget_after, "due_forgotten")

    def stop_timers(self, now: float, rank: int) -> None:
        """Nothing is due any more."""
        self.timer = (math.inf, "due_forgotten")

    def entered(self, now: float, rank: int) -> None:
        """Report the state just entered (actions run after the move)."""
        self.out.append(Entered(self.state))


TABLE: Final = compile_machine(MACHINE, Registration)
