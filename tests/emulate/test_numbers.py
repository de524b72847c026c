"""Conversions between formats: every 8-bit and 16-bit number, and float32 around every midpoint, against exact integers.

The judge knows a format only as (exponent bits, mantissa bits, bias, how NaN and infinity are spelt). It decodes codes to integers in units of 2^-200 and
rounds by comparing integers, so nothing of it is shared with the emulator; ml_dtypes is asked as a second judge where it has an opinion.
"""
from bisect import bisect_right
from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest

import dglu.emulate.bits  # noqa: F401 -- packs and unpacks registers
import dglu.emulate.convert  # noqa: F401 -- registers cvt
from dglu.emulate.snippet import run

UNIT = 200
# exponent bits, mantissa bits, bias, largest finite code, code of NaN
FORMATS = dict(e4m3=(4, 3, 7, 0x7E, 0x7F), e5m2=(5, 2, 15, 0x7B, 0x7F), e2m1=(2, 1, 1, 7, None), e2m3=(2, 3, 1, 31, None), e3m2=(3, 2, 3, 31, None),
               f16=(5, 10, 15, 0x7BFF, 0x7FFF), bf16=(8, 7, 127, 0x7F7F, 0x7FFF))
ML = dict(e4m3=ml_dtypes.float8_e4m3fn, e5m2=ml_dtypes.float8_e5m2, e2m1=ml_dtypes.float4_e2m1fn, e2m3=ml_dtypes.float6_e2m3fn,
          e3m2=ml_dtypes.float6_e3m2fn, f16=np.float16, bf16=ml_dtypes.bfloat16)
NARROW = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")
ALL16 = np.arange(65536, dtype=np.uint16)


@lru_cache(None)
def grid(fmt):
    "Finite magnitudes in code order, as integers."
    e, m, bias, top, _ = FORMATS[fmt]
    return [((c & (1 << m) - 1) + (1 << m) * (c >> m > 0)) << UNIT + max(c >> m, 1) - bias - m for c in range(top + 1)]


def as_integer(bits32):
    "The magnitude of float32 bits in units of 2^-200; infinity is larger than everything, NaN is None."
    e, m = bits32 >> 23 & 255, bits32 & 0x7FFFFF
    if e == 255:
        return None if m else 1 << 400
    return (m + (1 << 23) * (e > 0)) << UNIT + max(e, 1) - 150


def choose(v, steps, mode, negative, past):
    "Index of the rounding of |x| = v; `past` stands for what lies beyond the last step."
    lo = bisect_right(steps, v) - 1
    if steps[lo] == v:
        return lo
    above = steps[lo + 1] if lo + 1 < len(steps) else past
    up = {"rz": False, "rp": not negative, "rm": negative}.get(mode)
    if up is None:
        low, high = v - steps[lo], above - v
        up = high < low or (high == low and lo % 2 == 1)
    return lo + up


def rounded(x, fmt, mode="rn", relu=False, saturate=True):
    "Codes of float32 numbers; magnitudes are worked out once for both signs."
    e, m, _, top, nan = FORMATS[fmt]
    steps, sign, memo = grid(fmt), 1 << e + m, {}
    past = 1 << UNIT + (top >> m) + 1 - FORMATS[fmt][2]                 # the number after the largest, were there one
    if fmt in ("e4m3", "e2m1", "e2m3", "e3m2"):
        past = 2 * steps[-1] - steps[-2]
    out = []
    for bits in np.asarray(x, np.float32).view(np.uint32).tolist():
        if bits not in memo:
            v, negative = as_integer(bits), bits >> 31 == 1
            if v is None:
                memo[bits] = top if nan is None else nan
            elif negative and relu:
                memo[bits] = 0
            else:
                c = top + 1 if v == 1 << 400 else choose(v, steps, mode, negative, past)
                memo[bits] = (min(c, top) if saturate else c) | sign * negative
        out.append(memo[bits])
    return np.array(out, np.uint16)


def of_32(x):
    "Padded to whole warps."
    x = np.asarray(x, np.float32)
    return np.concatenate([x, np.zeros(-len(x) % 32, np.float32)])


def around(fmt):
    "float32 at every code, every midpoint, and one step to either side of each; both signs; and the special numbers."
    steps = [float(v) / 2.0**100 / 2.0**(UNIT - 100) for v in grid(fmt)]
    mids = [(a + b) / 2 for a, b in zip(steps, steps[1:])]
    last = steps[-1] + (steps[-1] - steps[-2]) / 2
    at = np.array([*steps, *mids, last], np.float64).astype(np.float32)
    assert at.astype(np.float64).tolist() == [*steps, *mids, last]
    special = np.array([0, 0x1, 0x007FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0xFFC00000], np.uint32).view(np.float32)
    near = np.concatenate([at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf)), special])
    return np.concatenate([near, -near])


