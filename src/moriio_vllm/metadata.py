"""What the scheduler half tells the worker half for one step: plain records, pickled by vLLM once per step.

Nothing here is a decision about the protocol; the worker half turns it into the core's events.  Block ids are those of
the one transferred KV cache group, by position in the prompt.
"""

from __future__ import annotations

import attrs

from moriio_proto.wire.params import TransferParams

__all__ = ["Chunk", "LoadPlan", "OfferPlan", "StepPlan"]


@attrs.frozen
class OfferPlan:
    """P: a request was admitted whose blocks will be offered."""

    request_id: str
    params: TransferParams
    goal_blocks: int


@attrs.frozen
class Chunk:
    """P, WRITE: this step computes blocks `[start, end)` of a transfer; `blocks` are all its block ids so far."""

    transfer_id: str
    start: int
    end: int
    blocks: list[int]


@attrs.frozen
class LoadPlan:
    """D: blocks were allocated to be filled from position `first_block` on.

    `error`: the request's parameters are unusable; the load fails at once and vLLM's policy decides.
    """

    request_id: str
    params: TransferParams | None
    blocks: list[int]
    first_block: int
    error: str = ""


@attrs.define
class StepPlan:
    """One step.  The worker half reads the fields in this order.

    To vLLM it is a `KVConnectorMetadata`: the facade registers it as one, so that this module needs no vLLM.
    """

    offers: list[OfferPlan] = attrs.field(factory=list)
    preempts: list[str] = attrs.field(factory=list)  # transfer ids
    finishes: list[str] = attrs.field(factory=list)  # P: blocks handed over
    offered: dict[str, list[int]] = attrs.field(factory=dict)  # P, READ: block ids of those finished
    aborts: list[str] = attrs.field(factory=list)  # P: blocks handed over; D: the load is not wanted any more
    chunks: list[Chunk] = attrs.field(factory=list)
    expects: list[TransferParams] = attrs.field(factory=list)
    loads: list[LoadPlan] = attrs.field(factory=list)
    skips: list[TransferParams] = attrs.field(factory=list)  # D: release without loading

    def __bool__(self) -> bool:
        return any(attrs.astuple(self, recurse=False))
