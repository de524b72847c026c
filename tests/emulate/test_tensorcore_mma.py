"""tcgen05.mma equals a float64 product of the same matrices, for every kind, major-ness, CTA group and source."""
import ml_dtypes
import numpy as np
import pytest
import torch
from umma_layout import CASES, offsets, place, read_layout

from dglu.emulate.operands import decode_instr_desc, decode_smem_desc
from dglu.emulate.tensorcore import mma_execute, mma_plan, mma_read, mma_write
from dglu.emulate.tma import DataPlaneError

DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "s8": np.int8,
    "u8": np.uint8,
}
K128 = 0x4000404000010000  # K-major, 128-byte swizzle, groups of eight rows 1024 bytes apart


def draw(rng, fmt, shape):
    "(codes, values as float64): random, finite."
    if fmt == "tf32":
        bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32)
        return bits, (bits & 0xFFFFE000).astype(np.uint32).view(np.float32).astype(np.float64)
    if fmt in ("bf16", "f16"):
        v = rng.standard_normal(shape).astype(DTYPES[fmt])
        return v.view(np.uint16), v.astype(np.float64)
    n = {"e2m1": 16, "e2m3": 64, "e3m2": 64}.get(fmt, 256)
    table = np.arange(n, dtype=np.uint8).view(DTYPES[fmt]).astype(np.float64)
    codes = rng.choice(np.flatnonzero(np.isfinite(table)), shape)
    return codes, table[codes]


def product(a, b):
    return (torch.from_numpy(a) @ torch.from_numpy(b).T).numpy()


def rows_of_d(tmem, idesc, cta_group, column, dtype=np.float32):
    "D of one CTA, read lane by lane according to the table of PTX ISA 9.7.16.10.5."
    word = tmem.view(dtype) if dtype != np.float16 else tmem.astype(np.uint16).view(np.float16)
    if idesc.m == 64:
        return np.concatenate([word[32 * q:32 * q + 16, column:column + idesc.n] for q in range(4)])
    if (idesc.m, cta_group) == (128, 2):
        half = idesc.n // 2
        return np.concatenate([word[:64, column:column + half], word[64:, column:column + half]], axis=1)
    return word[:, column:column + idesc.n]


