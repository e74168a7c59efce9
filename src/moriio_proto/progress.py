"""How far a layerwise WRITE is: what is computed, what is posted, and the rectangles between the two.

A prefill runs in chunks, a chunk runs layer by layer.  So the computed part of a transfer is always all layers
of blocks `[0, base)` and the first `layers` layers of blocks `[base, end)`: a rectangle with a step.  The posted
part has the same form, and what to post next is at most three rectangles (blocks x layers).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import attrs

__all__ = ["Rectangle", "Watermark", "advance"]


class Rectangle(NamedTuple):
    """Layers `[layer_start, layer_end)` of blocks `[block_start, block_end)`."""

    block_start: int
    block_end: int
    layer_start: int
    layer_end: int


@attrs.define
class Watermark:
    """All layers of blocks below `base`, and `layers` layers of blocks `[base, end)`."""

    base: int = 0
    end: int = 0
    layers: int = 0

    def reach(self, start: int, end: int, layers: int, num_layers: int) -> None:
        """Move up to: blocks below `start` whole, `[start, end)` in `layers` layers.  Never moves down."""
        if layers >= num_layers:
            start, layers = end, 0
        if (start, layers) > (self.base, self.layers):
            self.base, self.end, self.layers = start, max(end, start), layers


def advance(posted: Watermark, computed: Watermark, num_layers: int) -> Iterator[Rectangle]:
    """Move `posted` up to `computed`; yields what lies between, each cell exactly once."""
    if posted.layers and (posted.base, posted.layers) < (computed.base, computed.layers):
        top = computed.layers if computed.base == posted.base else num_layers
        yield Rectangle(posted.base, posted.end, posted.layers, top)
        posted.reach(posted.base, posted.end, top, num_layers)
    if posted.base < computed.base:
        yield Rectangle(posted.base, computed.base, 0, num_layers)
        posted.base, posted.end, posted.layers = computed.base, computed.base, 0
    if computed.layers and not posted.layers:
        yield Rectangle(computed.base, computed.end, 0, computed.layers)
        posted.reach(computed.base, computed.end, computed.layers, num_layers)
