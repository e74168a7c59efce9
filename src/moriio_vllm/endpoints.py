"""Where the peers of a request listen: from its parameters to the ports of our counterpart, the same TP rank.

The scheduler half checks at admission that every rank finds its peers (`check`); so the worker halves, which ask for
theirs step by step, cannot fail, and cannot come to different verdicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moriio_proto.errors import ParameterError
from moriio_proto.events import Endpoint
from moriio_proto.wire import addresses
from moriio_proto.wire.messages import Mode

if TYPE_CHECKING:
    from moriio_proto.wire.params import TransferParams
    from moriio_vllm.allowed_peers import AllowedPeers

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


def check(params: TransferParams, tp_size: int, *, is_producer: bool, allowed: AllowedPeers | None = None) -> None:
    """Refuse parameters that lead one of our `tp_size` ranks to no port, or to a host that is not allowed.

    Raises:
        ParameterError: as `prefill_endpoint`, and a host outside `allowed`.
    """
    if params.remote_tp_size not in {0, tp_size} and not (is_producer and params.mode is Mode.READ):
        raise ParameterError("remote_tp_size", params.remote_tp_size, f"{tp_size}, this node's, or 0 for unknown")
    find = decode_endpoints if is_producer else _prefill_endpoints
    found = [endpoint for tp_rank in (0, tp_size - 1) for endpoint in find(params, tp_rank, tp_size)]  # extreme ports
    if allowed is not None:
        for host in {endpoint.host for endpoint in found}:
            allowed.check(host)


def _prefill_endpoints(params: TransferParams, tp_rank: int, tp_size: int) -> tuple[Endpoint, ...]:
    return (prefill_endpoint(params, tp_rank, tp_size),)


def _endpoint(params: TransferParams, dp_rank: int, tp_rank: int, tp_size: int) -> Endpoint:
    assert params.peer is not None
    size = params.remote_tp_size or tp_size
    ours, upstreams = addresses.rank_ports(params.peer, dp_rank, tp_rank, size, params.remote_dp_size_local)
    return Endpoint(params.host_of(dp_rank), *ours, other=() if ours == upstreams else upstreams)
