"""Watermarks of a layerwise WRITE: each (block, layer) is posted exactly once, and never before it is computed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moriio_proto.progress import Rectangle, Watermark, advance

LAYERS = 4


def cells(mark: Watermark) -> set[tuple[int, int]]:
    whole = {(b, layer) for b in range(mark.base) for layer in range(LAYERS)}
    return whole | {(b, layer) for b in range(mark.base, mark.end) for layer in range(mark.layers)}


@st.composite
def chunked(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Chunks of a prefill, layer by layer, as the worker half reports them."""
    out, start = [], 0
    for size in draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)):
        out += [(start, start + size, layer) for layer in range(1, LAYERS + 1)]
        start += size
    return out


@settings(deadline=None)  # a busy machine is no finding
@given(chunked(), st.data())
def test_posted_is_computed_exactly_once(steps: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """However often posting falls behind, it covers what is computed, cell by cell, without a repeat."""
    computed, posted = Watermark(), Watermark()
    seen: set[tuple[int, int]] = set()
    for step in steps:
        computed.reach(*step, LAYERS)
        if data.draw(st.booleans()) or step == steps[-1]:
            for r in advance(posted, computed, LAYERS):
                new = {(b, x) for b in range(r.block_start, r.block_end) for x in range(r.layer_start, r.layer_end)}
                assert not new & seen
                seen |= new
            assert seen == cells(computed) == cells(posted)
    assert posted.base == steps[-1][1]


def test_a_late_start_posts_whole_blocks_in_one_rectangle() -> None:
    """An announcement that comes after two chunks costs one post for them, not one per layer."""
    computed, posted = Watermark(), Watermark()
    for step in ((0, 3, 1), (0, 3, LAYERS), (3, 5, 2)):
        computed.reach(*step, LAYERS)
    assert list(advance(posted, computed, LAYERS)) == [Rectangle(0, 3, 0, LAYERS), Rectangle(3, 5, 0, 2)]


def test_progress_never_moves_down() -> None:
    """A report that an earlier one includes changes nothing."""
    mark = Watermark()
    mark.reach(2, 4, 3, LAYERS)
    mark.reach(0, 2, LAYERS, LAYERS)
    mark.reach(2, 4, 1, LAYERS)
    assert mark == Watermark(2, 4, 3)
