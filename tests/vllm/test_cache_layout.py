"""Cache layouts from real torch tensors: every byte of a block is moved, and no other."""

from __future__ import annotations

import ctypes
import math

import pytest

torch = pytest.importorskip("torch")

from moriio_proto.errors import ConfigurationError  # noqa: E402 - torch decides whether this file runs
from moriio_proto.geometry import GeometryMismatchError, plan_blocks  # noqa: E402
from moriio_vllm.cache_layout import LayerSpec, describe_caches, describe_vllm_caches, layer_specs  # noqa: E402

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 32, 8
SPEC = LayerSpec(block_tokens=TOKENS, heads=HEADS, states=TOKENS, state_bytes=CONTENT * 4)
LATENT = LayerSpec(block_tokens=TOKENS, heads=1, states=TOKENS, state_bytes=CONTENT * 4)
NAMES = ["layers.0", "layers.1", "layers.2"]


def permuted(sizes, order):
    """A tensor with axes `sizes` whose memory order is `order`, filled with distinct values."""
    tensor = torch.arange(math.prod(sizes), dtype=torch.float32).reshape([sizes[axis] for axis in order])
    return tensor.permute([order.index(axis) for axis in range(len(sizes))])


def shared(order):
    """One view [B,H,N,C] per layer of one allocation [L,B,H,N,C] in the memory order `order`, as vLLM makes them."""
    whole = permuted([len(NAMES), BLOCKS, HEADS, TOKENS, CONTENT], order)
    return {name: whole[index] for index, name in enumerate(NAMES)}


def each(make):
    """A tensor of its own for every layer, with different values."""
    return {name: make().add_(1000 * index) for index, name in enumerate(NAMES)}


