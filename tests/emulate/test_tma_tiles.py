"""Tensor maps as CuTe DSL's host code and the driver build them; tiles against loops over single elements."""
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglu.emulate.tensormap import (
    SWIZZLES,
    TYPES,
    TensorMap,
    decode_tensor_map,
    encode_tensor_map,
    replace_field,
    swizzle,
)
from dglu.emulate.tma import (
    DataPlaneError,
    byte_mask,
    read_global,
    read_shared,
    reduce_bytes,
    reduce_global,
    tile_plan,
    write_global,
    write_shared,
)

ROW = [0x1FF000000FF, 0]  # dims 256, 512
# words 0 to 7 of a descriptor, and what they say: type, dims, strides, box, swizzle
CUTE = {
    "bf16 K_SW128": ([0x1000, 0x2000246512, 0, 0, *ROW, 63 << 56, 127], "bf16", (256, 512), (512,), (64, 128), "128B"),
    "bf16 K_SW64": ([0x1000, 0x2000244512, 0, 0, *ROW, 31 << 56, 127], "bf16", (256, 512), (512,), (32, 128), "64B"),
    "bf16 K_SW32": ([0x1000, 0x2000242512, 0, 0, *ROW, 15 << 56, 127], "bf16", (256, 512), (512,), (16, 128), "32B"),
    "bf16 K_INTER": ([0x1000, 0x2000240512, 0, 0, *ROW, 7 << 56, 127], "bf16", (256, 512), (512,), (8, 128), "none"),
    "f32 S<2,5,2>": (
        [0x1000, 0x40002C6392, 0, 0, *ROW, 31 << 56, 7],
        "f32",
        (256, 512),
        (1024,),
        (32, 8),
        "128B_atom32B",
    ),
    "f32 S<1,6,1>": (
        [0x1000, 0x40003C6392, 0, 0, *ROW, 31 << 56, 7],
        "f32",
        (256, 512),
        (1024,),
        (32, 8),
        "128B_atom64B",
    ),
    "tf32": ([0x1000, 0x4000256392, 0, 0, *ROW, 31 << 56, 127], "tf32", (256, 512), (1024,), (32, 128), "128B"),
    "f16": ([0x1000, 0x2000246312, 0, 0, *ROW, 63 << 56, 127], "f16", (256, 512), (512,), (64, 128), "128B"),
    "f64": ([0x1000, 0x8000246492, 0, 0, *ROW, 15 << 56, 127], "f64", (256, 512), (2048,), (16, 128), "128B"),
    "int64": ([0x1000, 0x8000246212, 0, 0, *ROW, 15 << 56, 127], "u64", (256, 512), (2048,), (16, 128), "128B"),
    "fp8": ([0x1000, 0x1000240012, 0, 0, *ROW, 127 << 56, 7], "u8", (256, 512), (256,), (128, 8), "none"),
    "fp4": ([0x1000, 0x800040592, 0, 0, *ROW, 127 << 56, 7], "b4x16", (256, 512), (128,), (128, 8), "none"),
    "fp4 unpacked": (
        [0x1000, 0x800040612, 0, 0, *ROW, 127 << 56, 7],
        "b4x16_p64",
        (256, 512),
        (128,),
        (128, 8),
        "none",
    ),
    "fp6 unpacked": (
        [0x1000, 0xC00040692, 0, 0, *ROW, 127 << 56, 7],
        "b6x16_p32",
        (256, 512),
        (192,),
        (128, 8),
        "none",
    ),
    "rank 5, permuted": (
        [0x1040, 0x2000240542, 0x4B0000000F00, 0x500, 0x27000000FF, 0x600000004, 63 << 56 | 2, 0x10207],
        "bf16",
        (256, 40, 5, 7, 3),
        (512, 61440, 307200, 20480),
        (64, 8, 3, 2, 1),
        "none",
    ),
    "driver, wide strides": (
        [0x1000, 0x2000000540, 0x100000020, 0x421000000002, *ROW[:1], 0x600000007, 63 << 56 | 5, 0x4020107],
        "bf16",
        (256, 512, 8, 7, 6),
        (512, 2**36 + 512, 2**37 + 16, 2**38 + 32),
        (64, 8, 2, 3, 5),
        "none",
    ),
}


@pytest.mark.parametrize("name", CUTE)
def test_descriptor_of_the_host_code_is_decoded(name):
    words, dtype, dims, strides, box, swz = CUTE[name]
    m = decode_tensor_map(np.array(words + [0] * 8, np.uint64))
    assert m == TensorMap(words[0], dtype, dims, strides, box, (1,) * len(dims), swz)
    again = encode_tensor_map(m).view(np.uint64)
    mask = ~np.uint64(1 << 21 | 3 << 17 | 2)  # size hint, L2 promotion and bit 1 change nothing here
    np.testing.assert_array_equal(
        again[:8] & [np.uint64(-1 % 2**64), mask, *[np.uint64(-1 % 2**64)] * 6],
        np.array(words, np.uint64) & [np.uint64(-1 % 2**64), mask, *[np.uint64(-1 % 2**64)] * 6],
    )


