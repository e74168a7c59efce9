"""Frames: byte-exact with recorded runs, decoders that nothing but DecodeError comes out of."""

import json
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moriio_proto.errors import DecodeError, LocalProtocolError
from moriio_proto.geometry.layout import CacheGeometry, LayerLayout, Piece
from moriio_proto.wire import messages as m
from moriio_proto.wire.codec import (
    MAX_HELLO_BYTES,
    MAX_NOTIFY_BYTES,
    decode_hello,
    decode_notify,
    decode_ping,
    encode,
    encode_hello,
    encode_ping,
)

FRAMES = json.loads((Path(__file__).parents[1] / "testdata/wire/frames.json").read_text())
quick = settings(max_examples=60, deadline=None, derandomize=True)


def recorded(prefix):
    """All recorded frames of a kind."""
    found = [bytes.fromhex(f["frame"]) for f in FRAMES if f["kind"].startswith(prefix)]
    assert found
    return found


@pytest.mark.parametrize("frame", recorded("notify:"))
def test_recorded_notify_frames_are_reproduced_byte_for_byte(frame):
    """Decoding a recorded frame and encoding it again gives the same bytes."""
    assert encode(decode_notify(frame)) == frame


@pytest.mark.parametrize("frame", recorded("heartbeat"))
def test_recorded_pings_are_reproduced_byte_for_byte(frame):
    """A registration frame is exactly upstream's."""
    assert encode_ping(decode_ping(frame)) == frame


def test_recorded_handshakes_are_reproduced_byte_for_byte():
    """Without an extension both messages of the handshake's answer are exactly upstream's."""
    firsts, seconds = recorded("handshake_reply_1"), recorded("handshake_reply_2")
    assert len(firsts) == len(seconds) == 2
    for first, second in zip(firsts, seconds, strict=True):
        hello, layers = decode_hello(first, second)
        assert hello.extension is None
        assert len(layers.layers) == len(hello.kv_caches_base_addr) == 30
        assert encode_hello(hello, layers) == (first, second)


def test_handshake_request_is_the_recorded_one():
    """The one frame that a dialler sends is upstream's."""
    assert set(recorded("handshake_request")) == {m.GET_META}


def test_recorded_remote_blocks_mean_what_they_say():
    """The fields of a decoded announcement stand where they belong."""
    message = decode_notify(recorded("notify:remote_blocks")[0])
    assert message == m.RemoteBlocks(
        "tx-1cea67f3336949c49dd90d80cf240a3f", message.req_id, ([1, 2],), decode_rank=0, first_block=0, token=""
    )
    assert message.req_id.startswith("chatcmpl-___prefill_addr_host:127.0.0.1")


def test_upstream_0_33_write_done_dialect():
    """What 0.33 added is read and written as it does: a count of writers, and a failure as a type of its own."""
    done = msgspec.msgpack.encode({"type": "write_done", "transfer_id": "t", "num_writers": 2})
    failed = msgspec.msgpack.encode({"type": "write_failed", "transfer_id": "t"})
    assert decode_notify(done) == m.WriteDone("t", num_writers=2)
    assert encode(m.WriteDone("t", num_writers=2)) == done
    assert decode_notify(failed) == m.WriteDone("t", failed=True)
    assert encode(m.WriteDone("t", failed=True)) == failed


def test_one_group_travels_flat_and_several_as_lists():
    """A single KV cache group is a flat list on the wire, several are a list of lists; both are read."""
    one, two = m.RemoteBlocks("t", "r", ([1, 2],)), m.RemoteBlocks("t", "r", ([1], [2, 3]))
    assert msgspec.msgpack.decode(encode(one))["block_notify_list"] == [1, 2]
    assert msgspec.msgpack.decode(encode(two))["block_notify_list"] == [[1], [2, 3]]
    nested = msgspec.msgpack.encode({"type": "remote_blocks", "transfer_id": "t", "block_notify_list": [[7, 8]]})
    assert decode_notify(nested).blocks == ([7, 8],)


def test_map_without_type_but_with_req_id_is_remote_blocks():
    """Upstream took such a map for an announcement, so older senders are understood."""
    frame = msgspec.msgpack.encode({"req_id": "r", "transfer_id": "t", "block_notify_list": [3]})
    assert decode_notify(frame) == m.RemoteBlocks("t", "r", ([3],))


