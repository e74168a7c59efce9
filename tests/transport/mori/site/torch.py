"""Stands for PyTorch, of which `mori.io` needs no more than a name for annotations."""


class Tensor:
    """Named by annotations."""