@pytest.mark.parametrize("field, value, ordinal, attribute, want", [
    ("global_address", 0xABC0, None, "address", 0xABC0), ("rank", 0, None, "dims", (256,)),
    ("global_dim", 77, 1, "dims", (256, 77)),
    ("global_stride", 1 << 36, 0, "strides", (1 << 36,)), ("box_dim", 5, 1, "box", (64, 5)),
    ("element_stride", 3, 1, "element_strides", (1, 3)),
    ("elemtype", 6, None, "dtype", "f16"), ("elemtype", 12, None, "dtype", "tf32_ftz"),
    ("elemtype", 13, None, "dtype", "b4x16"),
    ("fill_mode", 1, None, "fill", "nan"), ("swizzle_mode", 0, None, "swizzle", "none"),
    ("swizzle_atomicity", 1, None, "swizzle", "128B_atom32B")])
def test_replace_changes_one_field(field, value, ordinal, attribute, want):
    m = decode_tensor_map(np.array(CUTE["bf16 K_SW128"][0] + [0] * 8, np.uint64))
    raw = encode_tensor_map(m)
    if attribute == "dtype" and want in ("tf32_ftz", "b4x16"):
        replace_field(raw, "box_dim", 32, 0)
    replace_field(raw, field, value, ordinal)
    after = decode_tensor_map(raw)
    assert getattr(after, attribute) == want
    same = {"address", "dtype", "dims", "strides", "element_strides", "swizzle", "fill"} - {attribute}
    assert all(getattr(after, a) == getattr(m, a) for a in same) or field == "rank"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_tile_equals_a_loop_over_its_elements(data):
    pick = data.draw
    dtype = pick(st.sampled_from(["u8", "u16", "u32", "u64", "bf16"]))
    size = TYPES[dtype][2] // 8
    rank = pick(st.integers(1, 4))
    swz = pick(st.sampled_from([*SWIZZLES]))
    width = pick(st.integers(1, (SWIZZLES[swz][3] if swz != "none" else 96) // 16)) * 16 // size
    box = (width, *[pick(st.integers(1, 4)) for _ in range(rank - 1)])
    dims = (pick(st.integers(1, 60)), *[pick(st.integers(1, 6)) for _ in range(rank - 1)])
    strides, span = [], -(-dims[0] * size // 16) * 16
    for d in dims[1:]:
        span += 16 * pick(st.integers(0, 2))
        strides.append(span)
        span *= d
    steps = (1, *[pick(st.integers(1, 3)) for _ in range(rank - 1)])
    m = TensorMap(0x4000, dtype, dims, tuple(strides), box, steps, swz)
    assert decode_tensor_map(encode_tensor_map(m)) == m
    coords = (pick(st.integers(-3, 4)) * 16 // size, *[pick(st.integers(-3, 6)) for _ in range(rank - 1)])
    addr = pick(st.integers(0, 7)) * 128
    base = 0x4000 - 64
    gmem = np.random.default_rng(0).integers(1, 256, span + 512, dtype=np.uint8)
    want = {}  # shared address -> (global index or None)
    pitch = width * size if swz == "none" else SWIZZLES[swz][3]
    for row, idx in enumerate(itertools.product(*[range(-(-b // s)) for b, s in zip(box[:0:-1], steps[:0:-1])])):
        x = [c + i * s for c, i, s in zip(coords[1:], idx[::-1], steps[1:])]
        for i in range(width):
            ok = 0 <= coords[0] + i < dims[0] and all(0 <= v < d for v, d in zip(x, dims[1:]))
            at = 64 + (coords[0] + i) * size + sum(v * s for v, s in zip(x, strides))
            for b in range(size):
                want[int(swizzle(addr + row * pitch + i * size + b, swz))] = at + b if ok else None
    plan = tile_plan(m, coords, addr)
    smem = np.full(1 << 15, 0, np.uint8)
    write_shared(plan, smem, read_global(plan, gmem, base))
    expected = np.zeros_like(smem)
    for a, g in want.items():
        expected[a] = 0 if g is None else gmem[g]
    np.testing.assert_array_equal(smem, expected)
    assert plan.nbytes == len(want) == m.box_bytes
    out, back = np.zeros_like(gmem), np.random.default_rng(1).integers(1, 256, len(smem), dtype=np.uint8)
    write_global(plan, out, base, read_shared(plan, back))
    expected = np.zeros_like(gmem)
    for a, g in want.items():
        if g is not None:
            expected[g] = back[a]
    np.testing.assert_array_equal(out, expected)


def test_gather4_and_scatter4_take_rows_by_number():
    m = TensorMap(0, "bf16", (96, 50), (192,), (64, 1), (1, 1), "128B")
    g = np.arange(96 * 50, dtype=np.uint16)
    rows = (7, 49, 50, -1)
    plan = tile_plan(m, (64, *rows), 0x800, "gather4")
    smem = np.full(8192, 0xEE, np.uint8)
    write_shared(plan, smem, read_global(plan, g.view(np.uint8), 0))
    got = smem[swizzle(np.arange(0x800, 0xA00), "128B")].view(np.uint16).reshape(4, 64)
    for r, line in zip(rows, got):
        inside = 0 <= r < 50
        assert (
            line[:32].tolist() == (g.reshape(50, 96)[r, 64:].tolist() if inside else [0] * 32) and not line[32:].any()
        )
    assert plan.nbytes == 512
    out = np.zeros_like(g)
    write_global(tile_plan(m, (64, *rows), 0x800, "scatter4"), out.view(np.uint8), 0, read_shared(plan, smem))
    assert (out.reshape(50, 96)[[7, 49], 64:] == g.reshape(50, 96)[[7, 49], 64:]).all() and np.count_nonzero(out) == 64


@pytest.mark.parametrize("dtype, each", [("b4x16_p64", 8), ("b6x16_p32", 12)])
def test_padded_formats_fill_the_head_of_each_16_bytes(dtype, each):
    m = TensorMap(0, dtype, (256, 3), (16 * each,), (128, 2), (1, 1), "128B")
    g = np.random.default_rng(2).integers(1, 256, 48 * each, dtype=np.uint8)
    plan = tile_plan(m, (128, 2), 0)
    smem = np.full(512, 0xEE, np.uint8)
    write_shared(plan, smem, read_global(plan, g, 0))
    line = smem[swizzle(np.arange(256), "128B")].reshape(2, 8, 16)
    np.testing.assert_array_equal(line[0, :, :each].ravel(), g[2 * 16 * each + 8 * each:3 * 16 * each])
    assert (line[..., each:] == 0xEE).all() and not line[1, :, :each].any() and plan.nbytes == 256


def test_reduction_respects_bounds_and_type():
    m = TensorMap(0, "s32", (10, 3), (48,), (8, 4), (1, 1))
    g = np.arange(36, dtype=np.int32) - 18
    s = np.arange(64, dtype=np.int32) - 32
    want = g.copy().reshape(3, 12)
    for j, i in itertools.product(range(4), range(8)):
        if j + 1 < 3 and i + 4 < 10:
            want[j + 1, i + 4] = max(want[j + 1, i + 4], s[8 * j + i])
    plan = tile_plan(m, (4, 1), 0)
    reduce_global(plan, g.view(np.uint8), 0, read_shared(plan, s.view(np.uint8)), "max")
    np.testing.assert_array_equal(g, want.ravel())


def test_bulk_reduction_and_byte_mask():
    a, b = np.uint32([1, 2**32 - 1, 7]), np.uint32([5, 1, 7])
    reduce_bytes(a.view(np.uint8), b.view(np.uint8), "add", "u32")
    assert a.tolist() == [6, 0, 14]
    assert byte_mask(32, 0x8001).nonzero()[0].tolist() == [0, 15, 16, 31]


@pytest.mark.parametrize("call, message", [
    (lambda m: tile_plan(m, (0, 0), 0, "im2col"), "mode = im2col: modelled are tile"),
    (lambda m: tile_plan(m, (0,), 0), "coordinates = 1: the map has rank 2"),
    (lambda m: tile_plan(m, (0, 0), 64), "shared address = 0x40: must be a multiple of 128"),
    (lambda m: read_global(tile_plan(m, (0, 0), 0), np.zeros(64, np.uint8), 0), "the memory given is .0x0, 0x40."),
    (lambda m: write_shared(tile_plan(m, (0, 0), 0), np.zeros(64, np.uint8), None), "shared memory has 64 bytes"),
    (lambda m: decode_tensor_map(bytes(127)), "size in bytes = 127: must be 128"),
    (lambda m: reduce_bytes(np.zeros(4, np.uint8), np.zeros(4, np.uint8), "inc", "s32"), "inc of s32: must be one of")])
def test_what_is_illegal_or_not_modelled_is_named(call, message):
    with pytest.raises(DataPlaneError, match=message):
        call(TensorMap(0, "u16", (100, 60), (256,), (64, 8), (1, 1), "128B"))