def test_announcement_that_would_end_upstreams_listener_is_not_encoded():
    """An empty list goes only to a peer that has our extension."""
    with pytest.raises(LocalProtocolError, match="empty list"):
        encode(m.RemoteBlocks("t", "r", ([],)))
    with pytest.raises(LocalProtocolError, match="empty list"):
        encode(m.RemoteBlocks("t", "r", ()))
    assert decode_notify(encode(m.RemoteBlocks("t", "r", ([],), token="tok"))).blocks == ([],)


def test_request_id_of_a_client_never_stops_an_announcement():
    """A lone surrogate or an endless id in D's own request id is made harmless, the transfer id stays."""
    frame = encode(m.RemoteBlocks("t", "\ud800" + "x" * 5000, ([1],)))
    assert decode_notify(frame).transfer_id == "t"
    assert decode_notify(frame).req_id.startswith("?x")


@pytest.mark.parametrize("bad", ["", "ü", "a\n", "x" * 513])
def test_bare_id_that_could_be_misread_is_not_encoded(bad):
    """A bare frame holds 1 to 512 printable ASCII characters, nothing that could be a map."""
    with pytest.raises(LocalProtocolError, match="ASCII"):
        encode(m.BareId(bad))


def test_encode_refuses_what_is_no_notify_message():
    """A ping does not belong on a notify port."""
    with pytest.raises(LocalProtocolError, match="notify message"):
        encode(object())


ids = st.text(min_size=1, max_size=40).filter(lambda s: s.encode("utf-8", "ignore").decode() == s)
tokens = st.text("0123456789abcdef", max_size=32)
counts = st.integers(1, 65535)
block_lists = st.lists(st.integers(0, 2**31 - 1), max_size=8)
stamps = st.integers(0, 2**63 - 1)
groups = st.lists(block_lists, min_size=1, max_size=4).map(tuple)
NOTIFY = st.one_of(
    st.builds(
        m.RemoteBlocks, ids, ids, groups,
        st.integers(0, 65535), st.integers(0, 2**31 - 1), tokens.map(lambda t: t + "1"), tokens,
    ),
    st.builds(m.WriteDone, ids, st.booleans(), st.none() | counts, ids | st.just(""), tokens),
    st.builds(m.Release, ids, counts, tokens, tokens),
    st.builds(m.BareId, st.text("abcdefxyz-_0123456789:", min_size=1, max_size=512)),
    st.builds(m.Claim, ids, tokens, stamps, tokens),
    st.builds(m.Granted, ids, tokens, st.integers(0, 10**6), stamps, block_lists.map(tuple)),
    st.builds(m.Refused, ids, tokens, ids | st.just("")),
    st.builds(m.Abort, ids, tokens, tokens),
    st.builds(m.Released, ids, tokens),
)  # fmt: skip


@quick
@given(NOTIFY)
def test_every_notify_message_survives_the_wire(message):
    """Decoding an encoded message gives the message."""
    assert decode_notify(encode(message)) == message


GEOMETRY = CacheGeometry(
    (
        LayerLayout("a", (Piece(0, 0, 64, 32), Piece(1, 0, 64, 32)), "bf16"),
        LayerLayout("b", (Piece(0, 32, 64, 32),), "f8", group=1),
    ),
    (640, 640),
    num_blocks=10,
    block_tokens=16,
)
EXTENSION = m.HelloExtension(
    "tok", 3, 1, 4, 2, 2, m.CAPABILITIES, 7405, "loopback", (b"r0", b"r1"), GEOMETRY
)  # fmt: skip
HELLO = m.Hello("10.0.0.1:7301", b"\x00engine", (2**47, 2**64 - 1), 10, 64, "CPU_ATTN", EXTENSION)
LAYERS = m.LayerDescriptors({"a": [b"d1"], "b": [b"d1", b"d2"]})


def test_hello_with_extension_survives_the_wire():
    """Token, ranks, capabilities, regions and geometry come out as they went in."""
    assert decode_hello(*encode_hello(HELLO, LAYERS)) == (HELLO, LAYERS)


