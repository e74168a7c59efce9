"""Geometries: what is refused, what survives the wire, which two can be copied into each other."""

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moriio_proto.errors import DecodeError
from moriio_proto.geometry import CacheGeometry, GeometryMismatchError, LayerLayout, Piece, check_compatible

quick = settings(max_examples=60, deadline=None, derandomize=True)


def geometry(**changes):
    """Two layers of split K/V in one region each, ten blocks of 16 tokens."""
    pieces = (Piece(0, 0, 64, 32), Piece(0, 640, 64, 64))
    layers = (LayerLayout("a", pieces, "bf16"), LayerLayout("b", (Piece(1, 0, 64, 64),), "f8", 1))
    return CacheGeometry(
        **{"layers": layers, "region_bytes": (1280, 640), "num_blocks": 10, "block_tokens": 16, **changes}
    )


def one_piece(piece, region_bytes=640, num_blocks=10):
    """One layer of one piece."""
    return CacheGeometry((LayerLayout("a", (piece,), "c"),), (region_bytes,), num_blocks, 16)


@pytest.mark.parametrize(
    "piece",
    [
        Piece(1, 0, 64, 64), Piece(-1, 0, 64, 64), Piece(0, -1, 64, 64), Piece(0, 0, -64, 64), Piece(0, 0, 64, 0),
        Piece(0, 1, 64, 64), Piece(0, 0, 64, 65), Piece(0, 0, 65, 64), Piece(0, 2**63, 64, 64),
        Piece(0, 0, 63, 64), Piece(0, 0, 0, 1),
    ],
)  # fmt: skip
def test_piece_outside_its_region_or_over_its_neighbour_is_refused(piece):
    """No block of any geometry reaches one byte beyond its region or into the next block."""
    assert one_piece(Piece(0, 0, 64, 64)).num_blocks == 10
    with pytest.raises(ValueError, match="'a'"):
        one_piece(piece)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_blocks": 0}, "num_blocks=0"), ({"num_blocks": 2**31}, "num_blocks"),
        ({"block_tokens": 0}, "block_tokens=0"),
        ({"region_bytes": (1280, -1)}, "region_bytes"), ({"region_bytes": (1280, 2**63)}, "region_bytes"),
        ({"region_bytes": (1280,)}, "region 1 of 1"), ({"layers": (LayerLayout("a", (), "c"),)}, "at least one piece"),
        ({"layers": (LayerLayout("a", (Piece(0, 0, 64, 64),), "c"),) * 2}, "different names"),
    ],
)  # fmt: skip
def test_impossible_geometry_is_refused_by_name(changes, named):
    """The error names what is out of range."""
    with pytest.raises(ValueError, match=named):
        geometry(**changes)


def test_last_byte_of_a_huge_region_is_reachable():
    """Offsets far above 4 GiB are exact: the last block may end with the region, and not one byte later."""
    piece = Piece(0, 0, 2**40, 2**40)
    assert one_piece(piece, region_bytes=2**40 * 1000, num_blocks=1000).num_blocks == 1000
    with pytest.raises(ValueError, match="ends at"):
        one_piece(piece, region_bytes=2**40 * 1000 - 1, num_blocks=1000)


def test_block_bytes_counts_every_piece_of_every_layer():
    """One block of the example has 32 + 64 + 64 bytes."""
    assert geometry().block_bytes == 160


def test_geometry_survives_the_wire():
    """Plain lists and back give the same geometry."""
    assert CacheGeometry.from_wire(geometry().to_wire()) == geometry()


JUNK = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@quick
@given(JUNK, st.integers(0, 3))
def test_arbitrary_object_is_a_geometry_or_a_decode_error(junk, at):
    """Nothing but DecodeError comes out, wherever the junk stands."""
    wire = geometry().to_wire()
    wire[at] = junk
    for obj in (junk, wire):
        try:
            read = CacheGeometry.from_wire(obj)
        except DecodeError:
            continue
        assert CacheGeometry.from_wire(read.to_wire()) == read


@pytest.mark.parametrize("at", [(0,), (1,), (2, 0), (3, 0, 0), (3, 0, 2), (3, 0, 3, 0, 0), (3, 1, 3, 0, 3)])
@pytest.mark.parametrize("bad", [-1, 2**63, 2**64, "", None, 1.5, True, [[]]])
def test_malformed_number_or_name_in_a_peers_geometry_is_a_decode_error(at, bad):
    """Every single field is checked for type and range."""
    wire = geometry().to_wire()
    target = wire
    for index in at[:-1]:
        target = target[index]
    target[at[-1]] = bad
    with pytest.raises(DecodeError):
        CacheGeometry.from_wire(wire)


def test_deeply_nested_object_is_a_decode_error():
    """Nesting without end does not end the process."""
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(DecodeError):
        CacheGeometry.from_wire([10, 16, [640], deep])


def with_layer(which, /, **changes):
    """The example with one layer changed."""
    layers = tuple(attrs.evolve(x, **changes) if x.name == which else x for x in geometry().layers)
    return geometry(layers=layers)


@pytest.mark.parametrize(
    ("theirs", "factor"),
    [
        (geometry(block_tokens=32), "block_tokens"),
        (geometry(layers=geometry().layers[:1]), "layer names"),
        (with_layer("a", name="z"), "layer names"),
        (with_layer("a", content="f16"), "content of layer 'a'"),
        (with_layer("b", group=2), "group of layer 'b'"),
        (with_layer("b", pieces=(Piece(1, 0, 64, 32),)), "piece lengths of layer 'b'"),
        (with_layer("a", pieces=geometry().layers[0].pieces[::-1]), "piece lengths of layer 'a'"),
    ],
)
def test_mismatch_names_the_factor(theirs, factor):
    """What cannot be copied byte by byte is refused, with the name of what differs, in both directions."""
    for one, other in ((geometry(), theirs), (theirs, geometry())):
        with pytest.raises(GeometryMismatchError) as caught:
            check_compatible(one, other)
        assert caught.value.factor.replace("'z'", "'a'") == factor


def test_strides_offsets_regions_counts_and_order_may_differ():
    """Only meaning and lengths must agree: another arrangement of the same blocks is compatible."""
    layers = (
        LayerLayout("b", (Piece(0, 96, 160, 64),), "f8", 1),
        LayerLayout("a", (Piece(0, 0, 160, 32), Piece(0, 32, 160, 64)), "bf16"),
    )
    check_compatible(geometry(), CacheGeometry(layers, (160 * 3,), num_blocks=3, block_tokens=16))


def test_mismatch_of_many_layer_names_stays_short():
    """An error about hundreds of layers is still one line."""
    many = tuple(LayerLayout(f"layer{i}", (Piece(0, 0, 64, 64),), "c") for i in range(500))
    with pytest.raises(GeometryMismatchError, match="and 496 more") as caught:
        check_compatible(geometry(), geometry(layers=many))
    assert len(str(caught.value)) < 200
