"""Where vLLM's cache tensors keep each block: from tensor strides and cache specs to pieces of regions.

A tensor's axes are identified by their sizes against a short list of forms; everything else follows from strides:

1. split the block axis into scheduler blocks when it counts smaller kernel blocks,
2. order the axes inside a block by stride, which gives the block's bytes their meaning (`content`),
3. join the innermost axes that are contiguous into one run; the axes left over enumerate the pieces.

So K and V halves, heads apart from each other, other layers' pages in between and padding need no case of their own.
Every allocation (`untyped_storage`) is one region, however many layers lie in it.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final

import attrs

from moriio_proto.errors import ConfigurationError
from moriio_proto.geometry import CacheGeometry, LayerLayout, Piece
from moriio_transport.base import Region

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import torch

__all__ = ["MAX_PIECES", "LayerSpec", "describe_caches", "describe_vllm_caches", "layer_specs"]

MAX_PIECES: Final = 256  # of one block of one layer; more would make every block a storm of tiny copies

# B blocks, H heads, N stored states (tokens), C content of one, K the pair of K and V halves.
_FORMS: Final = ("BNC", "BHNC", "KBNHC", "KBHNC", "BKNHC", "BKHNC")
_SHOWN: Final = {"K": "KV", "R": "kernel_blocks"}


@attrs.frozen
class LayerSpec:
    """What one layer's cache holds, in the terms of vLLM's cache specs."""

    block_tokens: int  # of a scheduler block
    heads: int
    states: int  # stored per head in a scheduler block: its tokens, unless the cache is compressed
    state_bytes: int  # of one, K and V together
    encoding: str = ""  # what the element type does not tell, such as the kind of an 8-bit float


@attrs.frozen
class _Axis:
    label: str
    size: int
    stride: int  # bytes


def describe_caches(
    kv_caches: Mapping[str, torch.Tensor],
    specs: Mapping[str, LayerSpec],
    *,
    num_blocks: int,
    not_moved: Collection[str] = (),
) -> tuple[CacheGeometry, tuple[Region, ...]]:
    """Describe the caches of all layers.

    Args:
        kv_caches: what vLLM registers: layer name to tensor, in any of the forms `[B,N,C]`, `[B,H,N,C]`,
            `[2,B,N,H,C]`, `[2,B,H,N,C]`, `[B,2,N,H,C]`, `[B,2,H,N,C]`, with any strides.
        specs: the layers to move, in the order that the geometry shall have.
        num_blocks: scheduler blocks.
        not_moved: layers whose caches stay where they are.

    Returns:
        The geometry and the regions to register.  A layer that shares its cache with an earlier one is left out.

    Raises:
        ConfigurationError: names the layer, what it has and what was expected.
    """
    moved = _distinct(kv_caches, specs, not_moved)
    regions = _regions(moved.values())
    layers = tuple(_layer(name, tensor, specs[name], num_blocks, regions) for name, tensor in moved.items())
    tokens = {specs[name].block_tokens for name in moved}
    if len(tokens) != 1:
        raise ConfigurationError("tokens of a block", sorted(tokens), "the same in every layer of the one cache group")
    geometry = CacheGeometry(layers, tuple(region.nbytes for region in regions), num_blocks, tokens.pop())
    return geometry, regions


def _distinct(
    kv_caches: Mapping[str, torch.Tensor], specs: Mapping[str, LayerSpec], not_moved: Collection[str]
) -> dict[str, torch.Tensor]:
    """The caches to move, each once: every cache takes part, is known not to, or is another name of one that does."""
    views: dict[tuple[Any, ...], str] = {}
    for name in specs:
        if name not in kv_caches:
            raise ConfigurationError(f"cache of layer {name!r}", None, "a registered tensor, as the cache spec says")
        views.setdefault(_view(kv_caches[name]), name)
    for name, tensor in kv_caches.items():
        if name not in specs and name not in not_moved and _view(tensor) not in views:
            raise _refuse(
                name, tensor, "a cache spec for this layer; a cache that does not move would give wrong answers"
            )
    return {name: kv_caches[name] for name in views.values()}


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _refuse(name: str, tensor: torch.Tensor, expected: str) -> ConfigurationError:
    shown = f"{_dtype(tensor)}{list(tensor.shape)} with strides {list(tensor.stride())}"
    return ConfigurationError(f"cache of layer {name!r}", shown, expected)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _regions(tensors: Iterable[torch.Tensor]) -> tuple[Region, ...]:
    """One region per allocation, in order of address; allocations that overlap become one."""
    regions: list[Region] = []
    for region in sorted({_allocation(t) for t in tensors}, key=lambda r: (r.device, r.device_index, r.address)):
        last = regions[-1] if regions else None
        same = last is not None and (last.device, last.device_index) == (region.device, region.device_index)
        if last is not None and same and region.address < last.address + last.nbytes:
            end = max(last.address + last.nbytes, region.address + region.nbytes)
            regions[-1] = attrs.evolve(last, nbytes=end - last.address)
        else:
            regions.append(region)
    return tuple(regions)


def _allocation(tensor: torch.Tensor) -> Region:
    storage, device = tensor.untyped_storage(), tensor.device
    return Region(storage.data_ptr(), storage.nbytes(), device.type, -1 if device.index is None else device.index)


def _layer(name: str, tensor: torch.Tensor, spec: LayerSpec, num_blocks: int, regions: Sequence[Region]) -> LayerLayout:
    """The pieces of one layer's blocks and their meaning."""
    block_stride, inner = _axes(name, tensor, spec, num_blocks)
    run, outer = tensor.element_size(), list(inner)
    _check_apart(name, tensor, inner)
    while outer and outer[-1].stride == run:
        run *= outer.pop().size
    count = math.prod(axis.size for axis in outer)
    if count > MAX_PIECES:
        raise _refuse(name, tensor, f"at most {MAX_PIECES} contiguous pieces per block, not {count}: another KV layout")
    address = tensor.data_ptr()
    own = _allocation(tensor)
    index = next(
        i for i, r in enumerate(regions)
        if (r.device, r.device_index) == (own.device, own.device_index) and r.address <= address < r.address + r.nbytes
    )  # fmt: skip
    first = address - regions[index].address
    offsets = (
        first + sum(at * axis.stride for at, axis in zip(place, outer, strict=True))
        for place in itertools.product(*(range(axis.size) for axis in outer))
    )
    pieces = tuple(Piece(index, offset, block_stride, run) for offset in offsets)
    return LayerLayout(name, pieces, _content(tensor, spec, inner))