def test_upstream_reads_our_hello_and_sees_only_its_six_fields():
    """A struct with upstream's fields and settings ignores the key `moriio`."""

    class Upstream(msgspec.Struct, omit_defaults=True, dict=True):
        engine_id: str
        agent_metadata: bytes
        kv_caches_base_addr: list[int]
        num_blocks: int
        block_len: int
        attn_backend_name: str

    first, _ = encode_hello(HELLO, LAYERS)
    seen = msgspec.msgpack.Decoder(Upstream).decode(first)
    assert seen == Upstream("10.0.0.1:7301", b"\x00engine", [2**47, 2**64 - 1], 10, 64, "CPU_ATTN")
    assert set(msgspec.msgpack.decode(first)) == {*Upstream.__struct_fields__, "moriio"}


def test_keys_of_0_33_are_noticed_and_not_sent():
    """A peer's 0.33 is known from its handshake; its additional keys do not stop us."""
    first, second = encode_hello(HELLO, LAYERS)
    newer = msgspec.msgpack.encode(
        {**msgspec.msgpack.decode(first), "kv_head_layouts": {"a": [2, 16, 64, 2048, 1024, 64, 0]}}
    )
    hello, _ = decode_hello(newer, second)
    assert hello.since_033
    assert hello.head_layouts == {"a": [2, 16, 64, 2048, 1024, 64, 0]}
    assert encode_hello(hello, LAYERS) == (first, second)


def patched_hello(version=1, **changes):
    """Our first message with another version or with keys of the extension changed (None deletes)."""
    first, second = encode_hello(HELLO, LAYERS)
    outer = msgspec.msgpack.decode(first)
    _, payload = msgspec.msgpack.decode(outer["moriio"])
    fields = {k: v for k, v in {**msgspec.msgpack.decode(payload), **changes}.items() if v is not None}
    outer["moriio"] = msgspec.msgpack.encode([version, msgspec.msgpack.encode(fields)])
    return msgspec.msgpack.encode(outer), second


def test_another_version_is_named_before_its_payload_is_read():
    """A peer of version 2 whose payload we cannot know is refused with both versions in the text."""
    with pytest.raises(DecodeError, match="speaks version 2, this side 1"):
        decode_hello(*patched_hello(version=2, geometry="whatever version 2 has here"))


def test_unknown_keys_and_capabilities_of_the_extension_are_kept_out_of_the_way():
    """What a later release adds within version 1 does not stop this one."""
    hello, _ = decode_hello(*patched_hello(brand_new=[1], capabilities=["lease", "brand_new"]))
    assert hello.extension.capabilities == {"lease", "brand_new"}
    assert hello.extension.geometry == GEOMETRY


@pytest.mark.parametrize(
    "changes",
    [
        {"token": ""}, {"token": None}, {"token": 7}, {"tp_rank": 2}, {"global_dp_rank": 4}, {"tp_rank": -1},
        {"notify_port": 0}, {"notify_port": 65536}, {"tp_size": 0}, {"regions": [1]}, {"regions": [b"r0"]},
        {"capabilities": "lease"},
        {"capabilities": ["c"] * 65}, {"geometry": None}, {"geometry": [10, 16, [640, 640]]},
        {"geometry": [10, 16, [639], [["a", "f8", 0, [[0, 0, 64, 64]]]]]},
        {"geometry": [10, 16, [640], [["a", "f8", 0, [[1, 0, 64, 64]]]]]},
        {"geometry": [2**31, 16, [640], []]},
    ],
)  # fmt: skip
def test_malformed_extension_is_refused(changes):
    """A missing, mistyped or impossible field of the extension refuses the handshake."""
    with pytest.raises(DecodeError):
        decode_hello(*patched_hello(**changes))


