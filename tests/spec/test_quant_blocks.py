"Promise: a block takes the scale of the contract, to the last bit, and no number moves further than half a step."
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dglu.layout import unpack_fp4
from dglu.quant import E2M1, E4M3, E5M2, E8M0, decode, dequantize, encode, quantize, to_values

OTHERS = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2, "E2M1": ml_dtypes.float4_e2m1fn,
          "E8M0": ml_dtypes.float8_e8m0fnu}
SCHEMES = {"MXFP8 E4M3": (E4M3, 32, E8M0), "MXFP8 E5M2": (E5M2, 32, E8M0), "MXFP4": (E2M1, 32, E8M0),
           "MXFP4 of 16": (E2M1, 16, E8M0), "NVFP4": (E2M1, 16, E4M3)}
schemes = pytest.mark.parametrize("fmt, vec, sf_fmt", SCHEMES.values(), ids=SCHEMES.keys())
mx = pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda f: f.name)
dims = pytest.mark.parametrize("dim", [-1, 0], ids=["row", "column"])
f32 = np.float32


def random(rows, cols, *, spread=12, seed=0):
    "Normal numbers times random powers of two."
    g = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread + 1, (rows, cols), generator=g)
    return torch.randn(rows, cols, generator=g) * torch.exp2(exponents)


def codes_of(q, fmt):
    return unpack_fp4(q) if fmt == E2M1 else q.view(torch.uint8)


