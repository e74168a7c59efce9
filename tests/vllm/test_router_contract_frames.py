"""Our plain frames next to vLLM's own code: its senders make the same bytes, and its listener survives ours."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's and torch's own imports deprecate is not ours to fail for
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_common as common
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_connector import MoRIIOConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_engine import MoRIIOWrapper

import msgspec

from moriio_proto.wire.codec import encode, encode_hello
from moriio_proto.wire.messages import (
    Abort,
    Claim,
    Granted,
    Hello,
    LayerDescriptors,
    Refused,
    Release,
    Released,
    RemoteBlocks,
    WriteDone,
)

PATH = "tcp://h:1"


class Wire:
    """A socket that keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, frame):
        self.sent.append(frame)


@pytest.fixture
def upstream():
    """Upstream's sending and listening ends without sockets: the wrapper of a worker, and what a scheduler needs."""
    wire, wrapper = Wire(), MoRIIOWrapper()
    wrapper.paths[PATH] = wire
    yield SimpleNamespace(
        wire=wire, wrapper=wrapper, scheduler=SimpleNamespace(paths={PATH: wire}, _global_dp_rank=3, tp_size=2)
    )
    common.set_role(common.ROLE.NOTINIT)


def test_ends_and_releases_are_its_bytes(upstream):
    """`write_done`, `release` of a worker and of a scheduler: byte for byte what vLLM's own functions send."""
    upstream.wrapper.send_notify("tx-1", "h", 1, message_type="write_done")
    upstream.wrapper.send_notify("tx-1", "h", 1, message_type="release", message_fields={"consumer_tp_size": 2})
    MoRIIOConnectorScheduler._send_transfer_release(upstream.scheduler, "tx-1", "h", 1)
    release = encode(Release("tx-1", consumer_tp_size=2))
    assert upstream.wire.sent == [encode(WriteDone("tx-1")), release, release]


@pytest.mark.parametrize("blocks", [[0], [1, 2, 0], list(range(300)), [2**31 - 1]])
def test_announcements_are_its_bytes(upstream, blocks):
    """`remote_blocks` with any list: byte for byte what vLLM's scheduler sends for it."""
    MoRIIOConnectorScheduler.send_notify_block(upstream.scheduler, "req", "tx-1", blocks, "h", 1)
    assert upstream.wire.sent == [encode(RemoteBlocks("tx-1", "req", (blocks,), decode_rank=3))]


def test_its_listener_understands_our_plain_frames(upstream):
    """vLLM's own handler takes each plain frame in its role, and means by it what we mean."""
    wrapper = upstream.wrapper
    common.set_role(common.ROLE.PRODUCER)
    wrapper._handle_message(encode(RemoteBlocks("tx-1", "", ([4, 0],), decode_rank=1)))
    info = wrapper.done_remote_allocate_req_dict["tx-1"]
    assert (info.block_ids, info.decode_dp_rank) == ([4, 0], 1)
    wrapper._handle_message(encode(Release("tx-1", consumer_tp_size=2)))
    assert [(a.transfer_id, a.consumer_tp_size) for a in wrapper.pop_finished_req_ids()] == [("tx-1", 2)]
    common.set_role(common.ROLE.CONSUMER)
    wrapper._handle_message(encode(WriteDone("tx-1")))
    assert wrapper.pop_finished_write_req_ids() == {"tx-1"}


@pytest.mark.parametrize(
    "message",
    [Claim("t", "T"), Granted("t", "T", 10), Refused("t", "T"), Abort("t", "T"), Released("t", "T"),
     WriteDone("t", failed=True)],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_its_listener_would_end_on_our_extension(upstream, message):
    """Each message of the extension, and 0.33's failure, raises in 0.32's listener: that is why none may be sent."""
    common.set_role(common.ROLE.CONSUMER)
    with pytest.raises(common.MoRIIOError):
        upstream.wrapper._handle_message(encode(message))


def test_our_hello_is_read_by_its_decoder():
    """vLLM's own struct decodes our first message, whatever we added, and keeps its own fields."""
    hello = Hello("h:1", b"engine", (1, 2), 10, 64, "CPU_ATTN")
    first, _ = encode_hello(hello, LayerDescriptors({}))
    seen = msgspec.msgpack.Decoder(common.MoRIIOAgentMetadata).decode(first)
    assert msgspec.msgpack.Encoder().encode(seen) == first