def test_the_judge_agrees_with_hand_computed_values():
    assert rounded([448, 465, -1e9, 2.5, 0.0009765625, 0.00097656256], "e4m3").tolist() == [0x7E, 0x7E, 0xFE, 0x42, 0, 1]
    assert rounded([0.25, 0.75, 5, 5.1, np.nan], "e2m1").tolist() == [0, 2, 6, 7, 7]
    assert rounded([65519, 65520, np.inf], "f16", saturate=False).tolist() == [0x7BFF, 0x7C00, 0x7C00]
    assert rounded([1e-9, -1e-9], "f16", "rp", saturate=False).tolist() == [1, 0x8000]


@pytest.mark.parametrize("fmt", NARROW)
def test_every_code_widens_exactly(fmt):
    bits = sum(FORMATS[fmt][:2]) + 1
    if fmt == "e2m1":
        codes, split = np.arange(256, dtype=np.uint8), 4
    else:
        codes, split = ALL16, 8
    out = run(f"cvt.rn.f16x2.{fmt}x2 %d, %h;", h=codes, d=np.zeros(len(codes), np.uint32))["d"].view(np.float16).astype(np.float32)
    for half, code in ((0, codes), (1, codes >> split)):
        for c, got in zip((code & (1 << bits) - 1).tolist(), out[half::2].view(np.uint32).tolist()):
            magnitude, negative = c & (1 << bits - 1) - 1, c >> bits - 1
            top = FORMATS[fmt][3]
            if magnitude <= top:
                assert as_integer(got) == grid(fmt)[magnitude] and got >> 31 == negative
            else:
                assert as_integer(got) == (1 << 400 if fmt == "e5m2" and magnitude == 0x7C else None)


@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("source", ["f16", "bf16"])
@pytest.mark.parametrize("fmt", NARROW)
def test_every_16_bit_number_narrows_exactly(fmt, source, relu):
    with np.errstate(all="ignore"):
        x = ALL16.view(ML[source]).astype(np.float32)
        want = rounded(x, fmt, relu=relu)
        ml = np.clip(x, -grid_top(fmt), grid_top(fmt)).astype(ML[fmt]).view(np.uint8)
    known = ~np.isnan(x) & ~(relu & np.signbit(x))
    assert (want[known] == ml[known]).all()                             # the two judges agree
    out = np.zeros(65536, np.uint8 if fmt == "e2m1" else np.uint16)
    packed = ALL16.astype(np.uint32) << 16 | ALL16[::-1]
    option = ".relu" if relu else ""
    got = run(f"cvt.rn.satfinite{option}.{fmt}x2.{source}x2 %d, %h; cvt.rn.satfinite{option}.{fmt}x2.f32 %e, %a, %b;",
              h=packed, a=x, b=x[::-1].copy(), d=out, e=out)
    both = want << (4 if fmt == "e2m1" else 8) | want[::-1]
    assert (got["d"] == both).all() and (got["e"] == both).all()


def grid_top(fmt):
    return np.float32(float(grid(fmt)[-1] >> UNIT - 20) / 2**20)


@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("fmt", NARROW)
def test_float32_narrows_exactly_around_every_midpoint(fmt, relu):
    x = of_32(around(fmt))
    want = rounded(x, fmt, relu=relu)
    got = run(f"cvt.rn.satfinite{'.relu' if relu else ''}.{fmt}x2.f32 %d, %a, %b;", a=x, b=np.zeros_like(x),
              d=np.zeros(len(x), np.uint8 if fmt == "e2m1" else np.uint16))["d"]
    assert (got == want << (4 if fmt == "e2m1" else 8)).all()


def scale(x, mode):
    "UE8M0 codes: powers of two from 2^-127 on, the sign ignored, too large saturates."
    steps, out = [1 << UNIT + k - 127 for k in range(255)], []
    for bits in np.asarray(x, np.float32).view(np.uint32).tolist():
        v = as_integer(bits)
        out.append(255 if v is None else 0 if v <= steps[0] else min(254, choose(v, steps, mode, False, 1 << UNIT + 128)))
    return np.array(out, np.uint16)


@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_scales_round_as_told(mode):
    power = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    x = np.concatenate([power, np.nextafter(power, np.float32(0)), np.nextafter(power, np.float32(np.inf)), np.float32([0, np.inf, np.nan, 3.4e38])])
    x = of_32(np.concatenate([x, -x]))
    got = run(f"cvt.{mode}.satfinite.ue8m0x2.f32 %d, %a, %b;", a=x, b=x[::-1].copy(), d=np.zeros(len(x), np.uint16))["d"]
    want = scale(x, mode)
    assert (got == want << 8 | want[::-1]).all()


