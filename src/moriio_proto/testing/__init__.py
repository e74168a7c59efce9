"""What tests of this protocol need, for other people's tests too."""

from moriio_proto.testing.stock import check_against_stock

__all__ = ["check_against_stock"]
