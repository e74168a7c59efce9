"""Plans against a byte-by-byte reference: the same bytes move, no others, whatever the two layouts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moriio_proto.geometry import (
    CacheGeometry,
    GeometryMismatchError,
    LayerLayout,
    Pairing,
    Piece,
    PlanError,
    plan_blocks,
    split,
)

quick = settings(max_examples=80, deadline=None, derandomize=True)


def arrange(kind, lengths, num_blocks, *, order=None, pad=0):
    """A geometry whose layer i has pieces of `lengths[i]` bytes, arranged as vLLM's caches are.

    kind "own": a region per layer, a block's pieces side by side (standard, MLA, interleaved K/V, kernel blocks);
    "split": a region per layer, one area per piece (split K/V); "shared": one region, a block's layers side by side.
    """
    order = order or range(len(lengths))
    layers, sizes, at = [], [], 0
    stride = sum(map(sum, lengths)) + pad
    for i in order:
        pieces, region, offset = [], len(sizes), 0
        for nbytes in lengths[i]:
            if kind == "shared":
                pieces.append(Piece(0, at, stride, nbytes))
                at += nbytes
            elif kind == "own":
                pieces.append(Piece(region, offset, sum(lengths[i]) + pad, nbytes))
                offset += nbytes
            else:
                pieces.append(Piece(region, offset, nbytes + pad, nbytes))
                offset += (nbytes + pad) * num_blocks
        layers.append(LayerLayout(f"layer{i}", tuple(pieces), "content"))
        sizes.append((sum(lengths[i]) + pad * len(lengths[i])) * num_blocks)
    sizes = [stride * num_blocks] if kind == "shared" else sizes
    return CacheGeometry(tuple(layers), tuple(sizes), num_blocks, 16)


def memory(geometry, seed):
    """One bytearray per region, no two bytes near each other alike."""
    rng = np.random.default_rng(seed)
    return [bytearray(rng.integers(0, 256, size, np.uint8).tobytes()) for size in geometry.region_bytes]


def copied_by_plan(plan, ours, theirs):
    """Execute a plan as a transport would (WRITE), refusing what a slice would forgive."""
    for at in range(len(plan)):
        lr, lo = int(plan.local_region[at]), int(plan.local_offset[at])
        rr, ro, n = int(plan.remote_region[at]), int(plan.remote_offset[at]), int(plan.nbytes[at])
        assert n > 0
        assert lo + n <= len(ours[lr])
        assert ro + n <= len(theirs[rr])
        theirs[rr][ro : ro + n] = ours[lr][lo : lo + n]


def copied_by_reference(layers, remote, blocks, ours, theirs):
    """One byte at a time, straight from the definition of a piece."""
    by_name = {layer.name: layer for layer in remote.layers}
    for layer in layers:
        for p, q in zip(layer.pieces, by_name[layer.name].pieces, strict=True):
            for mine, its in blocks:
                for i in range(p.nbytes):
                    byte = ours[p.region][p.offset + mine * p.stride + i]
                    theirs[q.region][q.offset + its * q.stride + i] = byte


KINDS = st.sampled_from(["own", "split", "shared"])
LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4)


@quick
@given(st.data(), LENGTHS, KINDS, KINDS, st.integers(0, 3), st.integers(0, 3))
def test_plan_moves_exactly_the_bytes_of_the_reference(data, lengths, kind, its_kind, pad, its_pad):
    """Over random layouts, layer ranges, block lists and limits, memory ends as the byte-by-byte copy leaves it."""
    order = data.draw(st.permutations(range(len(lengths))))
    local = arrange(kind, lengths, 8, pad=pad)
    remote = arrange(its_kind, lengths, 12, order=order, pad=its_pad)
    start = data.draw(st.integers(0, len(lengths)))
    end = data.draw(st.integers(start, len(lengths)))
    count = data.draw(st.integers(0, 8))
    if data.draw(st.booleans()):
        mine, its = list(range(count)), list(range(3, 3 + count))
    else:
        mine = data.draw(st.permutations(range(8)))[:count]
        its = data.draw(st.permutations(range(12)))[:count]
    limit = data.draw(st.sampled_from([1, 3, 7, 64, 2**32 - 1]))
    plan = Pairing(local, remote).plan(start, end, mine, its, limit)

    ours, theirs, expected = memory(local, 1), memory(remote, 2), memory(remote, 2)
    copied_by_plan(plan, ours, theirs)
    copied_by_reference(local.layers[start:end], remote, list(zip(mine, its, strict=True)), ours, expected)
    assert theirs == expected
    assert plan.total_bytes == count * sum(map(sum, lengths[start:end]))  # no byte twice
    assert all(n <= limit for n in plan.nbytes)
    assert sum(len(part) for part in split(plan, 3)) == len(plan)


def runs(plan):
    """The plan as a sorted list of tuples."""
    columns = (plan.local_region, plan.local_offset, plan.remote_region, plan.remote_offset, plan.nbytes)
    return sorted(zip(*(c.tolist() for c in columns), strict=True))


def test_neighbouring_blocks_become_one_run():
    """Blocks that follow each other on both sides are one operation per layer; a gap on one side separates them."""
    geometry = arrange("own", [[64], [64]], 16)
    pairing = Pairing(geometry, geometry)
    assert runs(pairing.plan(0, 2, [2, 3, 4], [7, 8, 9])) == [(0, 128, 0, 448, 192), (1, 128, 1, 448, 192)]
    assert len(pairing.plan(0, 1, [2, 3, 4], [7, 9, 10])) == 2
    assert len(pairing.plan(0, 1, [4, 3, 2], [9, 8, 7])) == 3


def test_layers_of_a_shared_allocation_become_one_run_per_block():
    """All layers of a block lie side by side in a shared allocation: one operation per block, one for a run of them."""
    geometry = arrange("shared", [[64]] * 30, 16)
    pairing = Pairing(geometry, geometry)
    assert runs(pairing.plan(0, 30, [5, 2], [1, 9])) == [(0, 3840, 0, 17280, 1920), (0, 9600, 0, 1920, 1920)]
    assert runs(pairing.plan(0, 30, [5, 6], [1, 2])) == [(0, 9600, 0, 1920, 3840)]
    assert runs(pairing.plan(1, 3, [5], [1])) == [(0, 9664, 0, 1984, 128)]


def test_pieces_are_merged_only_where_both_sides_are_adjacent():
    """Interleaved K/V here and split K/V there stay two operations per block."""
    ours, theirs = arrange("own", [[32, 32]], 8), arrange("split", [[32, 32]], 8)
    assert runs(Pairing(ours, theirs).plan(0, 1, [1], [2])) == [(0, 64, 0, 64, 32), (0, 96, 0, 320, 32)]
    assert runs(Pairing(ours, ours).plan(0, 1, [1], [2])) == [(0, 64, 0, 128, 64)]


def two_layers(a, b, region_bytes):
    """Two layers of one piece each, two blocks."""
    layers = (LayerLayout("a", (a,), "c"), LayerLayout("b", (b,), "c"))
    return CacheGeometry(layers, region_bytes, 2, 16)


ADJACENT = two_layers(Piece(0, 0, 128, 64), Piece(0, 64, 128, 64), (256,))
OTHER_REGION = two_layers(Piece(0, 0, 128, 64), Piece(1, 64, 128, 64), (192, 256))
OTHER_STRIDE = two_layers(Piece(0, 0, 256, 64), Piece(0, 64, 512, 64), (640,))


@pytest.mark.parametrize("side", [OTHER_REGION, OTHER_STRIDE])
def test_runs_are_adjacent_only_in_one_region_and_in_every_block(side):
    """Following offsets in two regions, or in block 0 alone, are not merged, whichever side has them."""
    for local, remote in ((side, ADJACENT), (ADJACENT, side)):
        plan = Pairing(local, remote).plan(0, 2, [1], [1])
        assert plan.nbytes.tolist() == [64, 64]
        ours, theirs, expected = memory(local, 1), memory(remote, 2), memory(remote, 2)
        copied_by_plan(plan, ours, theirs)
        copied_by_reference(local.layers, remote, [(1, 1)], ours, expected)
        assert theirs == expected
    assert Pairing(ADJACENT, ADJACENT).plan(0, 2, [1], [1]).nbytes.tolist() == [128]


def test_layers_are_paired_by_name():
    """A peer that lists its layers in another order gets each layer's bytes in the right place."""
    ours, theirs = arrange("own", [[8], [8]], 4), arrange("own", [[8], [8]], 4, order=[1, 0])
    assert runs(Pairing(ours, theirs).plan(0, 1, [0], [0])) == [(0, 0, 1, 0, 8)]