def _axes(name: str, tensor: torch.Tensor, spec: LayerSpec, num_blocks: int) -> tuple[int, list[_Axis]]:
    """The stride of scheduler blocks, and the axes inside one, outermost in memory first, without those of size 1."""
    fits = [form for form in _FORMS if _fits(form, tensor, spec, num_blocks)]
    wanted = (
        f"{num_blocks} blocks (or a whole multiple, as kernel blocks) of {spec.heads} heads, {spec.states} states in "
        f"all and {spec.state_bytes} bytes per state, in one of the forms {', '.join(_FORMS)}"
    )
    if len(fits) > 1:
        raise _refuse(name, tensor, f"{wanted}; {' and '.join(fits)} fit both: choose another --block-size")
    if not fits:
        raise _refuse(name, tensor, wanted)
    size = tensor.element_size()
    axes = {
        label: _Axis(label, extent, stride * size)
        for label, extent, stride in zip(fits[0], tensor.shape, tensor.stride(), strict=True)
    }
    blocks = axes.pop("B")
    ratio = blocks.size // num_blocks
    inner = [*axes.values(), _Axis("R", ratio, blocks.stride)]
    return blocks.stride * ratio, sorted((a for a in inner if a.size > 1), key=lambda a: -a.stride)


def _fits(form: str, tensor: torch.Tensor, spec: LayerSpec, num_blocks: int) -> bool:
    if len(form) != tensor.ndim:
        return False
    sizes = dict(zip(form, tensor.shape, strict=True))
    ratio, rest = divmod(sizes["B"], num_blocks)
    state_bytes = sizes["C"] * tensor.element_size() * (2 if "K" in sizes else 1)
    has = (rest, sizes.get("K", 2), sizes.get("H", 1), sizes["N"] * ratio, state_bytes)
    return has == (0, 2, spec.heads, spec.states, spec.state_bytes)


