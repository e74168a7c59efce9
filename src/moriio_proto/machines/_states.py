"""The states of an offer and of a landing; `offer` and `landing` say how they are left and entered."""

from __future__ import annotations

from moriio_proto.machines._table import State

__all__ = ["LandingState", "OfferState"]


class OfferState(State):
    """Where an offer is."""

    NEW = "nothing known"
    EXPECTED = "D announced blocks, vLLM has not scheduled the request"
    COMPUTING = "vLLM computes, D has not announced or claimed"
    CLAIMING = "WRITE: D announced, its lease is asked for"
    PUSHING = "WRITE: lease held, computed blocks are posted"
    NOTIFYING = "WRITE: blocks quiet and free, D is being told the end"
    OFFERED = "computed and handed over, waiting for D"
    LEASED = "READ: D reads under a lease"
    DRAINING = "ending, posted operations are under way"
    FREED = "over; answers late messages"


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