NOTIFY_MAP = {"type": "remote_blocks", "transfer_id": "t", "req_id": "r", "block_notify_list": [1], "decode_rank": 0}


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "nonsense"}, {"type": 1}, {"type": None}, {"transfer_id": ""}, {"transfer_id": None},
        {"transfer_id": 5}, {"transfer_id": "x" * 513}, {"block_notify_list": None}, {"block_notify_list": "12"},
        {"block_notify_list": [-1]}, {"block_notify_list": [2**31]}, {"block_notify_list": [1, [2]]},
        {"block_notify_list": [[1], 2]}, {"block_notify_list": [[[1]]]}, {"block_notify_list": [True]},
        {"block_notify_list": [1.0]}, {"block_notify_list": [[1]] * 65}, {"block_notify_list": [0] * (2**17 + 1)},
        {"decode_rank": -1}, {"decode_rank": 65536}, {"first_block": -1}, {"token": 1}, {"token": "x" * 513},
        {"type": "release", "consumer_tp_size": 0}, {"type": "write_done", "num_writers": 0},
        {"type": "write_done", "write_failed": 1}, {"type": "granted"}, {"type": "granted", "lease_ms": -1},
        {"type": "claim", "stamp": -1}, {"type": "claim", "stamp": 2**63},
    ],
)  # fmt: skip
def test_malformed_notify_map_is_refused(changes):
    """A missing field, a wrong type or a number out of range is a DecodeError."""
    fields = {**NOTIFY_MAP, **changes}
    if changes == {"type": None}:
        del fields["type"], fields["req_id"]
    frame = msgspec.msgpack.encode({k: v for k, v in fields.items() if v is not None or k == "transfer_id"})
    with pytest.raises(DecodeError):
        decode_notify(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"", b"\xff\xfe", b"\xdf", b"\x80", b"tx\x00", b"x" * 513, bytes(MAX_NOTIFY_BYTES + 1),
        b"\x81\xa4type\xdd\x7f\xff\xff\xff", b"\xdf\x7f\xff\xff\xff\xa4type\xa1x",
        b"\x81\xb1block_notify_list\xdd\x7f\xff\xff\xff\x01", b"\x81\xa1x" + b"\x91" * 100_000,
        b"\x81\xa4type\xa2\xff\xff", b"\x81\xa1x\xc1", encode(m.Claim("t", "k")) + b"\x00",
    ],
)  # fmt: skip
def test_hostile_notify_bytes_are_refused_without_allocating(frame):
    """Truncated, over-long, deeply nested or lying frames end in DecodeError and in no big allocation."""
    tracemalloc.start()
    with pytest.raises(DecodeError):
        decode_notify(frame)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def refused_or(decoder, *frames):
    """What was read, or None after a DecodeError."""
    try:
        return decoder(*frames)
    except DecodeError:
        return None


@quick
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_the_documented_error(data):
    """No decoder lets anything but DecodeError out."""
    good = encode_hello(HELLO, LAYERS)
    refused_or(decode_notify, data)
    refused_or(decode_ping, data)
    refused_or(decode_hello, data, good[1])
    refused_or(decode_hello, good[0], data)
    refused_or(decode_hello, msgspec.msgpack.encode({**msgspec.msgpack.decode(good[0]), "moriio": data}), good[1])


@quick
@given(NOTIFY, st.data())
def test_mutated_notify_frames_give_a_message_that_encodes_or_the_error(message, data):
    """One byte changed, or the tail cut: either DecodeError or a message within the limits."""
    frame = bytearray(encode(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] = data.draw(st.integers(0, 255))
    for mutant in (bytes(frame), bytes(frame[:at])):
        read = refused_or(decode_notify, mutant)
        if isinstance(read, m.RemoteBlocks):
            assert all(0 <= block < 2**31 for group in read.blocks for block in group)
        if read is not None:
            assert 1 <= len(read.transfer_id) <= 512


@quick
@given(st.data())
def test_mutated_hellos_give_a_valid_geometry_or_the_error(data):
    """A geometry that comes out of a mutated handshake still lies inside its regions."""
    first, second = (bytearray(part) for part in encode_hello(HELLO, LAYERS))
    for frame in (first, second):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    read = refused_or(decode_hello, bytes(first), bytes(second))
    if read is not None and read[0].extension is not None:
        geometry = read[0].extension.geometry
        for piece in (p for layer in geometry.layers for p in layer.pieces):
            last = piece.offset + (geometry.num_blocks - 1) * piece.stride + piece.nbytes
            assert last <= geometry.region_bytes[piece.region]


def test_oversized_handshake_is_refused_by_its_size():
    """The limit on the frame comes before any decoding."""
    with pytest.raises(DecodeError, match=str(MAX_HELLO_BYTES)):
        decode_hello(bytes(MAX_HELLO_BYTES + 1), b"\x80")


@pytest.mark.parametrize("key", ["type", "http_address", "zmq_address", "dp_size", "tp_size", "transfer_mode"])
def test_ping_needs_all_six_keys(key):
    """The example proxy's rule: a ping without one of its keys is no ping."""
    fields = msgspec.msgpack.decode(recorded("heartbeat")[0])
    del fields[key]
    with pytest.raises(DecodeError, match=key):
        decode_ping(msgspec.msgpack.encode(fields))