def test_offsets_far_above_4_gib_are_exact():
    """Block 999 of a region of 1,000 TiB has its exact 64-bit offset on both sides."""
    size = 2**40
    geometry = CacheGeometry((LayerLayout("a", (Piece(0, 5, size, size - 5),), "c"),), (size * 1000,), 1000, 16)
    plan = Pairing(geometry, geometry).plan(0, 1, [999], [998], 2**62)
    assert runs(plan) == [(0, 999 * size + 5, 0, 998 * size + 5, size - 5)]
    assert plan.local_offset.dtype == plan.remote_offset.dtype == plan.nbytes.dtype == np.uint64
    assert plan.local_region.dtype == plan.remote_region.dtype == np.int32
    cut = Pairing(geometry, geometry).plan(0, 1, [999], [998], 2**32 - 1)
    assert cut.total_bytes == size - 5
    assert len(cut) == 257
    assert int((cut.local_offset + cut.nbytes).max()) == size * 1000


@pytest.mark.parametrize(
    ("mine", "its", "named"),
    [
        ([8], [0], "local block 8"), ([-1], [0], "local block -1"), ([0], [12], "remote block 12"),
        ([0], [-1], "remote block -1"), ([2**63 - 1], [0], "local block"), ([2**64], [0], "local blocks"),
        ([0], [2**31], "remote block"), ([0, 1], [0], "2 local blocks for 1 remote"), ([[0]], [[0]], "flat list"),
        (["a"], [0], "local blocks"), ([-(2**63)], [0], "local block -"),
    ],
)  # fmt: skip
def test_block_that_a_side_does_not_have_is_refused(mine, its, named):
    """Ids are checked against both sides before any address is computed; the error names side and id."""
    pairing = Pairing(arrange("own", [[4]], 8), arrange("own", [[4]], 12))
    with pytest.raises(PlanError, match=named):
        pairing.plan(0, 1, mine, its)