def _check_apart(name: str, tensor: torch.Tensor, inner: Sequence[_Axis]) -> None:
    """No two elements of a block share bytes."""
    extent = tensor.element_size()
    for axis in reversed(inner):
        if axis.stride < extent:
            raise _refuse(name, tensor, "a cache whose elements do not overlap")
        extent += axis.stride * (axis.size - 1)


def _content(tensor: torch.Tensor, spec: LayerSpec, inner: Sequence[_Axis]) -> str:
    """Element type and axes in memory order, such as `float32[H=2,N=16,C=128]`.

    Kernel blocks directly outside the states are no axis of their own: the bytes are those of one larger block.
    """
    sizes: list[tuple[str, int]] = []
    for axis in inner:
        if sizes and sizes[-1][0] == "R" and axis.label == "N":
            sizes[-1] = ("N", sizes[-1][1] * axis.size)
        else:
            sizes.append((axis.label, axis.size))
    shown = ",".join(f"{_SHOWN.get(label, label)}={size}" for label, size in sizes)
    return f"{_dtype(tensor)}{':' + spec.encoding if spec.encoding else ''}[{shown}]"


def describe_vllm_caches(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any, cache_dtype: str = "auto"
) -> tuple[CacheGeometry, tuple[Region, ...]]:
    """`describe_caches` for what vLLM's worker registers.

    Args:
        kv_caches: the argument of `register_kv_caches`.
        kv_cache_config: vLLM's `KVCacheConfig`.
        cache_dtype: vLLM's `--kv-cache-dtype`.

    Raises:
        ConfigurationError: names the layer, what it has and what was expected.
    """
    specs = layer_specs(kv_cache_config, cache_dtype)
    kept = {n for g in kv_cache_config.kv_cache_groups if not g.enable_kv_transfer for n in g.layer_names}
    return describe_caches(kv_caches, specs, num_blocks=kv_cache_config.num_blocks, not_moved=kept)


def layer_specs(kv_cache_config: Any, cache_dtype: str = "auto") -> dict[str, LayerSpec]:
    """The specs of all layers that move, in vLLM's order.

    Args:
        kv_cache_config: vLLM's `KVCacheConfig`.
        cache_dtype: vLLM's `--kv-cache-dtype`; peers with different 8-bit formats must not meet.

    Raises:
        ConfigurationError: several cache groups, or a spec that cannot be moved block by block; names the layer.
    """
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs  # noqa: PLC0415 - without vLLM the rest works

    groups = kv_cache_config.transfer_groups
    if len(groups) != 1:
        names = [f"{g.layer_names[0]} ({type(g.kv_cache_spec).__name__})" for g in groups if g.layer_names]
        hint = "one group of layers with the same cache spec; try --disable-hybrid-kv-cache-manager"
        raise ConfigurationError("KV cache groups, by first layer", names, hint)
    (group,) = groups
    spec = group.kv_cache_spec
    one_each = isinstance(spec, UniformTypeKVCacheSpecs)
    return {n: _spec_of(n, spec.kv_cache_specs[n] if one_each else spec, cache_dtype) for n in group.layer_names}


def _spec_of(name: str, spec: Any, cache_dtype: str) -> LayerSpec:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec  # noqa: PLC0415 - as above

    # The exact types: a subclass (sinks, rings, side caches) keeps state that a block's bytes do not tell.
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        hint = (
            "FullAttentionSpec or MLAAttentionSpec; sliding windows work as full attention with "
            "--disable-hybrid-kv-cache-manager, recurrent state and other specs are not supported"
        )
        raise ConfigurationError(f"cache spec of layer {name!r}", type(spec).__name__, hint)
    quantised = [] if spec.dtype.itemsize > 1 else [_FP8_NAMES.get(cache_dtype, cache_dtype)]
    scales = [] if spec.kv_quant_mode.name == "NONE" else [spec.kv_quant_mode.name.lower()]
    return LayerSpec(
        block_tokens=spec.block_size,
        heads=spec.num_heads,
        states=spec.num_states,
        state_bytes=spec.state_content_size_bytes,
        encoding="/".join(quantised + scales),
    )


_FP8_NAMES: Final = {"fp8": "fp8_e4m3"}  # vLLM's short name of it