def kernel(blocks_per_page, order):
    """[B * r, H, N / r, C]: kernel blocks smaller than the scheduler's."""
    return permuted([BLOCKS * blocks_per_page, HEADS, TOKENS // blocks_per_page, CONTENT], order)


LAYOUTS = {
    "LBHNC": (lambda: shared([0, 1, 2, 3, 4]), SPEC, 1),
    "LBNHC": (lambda: shared([0, 1, 3, 2, 4]), SPEC, 1),
    "LHBNC": (lambda: shared([0, 2, 1, 3, 4]), SPEC, HEADS),
    "BLHNC": (lambda: shared([1, 0, 2, 3, 4]), SPEC, 1),
    "BLNHC": (lambda: shared([1, 0, 3, 2, 4]), SPEC, 1),
    "BHLNC": (lambda: shared([1, 2, 0, 3, 4]), SPEC, HEADS),
    "split": (lambda: each(lambda: permuted([2, BLOCKS, TOKENS, HEADS, CONTENT // 2], [0, 1, 2, 3, 4])), SPEC, 2),
    "split HND": (lambda: each(lambda: permuted([2, BLOCKS, TOKENS, HEADS, CONTENT // 2], [0, 1, 3, 2, 4])), SPEC, 2),
    "split, heads first": (lambda: each(lambda: torch.rand(2, BLOCKS, HEADS, TOKENS, CONTENT // 2)), SPEC, 2),
    "interleaved": (lambda: each(lambda: torch.rand(BLOCKS, 2, TOKENS, HEADS, CONTENT // 2)), SPEC, 1),
    "interleaved, heads first": (lambda: each(lambda: torch.rand(BLOCKS, 2, HEADS, TOKENS, CONTENT // 2)), SPEC, 1),
    "MLA": (lambda: each(lambda: torch.rand(BLOCKS, TOKENS, CONTENT)), LATENT, 1),
    "MLA with one head": (lambda: each(lambda: torch.rand(BLOCKS, 1, TOKENS, CONTENT)), LATENT, 1),
    "kernel blocks": (lambda: each(lambda: kernel(2, [0, 1, 2, 3])), SPEC, 1),
    "kernel blocks, tokens first": (lambda: each(lambda: kernel(4, [0, 2, 1, 3])), SPEC, 1),
    "kernel blocks of split": (lambda: each(lambda: torch.rand(2, BLOCKS * 2, TOKENS // 2, HEADS, 4)), SPEC, 2),
    "padded pages": (lambda: each(lambda: torch.rand(BLOCKS, HEADS, TOKENS + 3, CONTENT)[:, :, :TOKENS]), SPEC, HEADS),
}


def describe(caches, spec, **more):
    """Geometry and regions of caches that all have one spec."""
    return describe_caches(caches, dict.fromkeys(caches, spec), num_blocks=BLOCKS, **more)


def blocks_of(tensor, spec):
    """The tensor with scheduler blocks as axis 0, as a copy."""
    split = tensor.ndim == 5 and tensor.shape[0] == 2
    blocks = (tensor.movedim(1, 0) if split else tensor).clone()
    return blocks.unflatten(0, (BLOCKS, -1))


def run(plan, ours, theirs):
    """Carry a plan out: local bytes to remote bytes."""
    for row in zip(
        plan.local_region, plan.local_offset, plan.remote_region, plan.remote_offset, plan.nbytes, strict=True
    ):
        source, source_at, target, target_at, nbytes = map(int, row)
        assert source_at + nbytes <= ours[source].nbytes
        assert target_at + nbytes <= theirs[target].nbytes
        ctypes.memmove(theirs[target].address + target_at, ours[source].address + source_at, nbytes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_arrive_whole_and_alone(name):
    """Blocks copied by the described pieces equal their source in every layer; no other byte changes."""
    make, spec, pieces = LAYOUTS[name]
    source, target = make(), {layer: tensor.mul_(-1) for layer, tensor in make().items()}
    expected = {layer: blocks_of(tensor, spec) for layer, tensor in target.items()}
    (local, ours), (remote, theirs) = describe(source, spec), describe(target, spec)
    assert {len(layer.pieces) for layer in local.layers} == {pieces}
    assert [layer.name for layer in local.layers] == NAMES
    assert (local.num_blocks, local.block_tokens) == (BLOCKS, TOKENS)
    run(plan_blocks(local, remote, slice(None), [4, 0, 5], [1, 2, 5]), ours, theirs)
    for layer in NAMES:
        here = blocks_of(source[layer], spec)
        expected[layer][[1, 2, 5]] = here[[4, 0, 5]]
        assert torch.equal(blocks_of(target[layer], spec), expected[layer])


@pytest.mark.parametrize(
    ("one", "other"),
    [("LBHNC", "BLHNC"), ("MLA", "MLA with one head"), ("LHBNC", "BHLNC"), ("LBNHC", "kernel blocks, tokens first")],
)
def test_w_mixed_layout_same_content_in_another_place(one, other):
    """W-MIXED-LAYOUT: two sides whose blocks mean the same are copied, wherever their blocks lie."""
    (make, spec, _), (make_other, other_spec, _) = LAYOUTS[one], LAYOUTS[other]
    source, target = make(), make_other()
    (local, ours), (remote, theirs) = describe(source, spec), describe(target, other_spec)
    run(plan_blocks(local, remote, slice(None), [4, 0], [1, 2]), ours, theirs)
    for layer in NAMES:
        moved, arrived = blocks_of(source[layer], spec)[[4, 0]], blocks_of(target[layer], spec)[[1, 2]]
        if other.startswith("kernel"):
            arrived = arrived.movedim(2, 1).flatten(2, 3)
            moved = moved.squeeze(1)
        assert torch.equal(moved.reshape(-1), arrived.reshape(-1))


@pytest.mark.parametrize(
    ("one", "other"), [("LBHNC", "LBNHC"), ("LBHNC", "split"), ("LBHNC", "kernel blocks"), ("split", "split HND")]
)
def test_other_memory_order_is_another_content(one, other):
    """Heads before tokens, K and V apart, and interleaved kernel blocks are refused by name, not copied as bytes."""
    (make, spec, _), (make_other, other_spec, _) = LAYOUTS[one], LAYOUTS[other]
    with pytest.raises(GeometryMismatchError, match="content"):
        plan_blocks(describe(make(), spec)[0], describe(make_other(), other_spec)[0], slice(None), [0], [0])


def test_content_says_what_the_bytes_are():
    """The text that peers compare names the type and the axes in memory order."""
    contents = {name: describe(make(), spec)[0].layers[0].content for name, (make, spec, _) in LAYOUTS.items()}
    assert contents["LBHNC"] == contents["BHLNC"] == contents["padded pages"] == "float32[H=2,N=32,C=8]"
    assert contents["LBNHC"] == contents["kernel blocks, tokens first"] == "float32[N=32,H=2,C=8]"
    assert contents["kernel blocks"] == "float32[kernel_blocks=2,H=2,N=16,C=8]"
    assert contents["split"] == contents["interleaved"] == "float32[KV=2,N=32,H=2,C=4]"
    assert contents["split HND"] == "float32[KV=2,H=2,N=32,C=4]"
    assert contents["MLA"] == contents["MLA with one head"] == "float32[N=32,C=8]"


def test_element_type_and_encoding_are_part_of_the_content():
    """Types of one size, and 8-bit formats of one type, are different contents."""
    spec = LayerSpec(TOKENS, HEADS, TOKENS, CONTENT * 2)
    half = {"a": torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.float16)}
    brain = {"a": half["a"].view(torch.bfloat16)}
    assert describe(half, spec)[0].layers[0].content.startswith("float16[")
    assert describe(brain, spec)[0].layers[0].content.startswith("bfloat16[")
    byte = {"a": torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.uint8)}
    encoded = LayerSpec(TOKENS, HEADS, TOKENS, CONTENT, "fp8_e5m2")
    assert describe(byte, encoded)[0].layers[0].content == "uint8:fp8_e5m2[H=2,N=32,C=8]"


def test_one_region_per_allocation():
    """Layers of one allocation share its region; layers of their own have one each."""
    caches = shared([0, 1, 2, 3, 4])
    _, regions = describe(caches, SPEC)
    storage = caches[NAMES[0]].untyped_storage()
    assert [(r.address, r.nbytes, r.device) for r in regions] == [(storage.data_ptr(), storage.nbytes(), "cpu")]
    assert len(describe(LAYOUTS["MLA"][0](), LATENT)[1]) == 3


def test_allocations_that_overlap_are_one_region():
    """Two storages over the same memory are registered once, and each layer finds its place in it."""
    whole = torch.arange(3 * BLOCKS * TOKENS * CONTENT, dtype=torch.float32)
    size = BLOCKS * TOKENS * CONTENT
    memory = memoryview(whole.numpy())
    low = torch.frombuffer(memory, dtype=torch.float32, count=2 * size)
    high = torch.frombuffer(memory, dtype=torch.float32, count=2 * size, offset=size * 4)
    caches = {"low": low[:size].view(BLOCKS, TOKENS, CONTENT), "high": high[size:].view(BLOCKS, TOKENS, CONTENT)}
    geometry, regions = describe(caches, LATENT)
    assert [(r.address, r.nbytes) for r in regions] == [(whole.data_ptr(), whole.nbytes)]
    assert [layer.pieces[0].offset for layer in geometry.layers] == [0, 2 * size * 4]


def test_layer_that_shares_a_cache_is_left_out():
    """A second name of the same cache is not copied twice, whether it has a spec or not."""
    caches = LAYOUTS["MLA"][0]()
    caches["again"] = caches[NAMES[1]]
    specs = dict.fromkeys(NAMES, LATENT)
    for more in ({}, {"again": LATENT}):
        geometry, _ = describe_caches(caches, {**specs, **more}, num_blocks=BLOCKS)
        assert [layer.name for layer in geometry.layers] == NAMES


def test_w_dsa_extra_regions_every_cache_takes_part_or_is_refused():
    """W-DSA-EXTRA-REGIONS: a cache without a spec, and a spec without a cache, are refused by layer."""
    caches = LAYOUTS["MLA"][0]()
    specs = dict.fromkeys(NAMES[:2], LATENT)
    with pytest.raises(ConfigurationError, match=r"'layers\.2'"):
        describe_caches(caches, specs, num_blocks=BLOCKS)
    geometry, _ = describe_caches(caches, specs, num_blocks=BLOCKS, not_moved=["layers.2"])
    assert len(geometry.layers) == 2
    with pytest.raises(ConfigurationError, match="'indexer'"):
        describe_caches(caches, {**specs, "indexer": LATENT}, num_blocks=BLOCKS, not_moved=["layers.2"])


REFUSED = {
    "kernel blocks that do not divide": (torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT), SPEC),
    "kernel blocks that do not add up": (torch.zeros(BLOCKS * 2, HEADS, TOKENS, CONTENT), SPEC),
    "other head count": (torch.zeros(BLOCKS, HEADS + 1, TOKENS, CONTENT), SPEC),
    "other content": (torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT + 1), SPEC),
    "other element size": (torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.float16), SPEC),
    "heads without an axis": (torch.zeros(BLOCKS, TOKENS, CONTENT), SPEC),
    "two axes": (torch.zeros(BLOCKS, TOKENS), LATENT),
    "raw bytes": (torch.zeros(4096, dtype=torch.int8), SPEC),
    "overlapping heads": (
        torch.zeros(BLOCKS * 512).as_strided(
            (BLOCKS, HEADS, TOKENS, CONTENT), (512, TOKENS * CONTENT // 2, CONTENT, 1)
        ),
        SPEC,
    ),
    "content not contiguous": (torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT * 2)[..., ::2], SPEC),
    "ambiguous axes": (torch.zeros(2, BLOCKS, 4, 4, 4), LayerSpec(4, 4, 4, 32)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_w_mla_block_override_and_other_shapes_are_refused_by_layer(case):
    """W-MLA-BLOCK-OVERRIDE: a cache that does not fit its spec is refused with layer, shape and expectation."""
    tensor, spec = REFUSED[case]
    with pytest.raises(ConfigurationError) as caught:
        describe({"model.layers.7": tensor}, spec)
    assert "'model.layers.7'" in caught.value.key
    assert str(list(tensor.shape)) in str(caught.value)


def test_different_block_sizes_are_refused():
    """One geometry has one block size."""
    caches = {name: torch.zeros(BLOCKS, TOKENS, CONTENT) for name in NAMES[:2]}
    with pytest.raises(ConfigurationError, match=r"\[16, 32\]"):
        describe_caches(caches, {"layers.0": LATENT, "layers.1": LayerSpec(16, 1, TOKENS, 32)}, num_blocks=BLOCKS)


@pytest.fixture
def vllm():
    """The cache interface of an installed vLLM."""
    return pytest.importorskip("vllm.v1.kv_cache_interface")


def vllm_config(vllm, *specs, **of_group):
    """A KVCacheConfig with one group of two layers per spec, laid out layer by layer."""
    groups, tensors, page = [], [], max(spec.page_size_bytes for spec in specs)
    for index, spec in enumerate(specs):
        names = [f"layers.{2 * index}", f"layers.{2 * index + 1}"]
        groups.append(vllm.KVCacheGroupSpec(names, spec, **of_group))
        tensors.append(vllm.KVCacheTensor(2 * BLOCKS * page, names, layer_stride=BLOCKS * page, block_stride=page))
    return vllm.KVCacheConfig(BLOCKS, tensors, groups)


def full(vllm, **more):
    """The spec of an attention layer as the CPU backend has it."""
    values = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": CONTENT // 2, "dtype": torch.float32, **more}
    return vllm.FullAttentionSpec(**values)


@pytest.mark.vllm
@pytest.mark.parametrize("kernel_tokens", [TOKENS, TOKENS // 2])
def test_what_vllm_allocates_on_a_cpu(vllm, kernel_tokens):
    """The caches of vLLM's CPU worker: one allocation, [blocks, heads, tokens, K and V] per layer, one piece each."""
    utils = pytest.importorskip("vllm.v1.worker.utils")
    layout = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout.LBHNC
    config = vllm_config(vllm, full(vllm))
    caches = utils.allocate_kv_cache(config, torch.device("cpu"), layout, [kernel_tokens])
    geometry, regions = describe_vllm_caches(caches, config)
    page = HEADS * TOKENS * CONTENT * 4
    assert [region.nbytes for region in regions] == [2 * BLOCKS * page]
    assert [[(p.offset, p.stride, p.nbytes) for p in layer.pieces] for layer in geometry.layers] == [
        [(0, page, page)],
        [(BLOCKS * page, page, page)],
    ]


@pytest.mark.vllm
def test_specs_of_mla_and_of_layers_with_one_each(vllm):
    """MLA has one head and no V; a group of uniform specs is read layer by layer."""
    mla = vllm.MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=CONTENT, dtype=torch.float32)
    assert layer_specs(vllm_config(vllm, mla)) == {"layers.0": LATENT, "layers.1": LATENT}
    uniform = vllm.UniformTypeKVCacheSpecs(
        block_size=TOKENS, kv_cache_specs={"layers.0": full(vllm), "layers.1": full(vllm, num_kv_heads=1)}
    )
    specs = layer_specs(vllm_config(vllm, uniform))
    assert [specs[name].heads for name in ("layers.0", "layers.1")] == [HEADS, 1]


@pytest.mark.vllm
def test_eight_bit_formats_have_names(vllm):
    """`fp8` is the short name of fp8_e4m3, and quantisation with scales is part of the name."""
    config = vllm_config(vllm, full(vllm, dtype=torch.uint8))
    assert layer_specs(config, "fp8")["layers.0"].encoding == "fp8_e4m3"
    assert layer_specs(config, "fp8_e5m2")["layers.0"].encoding == "fp8_e5m2"
    scaled = full(vllm, dtype=torch.uint8, kv_quant_mode=vllm.KVQuantMode.FP8_PER_TENSOR)
    assert layer_specs(vllm_config(vllm, scaled), "fp8")["layers.0"].encoding == "fp8_e4m3/fp8_per_tensor"


@pytest.mark.vllm
def test_w_hma_groups_are_refused_at_start(vllm):
    """W-HMA-GROUPS: several groups to move, sliding windows and recurrent state are refused by layer, with a hint."""
    window = vllm.SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32, sliding_window=64
    )
    mamba = vllm.MambaSpec(block_size=TOKENS, shapes=((4,),), dtypes=(torch.float32,))
    with pytest.raises(ConfigurationError, match=r"layers\.2 \(SlidingWindowSpec\).*disable-hybrid-kv-cache-manager"):
        layer_specs(vllm_config(vllm, full(vllm), window))
    for spec in (window, mamba):
        with pytest.raises(ConfigurationError, match=rf"'layers\.0'='{type(spec).__name__}': expected FullAttention"):
            layer_specs(vllm_config(vllm, spec))


@pytest.mark.vllm
def test_groups_that_vllm_does_not_transfer_stay(vllm):
    """A group that vLLM marks as rebuilt locally is neither moved nor refused."""
    config = vllm_config(vllm, full(vllm), full(vllm))
    config.kv_cache_groups[1].enable_kv_transfer = False
    caches = {f"layers.{i}": torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT) for i in range(4)}
    geometry, _ = describe_vllm_caches(caches, config)
    assert [layer.name for layer in geometry.layers] == ["layers.0", "layers.1"]
