"""Where the peers of a request listen: from its parameters to the ports of our counterpart, the same TP rank.

The scheduler half checks at admission that every rank finds its peers (`check`); so the worker halves, which ask for
theirs step by step, cannot fail, and cannot come to different verdicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moriio_proto.events import Endpoint
from moriio_proto.wire import addresses
from moriio_proto.wire.messages import Mode

if TYPE_CHECKING:
    from moriio_proto.wire.params import TransferParams

__all__ = ["MAX_DP_RANKS", "check", "decode_endpoints", "prefill_endpoint"]

MAX_DP_RANKS = 1024  # of a decode instance, per request: a client could name any number


def prefill_endpoint(params: TransferParams, tp_rank: int, tp_size: int) -> Endpoint:
    """D's counterpart in the rank of P that computes the prompt.

    Raises:
        ParameterError: the rank has no host, has no such TP rank, or a port above 65535.
    """
    return _endpoint(params, params.remote_dp_rank, tp_rank, tp_size)


def decode_endpoints(params: TransferParams, tp_rank: int, tp_size: int) -> tuple[Endpoint, ...]:
    """P's counterparts in every data-parallel rank of D, by rank: D's announcement says which one it is.

    READ needs none: D comes to P.

    Raises:
        ParameterError: as `prefill_endpoint`.
    """
    if params.mode is Mode.READ:
        return ()
    count = min(max(1, params.remote_dp_size), MAX_DP_RANKS)
    return tuple(_endpoint(params, rank, tp_rank, tp_size) for rank in range(count))


def check(params: TransferParams, tp_size: int, *, is_producer: bool) -> None:
    """Refuse parameters that lead one of our `tp_size` ranks to no port: the first and the last have the extremes.

    Raises:
        ParameterError: as `prefill_endpoint`.
    """
    for tp_rank in {0, tp_size - 1}:
        (decode_endpoints if is_producer else prefill_endpoint)(params, tp_rank, tp_size)


def _endpoint(params: TransferParams, dp_rank: int, tp_rank: int, tp_size: int) -> Endpoint:
    assert params.peer is not None
    local, size = params.remote_dp_size_local, params.remote_tp_size or tp_size
    return Endpoint(
        params.host_of(dp_rank),
        addresses.handshake_port(params.peer.handshake_port, dp_rank, tp_rank, size, local),
        addresses.notify_port(params.peer.notify_port, dp_rank, tp_rank, size, local),
    )
