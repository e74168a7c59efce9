"""Which moves a node can make in a local state, and which of them come by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moriio_proto.testing.explore import Move
from moriio_proto.testing.explore_story import DEAD, IDLE, OVER, RUNNING, Facts, Local, Setting

__all__ = ["chunks_of", "facts_of"]


def chunks_of(setting: Setting) -> list[tuple[int, int, int]]:
    """Start, end and layers of every progress that vLLM reports: block by block, layer by layer."""
    return [(b, b + 1, layer + 1) for b in range(setting.goal) for layer in range(setting.layers)]


def facts_of(name: str, setting: Setting, local: Local) -> Facts:
    """What can happen in this state of the node `name`."""
    phase = local.vllm[0]
    frozen = local.core.transfer
    token = f"{name}{local.number}" if local.number else ""
    if not local.number:
        moves: list[tuple[Move, str, int]] = [(("boot",), "", 0)]
        return Facts(tuple(moves), frozenset(), 0, token, DEAD, (), True, f"{name} dead", False)
    moves = [
        *_vllm_moves(name, setting, local),
        *_timer_moves(setting, local),
        *_post_moves(setting, local),
        *_link_moves(setting, local),
    ]
    posts = frozen[3] if frozen is not None else ()
    hot = tuple({under.target for post, under in zip(posts, local.posts, strict=True) if post[4] >= 0})
    state = dict(frozen[1])["state"].name if frozen is not None else "-"
    peer = local.core.peer[0].name if local.core.peer is not None else "-"
    return Facts(
        tuple(moves), frozenset(_helpful_moves(name, setting, local)), local.number, token, phase, hot,
        frozen is None and phase in (IDLE, OVER, DEAD), f"{name} {state}, its peer {peer}", frozen is not None,
    )  # fmt: skip


def _helpful_moves(name: str, setting: Setting, local: Local) -> Iterator[Move]:
    """What happens by itself, though the far node and the network stay silent for ever."""
    yield from (move for move, _, _ in _transfer_timers(local))
    yield from (move for move, _, _ in _peer_timers(local))
    if local.vllm[0] == RUNNING:
        names = _prefill_moves(setting, local) if name == "P" else _decode_moves(setting, local)
        yield from (("vllm", name) for name in names if name in ("progress", "finish", "skip"))
    yield from (("post", i, "failed") for i, under in enumerate(local.posts, 1) if under.adrift)


def _vllm_moves(name: str, setting: Setting, local: Local) -> Iterator[tuple[Move, str, int]]:
    names = _prefill_moves(setting, local) if name == "P" else _decode_moves(setting, local)
    yield from ((("vllm", name), "", 0) for name in names)


_TOMBSTONES = ("NOTIFYING", "FREED", "RELEASING", "CLOSED")


def _tombstone(local: Local) -> bool:
    """The transfer is over and not forgotten."""
    return local.core.transfer is not None and dict(local.core.transfer[1])["state"].name in _TOMBSTONES


def _prefill_moves(setting: Setting, local: Local) -> Iterator[str]:
    (phase, computed, _, _) = local.vllm
    if phase == IDLE or (phase == OVER and setting.again and _tombstone(local)):
        yield "start"
    elif phase == RUNNING:
        yield "progress" if computed < len(chunks_of(setting)) else "finish"
        if setting.preempts and computed:
            yield "preempt"
        if setting.aborts:
            yield "abort"


def _decode_moves(setting: Setting, local: Local) -> Iterator[str]:
    (phase, _, _, aborted) = local.vllm
    again = phase == OVER and setting.again and _tombstone(local)
    if setting.expects and (phase == IDLE or again):
        yield "expect"
    if phase in (IDLE, RUNNING) or again:
        yield "load"
        yield "skip"
    if phase not in (IDLE, DEAD) and setting.aborts and not aborted:
        yield "abort"


def _timer_moves(setting: Setting, local: Local) -> Iterator[tuple[Move, str, int]]:
    yield from _transfer_timers(local)
    if setting.unrest:
        yield from _peer_timers(local)
        frozen, peer = local.core.transfer, local.core.peer
        if (
            frozen is not None
            and peer is not None
            and any(t == "due_retry" for t, _ in frozen[2])
            and frozen[8] == "listed"
        ):
            yield ("silence",), "", 0


def _transfer_timers(local: Local) -> Iterator[tuple[Move, str, int]]:
    frozen = local.core.transfer
    for trigger, away in frozen[2] if frozen is not None else ():
        if trigger != "due_lease" or away <= 0 or away == math.inf:
            yield ("timer", "transfer", trigger), "", 0


def _peer_timers(local: Local) -> Iterator[tuple[Move, str, int]]:
    for trigger in local.core.peer[1] if local.core.peer is not None else ():
        yield ("timer", "peer", trigger), "", 0


def _post_moves(setting: Setting, local: Local) -> Iterator[tuple[Move, str, int]]:
    frozen = local.core.transfer
    for i, under in enumerate(local.posts, 1):
        yield ("post", i, "done"), "", 0
        if setting.breaks or under.adrift:
            yield ("post", i, "failed"), "", 0
            yield ("post", i, "refused"), "", 0
        elif frozen is not None and frozen[3][i - 1][4] < 0:  # past its lease, it is not started any more
            yield ("post", i, "failed"), "", 0
        else:
            yield ("post", i, "failed"), "gone", under.target


def _link_moves(setting: Setting, local: Local) -> Iterator[tuple[Move, str, int]]:
    if local.link is None:
        return
    state, target = local.link
    if state == "asked":
        yield ("link", "up"), "alive", target
        yield ("link", "failed"), "", 0
    elif setting.breaks:
        yield ("link", "lost"), "", 0
    yield ("link", "dead"), "gone", target
