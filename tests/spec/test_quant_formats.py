"Promise: every code is the number that its standard says, and every float becomes the nearest code."
import math
from bisect import bisect_left
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dglu.quant import E2M1, E4M3, E5M2, E8M0, decode, encode, format_of, to_values

OTHERS = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2, "E2M1": ml_dtypes.float4_e2m1fn,
          "E8M0": ml_dtypes.float8_e8m0fnu}
FIELDS = {"E4M3": (3, 7, 0x7E), "E5M2": (2, 15, 0x7B), "E2M1": (1, 1, 0x7)}  # mantissa bits, bias, largest finite code
elements = pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda f: f.name)
formats = pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, E8M0], ids=lambda f: f.name)


def exact(code: int, name: str) -> Fraction:
    "The value of a positive, finite code, from its fields."
    m, bias, _ = FIELDS[name]
    e, mantissa = code >> m, code & 2**m - 1
    return (Fraction(2) ** (e - bias) * (1 + Fraction(mantissa, 2**m)) if e
            else Fraction(2) ** (1 - bias) * Fraction(mantissa, 2**m))


@cache
def positives(name: str) -> list[Fraction]:
    return [exact(c, name) for c in range(FIELDS[name][2] + 1)]


def nearest_code(x: float, name: str) -> int:
    "Round to nearest, ties to the even code, saturating: exact rational arithmetic, one number at a time."
    bits, top = (4 if name == "E2M1" else 8), FIELDS[name][2]
    if math.isnan(x): return 2 ** (bits - 1) - 1
    sign = 2 ** (bits - 1) if math.copysign(1, x) < 0 else 0
    values = positives(name)
    if math.isinf(x) or abs(Fraction(x)) >= values[-1]: return sign | top
    a = abs(Fraction(x))
    above = bisect_left(values, a)
    if values[above] == a: return sign | above
    left, right = a - values[above - 1], values[above] - a
    return sign | (above if right < left or (right == left and above % 2 == 0) else above - 1)


def interesting(name: str) -> np.ndarray:
    "All values, all midpoints, and the float32 numbers beside each, of both signs."
    values = np.array([float(exact(c, name)) for c in range(FIELDS[name][2] + 1)])
    x = np.concatenate([values, (values[1:] + values[:-1]) / 2, values[-1:] * 1.0625]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(-np.inf)), np.nextafter(x, np.float32(np.inf))])
    return np.concatenate([x, -x])


def every_half() -> np.ndarray:
    "Every float16 and every bfloat16 number, as float32, NaN left out."
    codes = np.arange(2**16, dtype=np.uint16)
    x = np.concatenate([codes.view(np.float16).astype(np.float32), codes.view(ml_dtypes.bfloat16).astype(np.float32)])
    return x[~np.isnan(x)]


@formats
def test_every_code_decodes_as_ml_dtypes_does(fmt):
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    want = codes.view(OTHERS[fmt.name]).astype(np.float32)
    got = decode(torch.from_numpy(codes), fmt).numpy()
    assert np.array_equal(got, want, equal_nan=True) and np.array_equal(np.signbit(got), np.signbit(want))


@elements
def test_every_code_is_what_its_fields_say(fmt):
    top = FIELDS[fmt.name][2]
    for sign in (0, 2 ** (fmt.bits - 1)):
        got = decode(torch.arange(sign, sign + top + 1, dtype=torch.uint8), fmt).tolist()
        assert [Fraction(v) for v in got] == [(-1 if sign else 1) * exact(c, fmt.name) for c in range(top + 1)]
    assert float(exact(top, fmt.name)) == fmt.max


def test_every_scale_is_a_power_of_two():
    values = decode(torch.arange(256, dtype=torch.uint8), E8M0).tolist()
    assert values[:255] == [math.ldexp(1, c - 127) for c in range(255)] and math.isnan(values[255])


@pytest.mark.parametrize("fmt, codes, kind", [
    (E4M3, [0x7F, 0xFF], math.isnan), (E5M2, [0x7C, 0xFC], math.isinf), (E8M0, [0xFF], math.isnan),
    (E5M2, [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF], math.isnan)])
def test_the_specials(fmt, codes, kind):
    assert all(map(kind, decode(torch.tensor(codes, dtype=torch.uint8), fmt).tolist()))


@formats
def test_every_finite_code_survives_a_round_trip(fmt):
    codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
    codes = codes[decode(codes, fmt).isfinite()]
    assert torch.equal(encode(decode(codes, fmt), fmt), codes)


@elements
def test_every_half_precision_number_rounds_as_ml_dtypes_does(fmt):
    x = every_half()
    want = x.clip(-fmt.max, fmt.max).astype(OTHERS[fmt.name]).view(np.uint8)
    assert np.array_equal(encode(torch.from_numpy(x), fmt).numpy(), want)