def store_scales(tmem, column, scales):
    "Scale bytes (rows, n) at row mod 32, column + row // 32, in all four quarters."
    for r, row in enumerate(scales):
        for j, byte in enumerate(row):
            for q in range(4):
                tmem[32 * q + r % 32, column + r // 32] |= np.uint32(int(byte) << 8 * j)


@pytest.mark.parametrize("case", [c for c in CASES if "atmem" not in c["name"]], ids=lambda c: c["name"])
def test_whole_tile_equals_a_float64_product(case):
    rng = np.random.default_rng(7)
    g, idesc = case["cta_group"], int(case["calls"][0]["idesc"], 16)
    d = decode_instr_desc(idesc, case["kind"])
    total = d.k * len(case["calls"])
    per_k = {None: None, "ue8m0": 2 if d.k == 64 else 1, "ue4m3": 4}[d.scale_type]
    codes_a, a = draw(rng, d.a_type, (d.m, total))
    codes_b, b = draw(rng, d.b_type, (d.n, total))
    smems, tmems = [], [np.zeros((128, 512), np.uint32) for _ in range(g)]
    for r in range(g):
        both = [
            place(
                c[r * len(c) // g : (r + 1) * len(c) // g],
                case[w + "_bits"],
                case[w],
                decode_smem_desc(int(case["calls"][0][w], 16)).start,
            )[0]
            for w, c in (("a", codes_a), ("b", codes_b))
        ]
        smems.append(both[0] | both[1])
    exact = np.zeros((d.m, d.n))
    for k, call in enumerate(case["calls"]):
        part = np.s_[:, k * d.k:(k + 1) * d.k]
        ak, bk, extra = a[part], b[part], {}
        if per_k:
            table = (
                np.arange(256, dtype=np.uint8)
                .view(ml_dtypes.float8_e8m0fnu if d.scale_type == "ue8m0" else ml_dtypes.float8_e4m3fn)
                .astype(np.float64)
            )
            low, high = (120, 134) if d.scale_type == "ue8m0" else (1, 100)
            sa, sb = rng.integers(low, high, (d.m, per_k)), rng.integers(low, high, (d.n, per_k))
            ak, bk = ak * np.repeat(table[sa], d.k // per_k, 1), bk * np.repeat(table[sb], d.k // per_k, 1)
            for r in range(g):
                tmems[r][:, 400:] = 0
                store_scales(tmems[r], 400, sa[r * d.m // g:(r + 1) * d.m // g])
                store_scales(tmems[r], 420, sb)
            extra = dict(sfa_taddr=400, sfb_taddr=420, scale_vec=per_k)
        exact += product(ak, bk)
        mma_execute(
            mma_plan(case["kind"], g, idesc, int(call["a"], 16), int(call["b"], 16), 0x20, enable_d=k > 0, **extra),
            smems,
            tmems,
        )
    size = np.abs(exact).max()
    for r in range(g):
        got = rows_of_d(tmems[r], d, g, 0x20, np.float16 if d.d_type == "f16" else np.float32)
        want = exact[r * d.m // g:(r + 1) * d.m // g] if d.m != 64 else exact
        assert np.abs(got - want).max() <= len(case["calls"]) * size * (2.0**-11 if d.d_type == "f16" else 2.0**-24)


def tile(rng, fmt_a, fmt_b, m=128, n=64, k=32):
    "8-bit containers, K-major, 128-byte swizzle, A at 0, B at 0x8000; padded formats are packed by their definition."
    smem, out = np.zeros(1 << 16, np.uint8), []
    for base, fmt, rows in ((0, fmt_a, m), (0x8000, fmt_b, n)):
        codes, v = draw(rng, fmt, (rows, k))
        for r in range(rows):
            for c in range(0, k, 16):
                width = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(fmt, 8)
                number = sum(int(x) << width * i for i, x in enumerate(codes[r, c:c + 16]))
                a = base + r * 128 + c
                a ^= a >> 3 & 0x70
                smem[a:a + 16] = np.frombuffer(number.to_bytes(16, "little"), np.uint8)
        out.append((codes, v))
    return smem, out


@pytest.mark.parametrize("b_type", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
@pytest.mark.parametrize("a_type", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_f8f6f4_mixes_all_types(a_type, b_type):
    code = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
    smem, ((_, a), (_, b)) = tile(np.random.default_rng(8), a_type, b_type)
    tmem = np.zeros((128, 512), np.uint32)
    idesc = 1 << 4 | code[a_type] << 7 | code[b_type] << 10 | 8 << 17 | 8 << 24
    mma_execute(mma_plan("f8f6f4", 1, idesc, K128, K128 | 0x800, 0, enable_d=False), [smem], [tmem])
    np.testing.assert_array_equal(tmem[:, :64].view(np.float32), product(a, b).astype(np.float32))


@pytest.mark.parametrize("saturate", [False, True])
def test_i8_is_exact_and_wraps_or_saturates(saturate):
    rng = np.random.default_rng(9)
    smem, ((a, _), (b, _)) = tile(rng, "s8", "u8")
    a, b = a.astype(np.uint8).view(np.int8).astype(np.int64), b.astype(np.int64)
    tmem = np.full((128, 512), 0x7FFFFFF0, np.uint32)
    idesc = saturate << 3 | 2 << 4 | 1 << 7 | 8 << 17 | 8 << 24
    mma_execute(mma_plan("i8", 1, idesc, K128, K128 | 0x800, 0), [smem], [tmem])
    want = a @ b.T + 0x7FFFFFF0
    want = np.clip(want, -(2**31), 2**31 - 1) if saturate else want
    np.testing.assert_array_equal(tmem[:, :64], want.astype(np.uint32))
    assert (want > 2**31 - 1).any() or saturate


FROM_TMEM = [("bf16", "f16", 16, 16), ("tf32", "tf32", 32, 8), ("e5m2", "f8f6f4", 8, 32), ("e2m1", "f8f6f4", 8, 32)]


@pytest.mark.parametrize("fmt, kind, bits, k", FROM_TMEM)
@pytest.mark.parametrize("m", [64, 128])
def test_a_from_tensor_memory_in_the_lanes_of_d(fmt, kind, bits, k, m):
    rng = np.random.default_rng(10)
    codes, a = draw(rng, fmt, (m, k))
    codes = codes << 2 if fmt == "e2m1" else codes  # a byte each, the code in bits 2 to 5
    words = codes.astype(f"u{bits // 8}").reshape(m, -1).view(np.uint32)
    case = {"f16": "bf16_K_SW128", "tf32": "tf32_k", "f8f6f4": "fp8_k"}[kind]
    case = next(c for c in CASES if c["name"] == case)
    d = decode_instr_desc(int(case["calls"][0]["idesc"], 16), kind)
    total = len(offsets(*[x[0][1] for x in read_layout(case["b"])[1:]])) * len(case["calls"])
    codes_b, b = draw(rng, d.b_type, (64, total))
    smem = place(codes_b, case["b_bits"], case["b"], decode_smem_desc(int(case["calls"][0]["b"], 16)).start)[0]
    code = {"bf16": 1, "tf32": 2, "e5m2": 1, "e2m1": 5}[fmt]
    idesc = int(case["calls"][0]["idesc"], 16) & ~(7 << 7 | 31 << 24) | code << 7 | m // 16 << 24
    lane = 16 if m == 64 else 0
    tmem = np.zeros((128, 512), np.uint32)
    for i in range(m):
        tmem[i // 16 * 32 + i % 16 + 16 if m == 64 else i, 200:200 + words.shape[1]] = words[i]
    mma_execute(
        mma_plan(
            kind,
            1,
            idesc,
            lane << 16 | 200,
            int(case["calls"][0]["b"], 16),
            lane << 16 | 4,
            a_in_tmem=True,
            enable_d=False,
        ),
        [smem],
        [tmem],
    )
    got = tmem[:, 4:68].view(np.float32)
    got = np.concatenate([got[32 * q + 16:32 * q + 32] for q in range(4)]) if m == 64 else got
    np.testing.assert_array_equal(got, product(a, b[:, :k]).astype(np.float32))


def bf16_tile(seed=11):
    rng = np.random.default_rng(seed)
    case = next(c for c in CASES if c["name"] == "bf16_K_SW128")
    (ca, a), (cb, b) = draw(rng, "bf16", (128, 64)), draw(rng, "bf16", (64, 64))
    first = case["calls"][0]
    smem = (
        place(ca, 16, case["a"], decode_smem_desc(int(first["a"], 16)).start)[0]
        | place(cb, 16, case["b"], decode_smem_desc(int(first["b"], 16)).start)[0]
    )
    return smem, (int(first["idesc"], 16), int(first["a"], 16), int(first["b"], 16)), product(a[:, :16], b[:, :16])


@pytest.mark.parametrize("bits, sign", [(1 << 13, -1), (1 << 14, -1), (3 << 13, 1)])
def test_negate_bits(bits, sign):
    smem, (idesc, a, b), exact = bf16_tile()
    tmem = np.zeros((128, 512), np.uint32)
    mma_execute(mma_plan("f16", 1, idesc | bits, a, b, 0, enable_d=False), [smem], [tmem])
    np.testing.assert_array_equal(tmem[:, :64].view(np.float32), (sign * exact).astype(np.float32))


def test_scale_input_d_divides_the_old_accumulator():
    smem, (idesc, a, b), exact = bf16_tile()
    tmem = np.zeros((128, 512), np.uint32)
    old = np.random.default_rng(1).standard_normal((128, 64)).astype(np.float32)
    tmem[:, :64] = old.view(np.uint32)
    mma_execute(mma_plan("f16", 1, idesc, a, b, 0, scale_d=3), [smem], [tmem])
    np.testing.assert_array_equal(
        tmem[:, :64].view(np.float32), (exact + old.astype(np.float64) / 8).astype(np.float32)
    )


def test_disabled_lanes_keep_their_values():
    smem, (idesc, a, b), exact = bf16_tile()
    tmem = np.full((128, 512), 0x3F800000, np.uint32)
    words = (0x1, 0x80000000, 0xFFFFFFFF, 0)
    mma_execute(mma_plan("f16", 1, idesc, a, b, 0, enable_d=False, disable_lanes=words), [smem], [tmem])
    kept = [lane for lane in range(128) if words[lane // 32] >> lane % 32 & 1]
    assert len(kept) == 34 and (tmem[kept] == 0x3F800000).all()
    others = [lane for lane in range(128) if lane not in kept]
    np.testing.assert_array_equal(tmem[others, :64].view(np.float32), exact[others].astype(np.float32))


def test_truncation_never_exceeds_the_exact_magnitude():
    smem, (idesc, a, b), exact = bf16_tile()
    tmem = np.zeros((128, 512), np.uint32)
    mma_execute(mma_plan("f16", 1, idesc, a, b, 0, enable_d=False), [smem], [tmem], rounding="truncate")
    got = tmem[:, :64].view(np.float32)
    assert (np.abs(got.astype(np.float64)) <= np.abs(exact)).all()
    assert (np.abs(np.nextafter(got, np.copysign(np.float32(np.inf), got)).astype(np.float64)) > np.abs(exact)).all()


def test_operands_may_change_between_the_read_and_the_write_half():
    smem, (idesc, a, b), exact = bf16_tile()
    tmem = np.zeros((128, 512), np.uint32)
    plan = mma_plan("f16", 1, idesc, a, b, 0)
    early = mma_read(plan, [smem], [tmem])
    smem[:] = 0
    tmem[:, :64] = np.float32(2).view(np.uint32)
    mma_write(plan, early, [tmem])
    np.testing.assert_array_equal(tmem[:, :64].view(np.float32), (exact + 2).astype(np.float32))


@pytest.mark.parametrize("kind, group, idesc, message", [
    ("f16", 1, 1 << 4 | 9 << 7 | 8 << 17 | 16 << 24, "M for cta_group::1, kind::f16 = 256: must be 64 or 128"),
    ("f16", 2, 1 << 4 | 9 << 7 | 8 << 17 | 4 << 24, "M for cta_group::2, kind::f16 = 64: must be 128 or 256"),
    ("f16", 1, 1 << 4 | 9 << 7 | 9 << 17 | 8 << 24, "N = 72: must be a multiple of 16 up to 256"),
    ("f16", 1, 1 << 2 | 1 << 4 | 8 << 17 | 8 << 24, "sparsity = 1: sparse matrices are not modelled"),
    ("tf32", 1, 1 << 4 | 8 << 17 | 8 << 24, "types of A, B for kind::tf32 = .0, 0.: must be among .2."),
    ("mxf8f6f4", 1, 8 << 17 | 1 << 27 | 1 << 23, "scale vector for kind::mxf8f6f4 = None"),
    ("mxf8f6f4", 1, 8 << 17 | 1 << 27, "scale type for kind::mxf8f6f4 = 0: must be 1"),
    ("fp64", 1, 0, "kind = fp64: modelled are")])
def test_illegal_instructions_are_named(kind, group, idesc, message):
    with pytest.raises(DataPlaneError, match=message):
        mma_plan(kind, group, idesc, K128, K128, 0)


def test_a_missing_copy_of_scale_factors_is_named():
    tmem = np.zeros((128, 512), np.uint32)
    store_scales(tmem, 400, np.full((128, 1), 127))
    tmem[96:, 400] = 0
    plan = mma_plan(
        "mxf8f6f4", 1, 8 << 17 | 1 << 27 | 1 << 23, K128, K128 | 0x800, 0, sfa_taddr=400, sfb_taddr=400, scale_vec=1
    )
    with pytest.raises(
        DataPlaneError, match="scale factors of B in lanes 96 to 127 = different: must repeat those in lanes 0 to 31"
    ):
        mma_execute(plan, [np.zeros(1 << 16, np.uint8)], [tmem])
