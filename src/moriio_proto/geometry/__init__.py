"""Where the bytes of a block lie, on both sides, and which runs move them: pure numpy, no I/O."""

from moriio_proto.geometry.layout import CacheGeometry, GeometryMismatchError, LayerLayout, Piece, check_compatible
from moriio_proto.geometry.plan import Pairing, PlanError, TransferPlan, plan_blocks, split

__all__ = [
    "CacheGeometry",
    "GeometryMismatchError",
    "LayerLayout",
    "Pairing",
    "Piece",
    "PlanError",
    "TransferPlan",
    "check_compatible",
    "plan_blocks",
    "split",
]