def test_layers_and_limits_out_of_range_are_refused():
    """A layer range that is not there, or a limit that nothing fits into, is an error."""
    pairing = Pairing(arrange("own", [[4]], 8), arrange("own", [[4]], 8))
    for start, end in ((0, 2), (-1, 1), (1, 0), (2, 2)):
        with pytest.raises(PlanError, match="layers"):
            pairing.plan(start, end, [0], [0])
    with pytest.raises(PlanError, match="max_op_bytes=0"):
        pairing.plan(0, 1, [0], [0], 0)
    with pytest.raises(PlanError, match="max_ops=0"):
        split(pairing.plan(0, 1, [0], [0]), 0)


def test_zero_blocks_or_zero_layers_are_an_empty_plan():
    """Zero is a case of its own: nothing to move is a plan without runs, and no part of it is posted."""
    pairing = Pairing(arrange("own", [[4]], 8), arrange("own", [[4]], 8))
    for plan in (pairing.plan(0, 1, [], []), pairing.plan(1, 1, [0], [0])):
        assert (len(plan), plan.total_bytes, split(plan, 5)) == (0, 0, [])
        assert plan.local_offset.dtype == np.uint64


def test_split_keeps_order_and_runs():
    """Parts have at most the given number of runs and together are the plan."""
    pairing = Pairing(arrange("own", [[4]], 8), arrange("own", [[4]], 8))
    plan = pairing.plan(0, 1, [0, 2, 4, 6, 1], [7, 5, 3, 1, 0])
    parts = split(plan, 2)
    assert [len(part) for part in parts] == [2, 2, 1]
    assert [x for part in parts for x in part.local_offset.tolist()] == plan.local_offset.tolist()
    assert split(plan, 5) == [plan]


def test_incompatible_geometries_are_no_pairing():
    """A mismatch is found when the pair is made, not when bytes move."""
    with pytest.raises(GeometryMismatchError, match="piece lengths"):
        Pairing(arrange("own", [[4]], 8), arrange("own", [[8]], 8))


def test_plan_blocks_takes_indices_or_a_slice():
    """The function without a prepared pairing plans the same bytes."""
    geometry = arrange("own", [[4], [4], [4]], 8)
    whole = Pairing(geometry, geometry).plan(0, 3, [1, 5], [2, 3])
    assert runs(plan_blocks(geometry, geometry, slice(None), [1, 5], [2, 3])) == runs(whole)
    assert runs(plan_blocks(geometry, geometry, [2, 0], [1], [2])) == [(0, 4, 0, 8, 4), (2, 4, 2, 8, 4)]
    assert len(plan_blocks(geometry, geometry, [], [1], [2])) == 0
