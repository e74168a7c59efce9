"""`kv_transfer_params`, parsed once at admission into a frozen record; later steps read only the record.

Whatever a client or a sidecar puts there ends in a `TransferParams`, in None (not a disaggregated request: compute
here) or in a `ParameterError` that names the key, the value and what was expected.

    leg            asked by             required
    P, WRITE       do_remote_decode     transfer_id, D's address
    P, READ        do_remote_decode     transfer_id
    D, WRITE       do_remote_prefill    transfer_id, P's address
    D, READ        do_remote_prefill    transfer_id, P's address, remote_block_ids

The address comes from `remote_host`, `remote_handshake_port` and `remote_notify_port` when all three are there,
else from the request id.  Everything else is optional and has the default that the protocol defines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from moriio_proto.errors import ParameterError
from moriio_proto.wire._check import check_host, check_number, check_port, refuse
from moriio_proto.wire._schema import MAX_BLOCK_ID, MAX_BLOCK_LIST, MAX_GROUPS, MAX_ID_CHARS, MAX_RANKS
from moriio_proto.wire.addresses import ZmqAddress, addresses_in_request_id, pod_index
from moriio_proto.wire.messages import Mode

__all__ = [
    "PeerAddress",
    "TransferParams",
    "parse_decode_params",
    "parse_prefill_params",
    "prefill_answer",
]

PeerAddress: TypeAlias = ZmqAddress

MAX_HOSTS = 4096
_DIGITS = re.compile(r"[0-9]{1,5}")

_ADDRESS_KEYS = ("remote_host", "remote_handshake_port", "remote_notify_port")


@attrs.frozen
class TransferParams:
    """What one leg of a disaggregated request says about the other; `remote` is the peer's side."""

    transfer_id: str  # the only id that both legs share
    mode: Mode
    peer: PeerAddress | None  # base ports; None only on P in READ
    remote_hosts: tuple[str, ...] = ()  # one per pod; empty = all ranks on `peer.host`
    remote_dp_rank: int = 0  # global
    remote_dp_size: int = 0  # global; 0 = unknown
    remote_dp_size_local: int = 0  # of one pod; 0 = unknown
    remote_tp_size: int = 0  # 0 = unknown
    remote_engine_id: str = ""
    remote_blocks: tuple[tuple[int, ...], ...] = ()  # P's block ids per KV cache group; READ on D only
    prompt_digest: str = ""  # of this leg's prompt; the node adds it, nobody sends it here

    def host_of(self, global_dp_rank: int) -> str:
        """The host that a data-parallel rank of the peer lives on.

        Raises:
            ParameterError: `remote_hosts` has no entry for the rank's pod, or no address is known.
        """
        if self.peer is None:
            raise refuse("remote_host", None, "a host name or IP address")
        if not self.remote_hosts:
            return self.peer.host
        pod = pod_index(global_dp_rank, self.remote_dp_size_local)
        if pod >= len(self.remote_hosts):
            raise refuse("remote_hosts", self.remote_hosts, f"an entry for pod {pod} of rank {global_dp_rank}")
        return self.remote_hosts[pod]


def parse_prefill_params(params: object, request_id: str, mode: Mode) -> TransferParams | None:
    """Read the parameters of P's leg.

    Args:
        params: the request's `kv_transfer_params`, untrusted.
        request_id: the request's id, which may carry the router's addresses.
        mode: this node's mode.

    Returns:
        The record, or None when nobody asked for a remote decode.

    Raises:
        ParameterError: see the table above.
    """
    given = _asked(params, "do_remote_decode")
    if given is None:
        return None
    return _common(given, request_id, mode, is_prefill=True)


def parse_decode_params(params: object, request_id: str, mode: Mode) -> TransferParams | None:
    """Read the parameters of D's leg.

    Args:
        params: the request's `kv_transfer_params`, untrusted.
        request_id: the request's id, which may carry the router's addresses.
        mode: this node's mode.

    Returns:
        The record, or None when nobody prefilled: D computes the prompt itself.

    Raises:
        ParameterError: see the table above, and a rank that is not below `remote_dp_size`.
    """
    given = _asked(params, "do_remote_prefill")
    if given is None:
        return None
    parsed = _common(given, request_id, mode, is_prefill=False)
    if parsed.remote_dp_rank >= parsed.remote_dp_size > 0:
        raise refuse("remote_dp_rank", parsed.remote_dp_rank, f"below remote_dp_size={parsed.remote_dp_size}")
    parsed.host_of(parsed.remote_dp_rank)
    if mode is Mode.READ:
        parsed = attrs.evolve(parsed, remote_blocks=_block_ids(given.get("remote_block_ids")))
    return parsed


