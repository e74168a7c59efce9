"""Which explorations there are, and which rows none of them can take, each with the reason.

`QUICK` runs with the tests: each is complete, so what it says holds for every order of moves that its setting has.
`CAMPAIGN` are the same stories with more going on at once; `python -m moriio_proto.testing.explore_campaign` runs them.
"""

from __future__ import annotations

from typing import Final

from moriio_proto.testing.explore_story import Setting
from moriio_proto.wire.messages import Mode

__all__ = ["CAMPAIGN", "QUICK", "UNREACHED"]

_W, _R = Mode.WRITE, Mode.READ

QUICK: Final = [
    # WRITE
    Setting("write: queueing and aborts", _W, goal=1, ages=False),
    Setting("write: the lease", _W, goal=1, aborts=False, expects=False),
    Setting("write: two blocks", _W, aborts=False, expects=False, ages=False),
    Setting("write: D has a block", _W, first=1, aborts=False, expects=False, ages=False),
    Setting("write: layer by layer", _W, goal=1, layers=2, aborts=False, expects=False, ages=False),
    Setting("write: preemption", _W, goal=1, preempts=True, breaks=True, aborts=False, expects=False, ages=False),
    Setting("write: broken sessions", _W, goal=1, breaks=True, expects=False, ages=False),
    Setting("write: two blocks, broken sessions", _W, breaks=True, aborts=False, expects=False, ages=False),
    Setting("write: a process dies", _W, goal=1, deaths=1, aborts=False, expects=False, ages=False),
    Setting("write: silence", _W, goal=1, unrest=True, aborts=False, expects=False, ages=False),
    Setting("write: the id comes again", _W, goal=1, again=True, aborts=False, ages=False),
    Setting("write: D's first process does not fit", _W, goal=1, misfit=("D1",), deaths=1, expects=False, ages=False),
    Setting(
        "write: a new D does not fit",
        _W,
        goal=1,
        misfit=("D2",),
        deaths=1,
        unrest=True,
        aborts=False,
        expects=False,
        ages=False,
    ),
    Setting("write: a peer without leases", _W, goal=1, plain=True, breaks=True, ages=False),
    # READ
    Setting("read: queueing and aborts", _R, goal=1),
    Setting("read: broken sessions", _R, goal=1, breaks=True, expects=False),
    Setting("read: a process dies", _R, goal=1, deaths=1, aborts=False, expects=False),
    Setting("read: two blocks", _R, breaks=True, aborts=False, expects=False, ages=False),
    Setting("read: P's answer is short", _R, short=True, ages=False),
    Setting("read: silence", _R, goal=1, unrest=True, aborts=False, expects=False),
    Setting("read: the id comes again", _R, goal=1, again=True, copies=1, aborts=False, ages=False),
    Setting("read: P's process does not fit", _R, goal=1, misfit=("P1",), deaths=1, ages=False),
    Setting(
        "read: a new P does not fit",
        _R,
        goal=1,
        misfit=("P2",),
        deaths=1,
        unrest=True,
        aborts=False,
        expects=False,
        ages=False,
    ),
    Setting("read: a peer without leases", _R, goal=1, plain=True, breaks=True, copies=1, expects=False, ages=False),
]

CAMPAIGN: Final = [
    Setting(
        "write: every message may be lost or come twice, once",
        _W,
        breaks=True,
        aborts=False,
        expects=False,
        ages=False,
        copies=2,
        faults=1,
    ),
    Setting("write: queueing, aborts, the lease", _W, goal=1),
    Setting("write: the lease, two blocks, aborts", _W, expects=False),
    Setting("write: two blocks, preemption, aborts", _W, preempts=True, expects=False, ages=False),
    Setting("write: the lease, broken sessions", _W, goal=1, breaks=True, expects=False),
    Setting("write: a process dies, the lease", _W, goal=1, deaths=1, expects=False),
    Setting(
        "write: a process dies, silence, broken sessions", _W, goal=1, deaths=1, unrest=True, breaks=True, ages=False
    ),
    Setting("write: both processes die", _W, goal=1, deaths=2, aborts=False, ages=False),
    Setting("read: broken sessions, queueing", _R, goal=1, breaks=True),
    Setting("read: a process dies, aborts, broken sessions", _R, goal=1, deaths=1, breaks=True, expects=False),
    Setting("read: both processes die, silence", _R, goal=1, deaths=2, unrest=True, expects=False),
]