@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_every_bf16_number_becomes_a_scale_and_every_scale_a_bf16_number(mode):
    x = (ALL16.astype(np.uint32) << 16).view(np.float32)
    want = scale(x, mode)
    got = run(f"cvt.{mode}.satfinite.ue8m0x2.bf16x2 %d, %h;", h=ALL16.astype(np.uint32) << 16 | ALL16[::-1], d=ALL16)["d"]
    assert (got == want << 8 | want[::-1]).all()
    back = run("cvt.rn.bf16x2.ue8m0x2 %d, %h;", h=ALL16, d=np.zeros(65536, np.uint32))["d"]
    for half, code in ((0, ALL16 & 255), (16, ALL16 >> 8)):
        bits = (back >> np.uint32(half) & np.uint32(0xFFFF)).astype(np.uint32) << np.uint32(16)
        assert [as_integer(b) for b in bits[:256 if not half else None:1 if not half else 256].tolist()] == [1 << UNIT + k - 127 for k in range(255)] + [None]
        assert len({(int(c), int(b)) for c, b in zip(code, bits)}) == 256


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_float32_to_16_bits_around_every_midpoint(fmt, mode):
    x = of_32(around(fmt))
    got = run(f"cvt.{mode}.{fmt}.f32 %h, %a;", a=x, h=np.zeros(len(x), np.uint16))["h"]
    assert (got == rounded(x, fmt, mode, saturate=False)).all()


@pytest.mark.parametrize("saturate", [False, True], ids=["", "satfinite"])
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_packed_conversion_of_float32_to_16_bits(fmt, mode, relu, saturate):
    x = of_32(np.concatenate([around(fmt)[::7], around(fmt)[-9:], np.float32([65519, 65520, 70000, -70000, 3.4e38, -3.4e38])]))
    want = rounded(x, fmt, mode, relu, saturate).astype(np.uint32)
    option = (".relu" if relu else "") + (".satfinite" if saturate else "")
    got = run(f"cvt.{mode}{option}.{fmt}x2.f32 %d, %a, %b; cvt.{mode}{option}.{fmt}.f32 %h, %a;", a=x, b=x[::-1].copy(),
              d=np.zeros(len(x), np.uint32), h=np.zeros(len(x), np.uint16))
    assert (got["d"] == want << np.uint32(16) | want[::-1]).all() and (got["h"] == want).all()


@pytest.mark.parametrize("source, fmt", [("f16", "bf16"), ("bf16", "f16")])
def test_every_16_bit_number_in_the_other_16_bit_format(source, fmt):
    x = ALL16.view(ML[source]).astype(np.float32)
    got = run(f"cvt.rn.{fmt}.{source} %d, %h; cvt.f32.{source} %a, %h;", h=ALL16, d=ALL16, a=x)
    assert (got["d"] == rounded(x, fmt, saturate=False)).all()
    assert [as_integer(b) for b in got["a"].view(np.uint32).tolist()] == [as_integer(b) for b in x.view(np.uint32).tolist()]


@pytest.mark.parametrize("text", ["cvt.rz.satfinite.e4m3x2.f32 %h, %a, %a;", "cvt.rn.satfinite.ue8m0x2.f32 %h, %a, %a;", "cvt.rp.f16x2.f32 %d, %a, %a;",
                                  "cvt.rna.f16.f32 %h, %a;", "cvt.rp.tf32.f32 %d, %a;", "cvt.rs.f16x2.f32 %d, %a, %a, %d;"])
def test_a_rounding_that_the_format_lacks_is_refused(text):
    from dglu.emulate.translate import Unmodelled
    with pytest.raises(Unmodelled, match="PTX line 3: cvt"):
        run(text, a=np.zeros(32, np.float32), h=np.zeros(32, np.uint16), d=np.zeros(32, np.uint32))


@pytest.mark.parametrize("kind", ["s64", "u64", "s32", "u32"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integers_become_float32_with_one_rounding(kind, mode):
    bits = int(kind[1:])
    rng = np.random.default_rng(0)
    n = np.array([int.from_bytes(rng.bytes(8), "little") >> 64 - bits >> int(k) for k in rng.integers(0, bits, 1000)], f"u{bits // 8}")
    ties = np.array([(2**24 + k) << s | d for k in (1, 2, 3) for s in range(1, bits - 25) for d in (0, 1)], f"u{bits // 8}")
    n = np.concatenate([n, ties, ties - 1, ~n[:5], np.zeros(-(len(n) + 2 * len(ties) + 5) % 32, n.dtype)])
    n = n.view(f"i{bits // 8}") if kind[0] == "s" else n
    out = run(f"cvt.{mode}.f32.{kind} %f, %n;", n=n, f=np.zeros(len(n), np.float32))["f"]
    for v, got in zip(n.tolist(), out):
        g, up, down = int(got), int(np.nextafter(got, np.float32(np.inf))), int(np.nextafter(got, np.float32(-np.inf)))
        if abs(v) < 2**24:
            assert g == v
        elif mode == "rn":
            assert 2 * abs(v - g) <= (up - g if v > g else g - down) and (2 * abs(v - g) != (up - g if v > g else g - down) or got.view(np.uint32) % 2 == 0)
        else:
            assert {"rm": g <= v < up, "rp": down < v <= g, "rz": abs(g) <= abs(v) and down < v < up}[mode]