def scale_byte(amax, fmt, sf_fmt, c) -> int:
    "The scale of a block by scalar float32 arithmetic, in the order (amax * r) * c."
    with np.errstate(over="ignore"): want = f32(amax) * (f32(1) / f32(fmt.max)) * f32(c)
    if np.isnan(want): return 0xFF if sf_fmt == E8M0 else 0x7F
    if sf_fmt == E4M3: return int(np.array(min(want, f32(448))).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    if want == 0: return 0
    if np.isinf(want): return 254
    mantissa, exponent = math.frexp(float(want))
    return min(max(exponent - (mantissa == 0.5), -127), 127) + 127


def by_loops(x: np.ndarray, fmt, vec, sf_fmt, c):
    "Row-wise quantisation, one block and one number at a time; float64 holds every product with an E8M0 scale."
    q, scales = np.zeros(x.shape, np.uint8), np.zeros((x.shape[0], -(-x.shape[1] // vec)), np.uint8)
    for i in range(x.shape[0]):
        for b in range(scales.shape[1]):
            stop = min(x.shape[1], (b + 1) * vec)
            scales[i, b] = scale_byte(max(abs(x[i, j]) for j in range(b * vec, stop)), fmt, sf_fmt, c)
            sf = float(scales[i, b:b + 1].view(OTHERS[sf_fmt.name])[0])
            for j in range(b * vec, stop):
                if sf_fmt == E8M0: y = f32(float(x[i, j]) * (float(f32(c)) / sf))
                else: y = x[i, j] * f32(float(f32(c)) / sf if sf else 0)           # a zero keeps its sign
                q[i, j] = np.clip(y, -fmt.max, fmt.max).astype(OTHERS[fmt.name]).view(np.uint8)
    return q, scales


@schemes
@dims
@pytest.mark.parametrize("c", [1.0, 2.0**-8, 2.0**8, 0.3, 37.0])
def test_every_byte_as_in_a_scalar_loop(fmt, vec, sf_fmt, dim, c):
    x = random(44, 50)
    q, scales = quantize(x, fmt, sf_vec_size=vec, sf_format=sf_fmt, norm_const=c, dim=dim)
    want_q, want_scales = by_loops(x.numpy() if dim else x.T.numpy(), fmt, vec, sf_fmt, c)
    codes, scales = codes_of(q, fmt).numpy(), scales.view(torch.uint8).numpy()
    assert np.array_equal(codes if dim else codes.T, want_q)
    assert np.array_equal(scales if dim else scales.T, want_scales)


@mx
@pytest.mark.parametrize("k", [-149, -140, -126, -100, -1, 0, 100, 120])
@pytest.mark.parametrize("c", [2.0**-8, 1.0, 2.0**8])
def test_the_whole_range_of_float32(fmt, k, c):
    "Also where the inverse of the scale, or the scale itself, is no normal float32 number."
    g = torch.Generator().manual_seed(k)
    x = (torch.randn(8, 64, generator=g, dtype=torch.float64) * 2.0**k).float()
    q, scales = quantize(x, fmt, sf_vec_size=32, norm_const=c)
    want_q, want_scales = by_loops(x.numpy(), fmt, 32, E8M0, c)
    assert np.array_equal(codes_of(q, fmt).numpy(), want_q)
    assert np.array_equal(scales.view(torch.uint8).numpy(), want_scales)


@mx
def test_the_inexact_reciprocal_never_rounds_a_step_too_far(fmt):
    "All float32 mantissas: with amax in one octave, the scale doubles right above the largest value, not at it."
    start = int(f32(2.0 ** math.floor(math.log2(fmt.max))).view(np.int32))             # the octave that holds fmt.max
    for low in range(0, 2**23, 2**21):
        a = torch.arange(start + low, start + low + 2**21, dtype=torch.int32).view(torch.float32)
        assert torch.equal(encode(a * fmt.rcp_max, E8M0), 127 + (a > fmt.max).to(torch.uint8))
    a = torch.tensor([[fmt.max], [math.nextafter(fmt.max, math.inf)]], dtype=torch.float64)
    assert encode(a * fmt.rcp_max, E8M0).flatten().tolist() == [128, 128]            # unrounded, it is too large


@mx
def test_the_order_of_the_two_products_decides_the_last_bit(fmt):
    "Where amax * c is about the largest value, (amax * r) * c and amax * (r * c) may take different scales."
    other_order = 0
    for c in (0.1, 0.3, 0.9, 1.1, *(1 + i / 64 for i in range(64))):
        near = (torch.tensor(fmt.max) / torch.tensor(c)).view(torch.int32)
        a = (near + torch.arange(-4, 5, dtype=torch.int32)).view(torch.float32)
        _, scales = quantize(a[:, None].expand(9, 32), fmt, sf_vec_size=32, norm_const=c)
        want = [scale_byte(v, fmt, E8M0, c) for v in a.numpy()]
        assert scales.view(torch.uint8).flatten().tolist() == want
        other = encode(a * (torch.tensor(fmt.rcp_max) * torch.tensor(c)), E8M0)
        other_order += int((other != torch.tensor(want, dtype=torch.uint8)).sum())
    assert other_order > 0                                                       # so the test can tell the two apart


@mx
@dims
def test_no_number_moves_further_than_half_a_step(fmt, dim):
    x, c = random(96, 130), 8.0
    q, scales = quantize(x, fmt, sf_vec_size=32, norm_const=c, dim=dim)
    y = dequantize(q, scales, sf_vec_size=32, norm_const=c, dim=dim, dtype=torch.float64)
    sf = scales.float().double().repeat_interleave(32, dim)[:96, :130]                  # torch's own E8M0
    smallest = sf / c * 2.0 ** (-fmt.bias - fmt.mantissa_bits)
    assert ((x - y).abs() <= torch.maximum(x.abs() * 2.0 ** (-fmt.mantissa_bits - 1), smallest)).all()


@mx
@given(data=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70), log_c=st.integers(-8, 8))
def test_error_bound_for_any_row(fmt, data, log_c):
    data = data + [0.0] * (len(data) % 2)
    x, c = torch.tensor([data], dtype=torch.float32), 2.0**log_c
    q, scales = quantize(x, fmt, sf_vec_size=32, norm_const=c)
    y = dequantize(q, scales, sf_vec_size=32, norm_const=c, dtype=torch.float64)
    sf = scales.float().double().repeat_interleave(32, -1)[:, :len(data)]
    half_step = x.abs().double() * 2.0 ** (-fmt.mantissa_bits - 1)
    bound = torch.maximum(half_step, sf / c * 2.0 ** (-fmt.bias - fmt.mantissa_bits))
    tiny = 2.0**-140                                 # amax/max in float32 may itself be subnormal, and inexact
    assert ((x - y).abs() <= bound + tiny).all()


@given(data=st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16))
def test_nvfp4_error_is_bounded_by_the_scale(data):
    "E2M1 steps are at most 2, so a number moves by one scale at most; a scale rounded down clips by 1/16 more."
    x = torch.tensor([data], dtype=torch.float32)
    c = 448 * 6 / max(x.abs().max().item(), 1e-30)
    c = float(torch.tensor(c).clamp(2.0**-100, 2.0**100))
    q, scales = quantize(x, E2M1, sf_vec_size=16, sf_format=E4M3, norm_const=c)
    y = dequantize(q, scales, sf_vec_size=16, norm_const=c)
    assert ((x - y).abs() <= scales.float() / c * (1 + 6 / 16) + 1e-6 * x.abs()).all()


@mx
@given(seed=st.integers(0, 2**16), dim=st.sampled_from([-1, 0]))
def test_quantising_twice_changes_nothing(fmt, seed, dim):
    x, how = random(20, 36, spread=4, seed=seed), dict(sf_vec_size=32, norm_const=4.0, dim=dim)
    y = dequantize(*quantize(x, fmt, **how), **how)
    assert torch.equal(dequantize(*quantize(y, fmt, **how), **how), y)


@mx
def test_nothing_saturates_below_the_largest_scale(fmt):
    for seed in range(20):
        x = random(64, 64, seed=seed)
        _, scales = quantize(x, fmt, sf_vec_size=32)
        sf = scales.float().repeat_interleave(32, -1)
        assert (x.abs() <= fmt.max * sf).all()
        amax = x.abs().view(64, 2, 32).amax(-1)
        assert (amax > fmt.max * scales.float() / 2).all()                       # no scale is larger than it must be


@mx
@dims
@pytest.mark.parametrize("c", [2.0**-8, 1.0, 3.0, 2.0**8])
def test_special_blocks(fmt, dim, c):
    x = torch.ones(6, 32)
    x[0] = 0
    x[1, 7] = math.nan
    x[2, 3] = -math.inf
    x[3] = 0
    x[3, 5] = 2.0**-149
    q, scales = quantize(x if dim else x.T.contiguous(), fmt, sf_vec_size=32, norm_const=c, dim=dim)
    codes = codes_of(q, fmt) if dim else codes_of(q, fmt).T
    values, sf = decode(codes.contiguous(), fmt), scales.view(torch.uint8).flatten().tolist()
    assert sf[:4] == [0, 0xFF, 0xFE, 0]
    assert not codes[0].any()
    assert (codes[1] == 2 ** (fmt.bits - 1) - 1).all()                           # NaN; in E2M1 +6 under a NaN scale
    assert values[2, 3] == -fmt.max and (values[2, torch.arange(32) != 3] == 0).all()
    ones = values[4] * 2.0 ** (sf[4] - 127) / c
    assert ((ones - 1).abs() <= 2.0 ** (-fmt.mantissa_bits - 1)).all()
    y = dequantize(q, scales, sf_vec_size=32, norm_const=c, dim=dim)
    y = y if dim else y.T
    assert y[1].isnan().all() and not y[[0, 2, 3, 4]].isnan().any()


def test_a_nan_scale_in_e4m3_and_a_scale_that_underflows():
    x = torch.ones(3, 16)
    x[0, 0], x[1], x[2] = math.nan, 2.0**-12, 0
    q, scales = quantize(x, E2M1, sf_vec_size=16, sf_format=E4M3)
    assert scales.view(torch.uint8).flatten().tolist() == [0x7F, 0, 0]
    assert not q[1:].any()
    y = dequantize(q, scales, sf_vec_size=16)
    assert y[0].isnan().all() and not y[1:].any()


@schemes
@dims
@pytest.mark.parametrize("rows, cols", [(0, 32), (32, 0), (0, 0), (1, 2), (31, 34), (33, 32), (64, 96)])
def test_shapes(fmt, vec, sf_fmt, dim, rows, cols):
    x = torch.full((rows, cols), 3.0)
    q, scales = quantize(x, fmt, sf_vec_size=vec, sf_format=sf_fmt, dim=dim)
    assert q.shape == ((rows, cols // 2) if fmt == E2M1 else (rows, cols)) and q.is_contiguous()
    assert q.dtype == (torch.uint8 if fmt == E2M1 else fmt.dtype) and scales.dtype == sf_fmt.dtype
    assert scales.shape == ((rows, -(-cols // vec)) if dim else (-(-rows // vec), cols))
    assert dequantize(q, scales, sf_vec_size=vec, dim=dim).shape == (rows, cols)


def test_one_column():
    x = torch.arange(1.0, 41).view(40, 1)
    q, scales = quantize(x, E4M3, sf_vec_size=32)
    assert scales.shape == (40, 1) and torch.allclose(dequantize(q, scales, sf_vec_size=32), x, rtol=2**-4)
    q, scales = quantize(x, E4M3, sf_vec_size=32, dim=0)
    assert scales.shape == (2, 1) and torch.allclose(dequantize(q, scales, sf_vec_size=32, dim=0), x, rtol=2**-4)


@schemes
def test_strides_types_and_axes_do_not_matter(fmt, vec, sf_fmt):
    x = random(48, 64).bfloat16()
    how = dict(sf_vec_size=vec, sf_format=sf_fmt, norm_const=torch.tensor([2.0]))
    q, scales = quantize(x, fmt, **how)
    wide = torch.zeros(96, 128, dtype=torch.bfloat16)
    wide[::2, ::2] = x
    for same in (wide[::2, ::2], x.T.contiguous().T, x.float(), x.double(), x.clone().requires_grad_()):
        q2, scales2 = quantize(same, fmt, **how)
        assert torch.equal(q.view(torch.uint8), q2.view(torch.uint8))
        assert torch.equal(scales.view(torch.uint8), scales2.view(torch.uint8))
    q3, scales3 = quantize(x.T, fmt, dim=0, **how)
    assert torch.equal(codes_of(q, fmt), codes_of(q3, fmt).T)
    assert torch.equal(scales.view(torch.uint8), scales3.view(torch.uint8).T)


@mx
def test_a_block_knows_nothing_of_its_neighbours(fmt):
    x = random(6, 96)
    q, scales = quantize(x, fmt, sf_vec_size=32)
    changed = x.clone()
    changed[2, 40] = math.nan
    q2, scales2 = quantize(changed, fmt, sf_vec_size=32)
    same = codes_of(q, fmt) == codes_of(q2, fmt)
    same[2, 32:64] = True
    assert same.all()
    assert (scales.view(torch.uint8) != scales2.view(torch.uint8)).nonzero().tolist() == [[2, 1]]


def test_norm_const_cancels_when_it_is_a_power_of_two():
    x = random(16, 64)
    plain = dequantize(*quantize(x, E4M3, sf_vec_size=32), sf_vec_size=32)
    for c in (2.0**-8, 2.0**8):
        q, scales = quantize(x, E4M3, sf_vec_size=32, norm_const=c)
        assert torch.equal(dequantize(q, scales, sf_vec_size=32, norm_const=c), plain)
        assert torch.equal(scales.float(), quantize(x, E4M3, sf_vec_size=32)[1].float() * c)


def test_dequantize_in_float64_reaches_beyond_float32():
    x = torch.tensor([[math.inf, 3e38] + [0.0] * 30])
    q, scales = quantize(x, E4M3, sf_vec_size=32)
    y = dequantize(q, scales, sf_vec_size=32, dtype=torch.float64)
    assert y.dtype == torch.float64 and y[0, :2].tolist() == [448 * 2.0**127, 1.75 * 2.0**127]
    assert dequantize(q, scales, sf_vec_size=32)[0, 0] == math.inf


def test_every_element_and_scale_multiply_exactly():
    "q·SF in float64 against exact products of torch's own values, all 256 x 256 pairs of E4M3 and E8M0."
    every = torch.arange(256, dtype=torch.uint8)
    q = every.view(torch.float8_e4m3fn)[None].expand(256, 256).contiguous()
    scales = every.view(torch.float8_e8m0fnu)[:, None].expand(256, 8).contiguous()
    want = q.float().double() * scales.float().double()[:, :1]
    got = dequantize(q, scales, sf_vec_size=32, dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt, sf_fmt", [(E4M3, E8M0), (E5M2, E8M0), (E2M1, E8M0), (E2M1, E4M3)],
                         ids=lambda f: f.name)
def test_products_fit_bfloat16_wherever_its_range_does(fmt, sf_fmt):
    "What the Hopper path rests on."
    values = [decode(torch.arange(2**f.bits, dtype=torch.uint8), f).numpy().astype(np.float64) for f in (fmt, sf_fmt)]
    product = np.outer(*[v[np.isfinite(v)] for v in values])
    inside = (abs(product) >= 2.0**-126) & (abs(product) < 2.0**128)
    assert np.array_equal(product[inside].astype(ml_dtypes.bfloat16).astype(np.float64), product[inside])


def test_values_of_a_strided_view():
    q, _ = quantize(random(8, 64), E4M3, sf_vec_size=32)
    assert torch.equal(to_values(q.T), q.float().T)