# Rows that no exploration takes: machine, trigger, source states, a guard of the row (None: any), reason.
_OTHER_MODE = "needs a peer of the other transfer mode: the router pairs equal modes only"
_RANKS = "needs a second tensor-parallel rank, or a data-parallel one: the explored pair has one each"
_HARMLESS = "the transport or the core says it only of older sessions, which the core filters by their epoch"
_LEFT = "P makes a session before a new peer is ready, and by then the transfer has left the old one"
_SAID_LATE = "P says it only to a D that has given up or is served, and no such D goes back to a state before the end"
_ONE_READ = "needs more than one read: a landing posts one, and posts it again whole"
_TWO_TRANSFERS = "needs a second transfer of the same peer: the explored pair has one"
_ONE_PROMPT: Final = "the explored sides never mix prompts up; the transcripts *_other_prompt and read_short_grant do"

UNREACHED: Final[list[tuple[str, str, tuple[str, ...], str | None, str]]] = [
    ("offer", "cmd_abort", ("CLAIMING",), "", "CLAIMING has no posts, so the unguarded row is only there to be total"),
    ("offer", "recv_blocks", ("LEASED",), None, _OTHER_MODE),
    ("offer", "recv_granted", ("COMPUTING", "OFFERED", "LEASED"), None, _OTHER_MODE),
    ("offer", "recv_release", ("OFFERED", "LEASED"), "", _RANKS),
    ("offer", "recv_abort", ("OFFERED",), "", _RANKS),
    ("offer", "recv_abort", ("LEASED",), None, _OTHER_MODE),
    ("offer", "cq_ready", ("LEASED",), None, _OTHER_MODE),
    ("offer", "cq_lost", ("LEASED",), None, _OTHER_MODE),
    ("offer", "cq_ready", ("FREED",), None, _LEFT),
    ("offer", "cmd_offer", ("EXPECTED",), "other_prompt", _ONE_PROMPT),
    ("landing", "recv_granted", ("CLAIMING",), "short_grant", _ONE_PROMPT),
    ("landing", "recv_claim", ("QUEUED", "CLAIMING", "PULLING", "DRAINING"), None, _OTHER_MODE),
    ("landing", "recv_done", ("ANNOUNCED", "FENCING"), "more_writers", _RANKS),
    ("landing", "recv_done", ("QUEUED", "CLAIMING", "PULLING", "DRAINING"), None, _OTHER_MODE),
    ("landing", "recv_failed", ("QUEUED", "CLAIMING", "PULLING", "DRAINING"), None, _OTHER_MODE),
    ("landing", "recv_released", ("QUEUED", "ANNOUNCED", "CLAIMING", "PULLING", "DRAINING"), None, _SAID_LATE),
    ("landing", "cq_ready", ("FENCING",), None, _TWO_TRANSFERS),
    ("landing", "cq_done", ("PULLING", "DRAINING"), "", _ONE_READ),
    ("landing", "cq_failed", ("PULLING", "DRAINING"), "", _ONE_READ),
    ("landing", "cq_refused", ("DRAINING",), "", _ONE_READ),
    ("peer", "cmd_need", ("READY", "SUSPECT", "REFUSED"), None, "the core asks only for a peer that is none of these"),
    ("peer", "recv_hello", ("IDLE",), None, "IDLE is left at once by who meets the peer"),
    ("peer", "cq_connected", ("DIALLING", "READY", "SUSPECT", "LOST", "REFUSED"), None, _HARMLESS),
    ("peer", "cq_disconnected", ("DIALLING", "LOST", "REFUSED"), None, _HARMLESS),
]