@elements
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_midpoints_and_their_neighbours_round_exactly(fmt, dtype):
    x = interesting(fmt.name)
    got = encode(torch.from_numpy(x).to(dtype), fmt).tolist()
    assert got == [nearest_code(v, fmt.name) for v in x.tolist()]


@elements
def test_float64_is_rounded_once(fmt):
    "A float64 number beside a midpoint rounds to the near side, though float32 would make it a tie."
    middle = np.array([float(exact(c, fmt.name) + exact(c + 1, fmt.name)) / 2 for c in range(FIELDS[fmt.name][2])])
    x = np.concatenate([np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    assert np.array_equal(x.astype(np.float32), np.tile(middle, 2))
    assert encode(torch.from_numpy(x), fmt).tolist() == [nearest_code(v, fmt.name) for v in x.tolist()]


@elements
@given(x=st.floats(width=64))
def test_any_float_becomes_the_nearest_code(fmt, x):
    assert encode(torch.tensor([x], dtype=torch.float64), fmt).item() == nearest_code(x, fmt.name)


@pytest.mark.parametrize("fmt, top", [(E4M3, 0x7E), (E5M2, 0x7B), (E2M1, 0x7)], ids=lambda v: getattr(v, "name", ""))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_overflow_saturates_and_nan_has_all_ones_below_the_sign(fmt, top, dtype):
    sign, largest = 2 ** (fmt.bits - 1), torch.finfo(dtype).max
    x = torch.tensor([math.inf, -math.inf, largest, -largest, math.nan, -math.nan, 0.0, -0.0], dtype=dtype)
    assert encode(x, fmt).tolist() == [top, sign | top, top, sign | top, sign - 1, sign - 1, 0, sign]


@given(x=st.floats(min_value=0, width=64))
def test_a_scale_is_the_smallest_power_of_two_not_below(x):
    code = encode(torch.tensor([x], dtype=torch.float64), E8M0).item()
    power = Fraction(2) ** (code - 127)
    assert 0 <= code <= 254
    assert code == 254 or Fraction(x) <= power
    assert code == 0 or math.isinf(x) or power / 2 < Fraction(x)


def test_powers_of_two_and_their_float32_neighbours():
    power = np.array([math.ldexp(1, k) for k in range(-149, 128)], np.float32)     # down to the smallest subnormal
    k = np.arange(-149, 128)
    below, above = np.nextafter(power, np.float32(0)), np.nextafter(power, np.float32(np.inf))
    want = {"at": k, "below": np.where(k > -127, k, -127), "above": np.where(k >= -127, k + 1, -127)}
    for x, name in ((power, "at"), (below, "below"), (above, "above")):
        exponents = want[name].copy()
        if name == "below": exponents[below <= power / 2] -= 1         # the neighbour of a subnormal may be half of it
        assert encode(torch.from_numpy(x), E8M0).tolist() == (exponents.clip(-127, 127) + 127).tolist(), name


@pytest.mark.parametrize("x, code", [(0.0, 0), (-0.0, 0), (math.inf, 0xFE), (2.0**127, 0xFE), (3.4e38, 0xFE),
                                     (math.nan, 0xFF), (-1.0, 0xFF), (-math.inf, 0xFF), (2.0**-149, 0), (1.0, 127)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale_specials(x, code, dtype):
    assert encode(torch.tensor([x], dtype=dtype), E8M0).item() == code


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5, 7), (2, 3, 4), (2**17 + 3,)])
@formats
def test_any_shape_and_stride(fmt, shape):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 4
    if x.dim() > 1: x = x.transpose(0, -1)
    codes = encode(x, fmt)
    assert codes.shape == x.shape and codes.dtype == torch.uint8
    assert torch.equal(codes.reshape(-1), torch.cat([encode(v.reshape(1), fmt) for v in x.reshape(-1)[:40]] +
                                                    [encode(x.reshape(-1)[40:], fmt)]))
    assert decode(codes, fmt).shape == x.shape


@formats
def test_a_tensor_of_each_type_gives_its_values(fmt):
    codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
    if fmt == E2M1:
        packed = torch.tensor([[lo | hi << 4 for hi in range(16)] for lo in range(16)], dtype=torch.uint8)
        want = torch.stack([decode(codes, fmt).repeat_interleave(16), decode(codes, fmt).repeat(16)], 1).reshape(16, 32)
        for t in (packed, packed.view(fmt.dtype)): assert torch.equal(to_values(t), want)
    else:
        assert format_of(fmt.dtype) == fmt
        t = codes.view(fmt.dtype)
        torch.testing.assert_close(to_values(t), t.float(), rtol=0, atol=0, equal_nan=True)


def test_rounding_leaves_its_argument_alone_and_needs_no_graph():
    x = torch.tensor([1e6, -0.3, 2.2], requires_grad=True)
    before = x.detach().clone()
    assert not encode(x, E4M3).requires_grad and torch.equal(x, before)