def prefill_answer(
    *,
    transfer_id: str,
    block_ids: Sequence[Sequence[int]],
    address: ZmqAddress,
    dp_rank: int,
    dp_size: int,
    dp_size_local: int,
    tp_size: int,
) -> dict[str, Any]:
    """P's answer in READ, which the router copies into D's leg.

    Args:
        transfer_id: as in P's leg.
        block_ids: P's block ids, one list per KV cache group.
        address: P's own host and base ports.
        dp_rank: P's global data-parallel rank.
        dp_size: global.
        dp_size_local: of one pod.
        tp_size: P's.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in block_ids],
        "remote_engine_id": f"{address.host}:{address.handshake_port}",
        "remote_host": address.host,
        "remote_handshake_port": address.handshake_port,
        "remote_notify_port": address.notify_port,
        "remote_dp_rank": dp_rank,
        "remote_dp_rank_override": True,
        "remote_dp_size": dp_size,
        "remote_dp_size_local": dp_size_local,
        "tp_size": tp_size,
        "transfer_id": transfer_id,
    }


def _asked(params: object, flag: str) -> Mapping[str, object] | None:
    """The parameters as a map when `flag` is true in them."""
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise refuse("kv_transfer_params", params, "a map")
    value = params.get(flag)
    if value is None or value is False:
        return None
    if value is not True:
        raise refuse(flag, value, "true, false or null")
    return params


def _common(given: Mapping[str, object], request_id: str, mode: Mode, *, is_prefill: bool) -> TransferParams:
    tp_key = "tp_size" if given.get("remote_tp_size") is None else "remote_tp_size"
    return TransferParams(
        transfer_id=_transfer_id(given.get("transfer_id")),
        mode=mode,
        peer=_peer(given, request_id, is_prefill=is_prefill, required=not (is_prefill and mode is Mode.READ)),
        remote_hosts=_hosts(given.get("remote_hosts")),
        remote_dp_rank=_number(given, "remote_dp_rank", 0, MAX_RANKS, 0),
        remote_dp_size=_number(given, "remote_dp_size", 0, MAX_RANKS, 0),
        remote_dp_size_local=_number(given, "remote_dp_size_local", 0, MAX_RANKS, 0),
        remote_tp_size=_number(given, tp_key, 0, MAX_RANKS, 0),
        remote_engine_id=_engine_id(given.get("remote_engine_id")),
    )


def _transfer_id(value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS or not value.isprintable():
        raise refuse("transfer_id", value, f"1 to {MAX_ID_CHARS} printable characters, the same on both legs")
    return value


def _engine_id(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_ID_CHARS:
        raise refuse("remote_engine_id", value, f"a string of at most {MAX_ID_CHARS} characters or null")
    return value


def _number(given: Mapping[str, object], key: str, low: int, high: int, default: int) -> int:
    value = given.get(key)
    return default if value is None else check_number(key, value, low, high)


def _hosts(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    hosts = [value] if isinstance(value, str) else value
    if not isinstance(hosts, (list, tuple)) or len(hosts) > MAX_HOSTS:
        raise refuse("remote_hosts", value, f"a host or a list of at most {MAX_HOSTS} hosts, one per pod")
    return tuple(check_host("remote_hosts", host) for host in hosts)


def _peer(given: Mapping[str, object], request_id: str, *, is_prefill: bool, required: bool) -> PeerAddress | None:
    """Structured parameters win over text found in an id."""
    structured = [given.get(key) for key in _ADDRESS_KEYS]
    if all(value is not None for value in structured):
        host, handshake, notify = structured
        return ZmqAddress(
            check_host("remote_host", host),
            check_port("remote_handshake_port", _number_in(handshake)),
            check_port("remote_notify_port", _number_in(notify)),
        )
    routed = addresses_in_request_id(request_id)
    if routed is None:
        if not required:
            return None
        missing = next(key for key, value in zip(_ADDRESS_KEYS, structured, strict=True) if value is None)
        raise refuse(missing, None, f"a value, or the peer's address in the request id {request_id[:200]!r}")
    try:
        return ZmqAddress.parse(routed[1] if is_prefill else routed[0])
    except ParameterError:
        if required:
            raise
        return None


def _number_in(value: object) -> object:
    """The number that a text is: upstream's P answers with its ports as its user wrote them, mostly as texts."""
    return int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value


def _block_ids(value: object) -> tuple[tuple[int, ...], ...]:
    """A list of lists, one per KV cache group; a flat list is one group."""
    expected = f"a list of at most {MAX_GROUPS} lists of block ids within 0..{MAX_BLOCK_ID}"
    if not isinstance(value, (list, tuple)):
        raise refuse("remote_block_ids", value, expected)
    flat = not any(isinstance(entry, (list, tuple)) for entry in value)
    groups = [value] if flat else value
    if len(groups) > MAX_GROUPS:
        raise refuse("remote_block_ids", value, expected)
    return tuple(_group(group, expected) for group in groups)


def _group(group: object, expected: str) -> tuple[int, ...]:
    if not isinstance(group, (list, tuple)):
        raise refuse("remote_block_ids", group, expected)
    if len(group) > MAX_BLOCK_LIST:
        raise refuse("remote_block_ids", f"{len(group)} ids", f"at most {MAX_BLOCK_LIST} ids per group")
    for block in group:
        if type(block) is not int or not 0 <= block <= MAX_BLOCK_ID:  # bool is an int, and no block id
            raise refuse("remote_block_ids", block, expected)
    return tuple(group)
