"""D in NVFP4, and the activation with its scale factors: the bytes are those of dglu.quant.quantize on the float32 matrix, the layout is what the next GEMM
reads, and blocks of zeros, NaN, infinities, underflow and saturation are what they should be."""
from dataclasses import replace

import pytest
import torch
from calls import L, M, N, bf16, blockscaled, nvfp4_d, quantised_activation

from dglu import GroupedGemmDgluSm100, expert_pointers, grouped_gemm_dglu_wrapper_sm100, grouped_gemm_dsrelu_wrapper_sm100
from dglu.check import FP4_D, execute, run_case, variants
from dglu.layout import dense_b, unpack_fp4
from dglu.quant import E2M1, E4M3, E5M2, E8M0, dequantize, pack_sf, quantize, sf_physical, sf_view, unpack_sf, unpack_sf_col
from dglu.truth import make_tensors

LIVE, ENDS, U8 = 768, [256, 256, 768], torch.uint8  # calls.COUNTS fill 768 of 1024 rows
FORMS = {"mxfp8": (E4M3, E8M0, 32), "mxfp8_e5m2": (E5M2, E8M0, 32), "nvfp4": (E2M1, E4M3, 16)}


def run(call, **kw): return grouped_gemm_dglu_wrapper_sm100(**call | kw)


def raw(t): return t.view(U8)


def both(form, activation_const=1.0, **changes):
    "A call of one of FORMS with everything quantised, its outputs, and the five tensors of its activation."
    call = nvfp4_d(**changes) if form == "nvfp4" else blockscaled(form, **changes)
    act = quantised_activation(call["d_dtype"], activation_const)
    return call, run(call, **act), act


def float32_activation(form, **changes):
    "The activation of the same call before rounding: (LIVE, N)."
    act = torch.zeros(M, N, 1)
    run(blockscaled(form, **changes, activation_out=act))
    return act[:LIVE, :, 0]


def float32_d(**changes):
    "D of the same NVFP4 call before rounding: (LIVE, 2N)."
    return run(blockscaled("nvfp4", **changes, d_dtype=torch.float32), generate_dbias=True)[0][:LIVE, :, 0]


def expect(x, form, norm_const):
    "What `quantize` makes of x (LIVE, columns): elements and scales, by rows and by columns; those by columns of x transposed."
    fmt, sf_fmt, vec = FORMS[form]
    return [raw(y) for z in (x, x.T.contiguous()) for y in quantize(z, fmt, sf_vec_size=vec, sf_format=sf_fmt, norm_const=norm_const)]


def bytes_of(row, col, sf_row, sf_col, form, discrete=False):
    "The same four of an output's tensors."
    vec, fp4, columns = FORMS[form][2], form == "nvfp4", sf_col.shape[2] * 128
    by_col = raw(col)[:, :LIVE // 2, 0] if fp4 else raw(col)[:LIVE, :, 0].T
    n = by_col.shape[0]
    sf = unpack_sf_col(raw(sf_col), M // vec, columns, ENDS, sf_vec_size=vec, discrete=discrete)[:LIVE // vec, :n].T
    return [raw(row)[:LIVE, :, 0], unpack_sf(raw(sf_row), M, n // vec)[0][:LIVE], by_col, sf]


@pytest.mark.parametrize("norm_const", [2.0**-8, 0.3, 1.0, 37.0, 2.0**8])
@pytest.mark.parametrize("discrete", [False, True])
def test_d_in_nvfp4_is_quantize_of_float32_d(norm_const, discrete):
    _, out, _ = both("nvfp4", norm_const_tensor=torch.full((1,), norm_const), discrete_col_sfd=discrete)
    want = expect(float32_d(), "nvfp4", norm_const)
    got = bytes_of(*(out[f"{key}_tensor"] for key in ("d_row", "d_col", "sfd_row", "sfd_col")), "nvfp4", discrete)
    for x, y in zip(want, got): assert torch.equal(x, y)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm_const, discrete", [(2.0**-8, False), (0.3, True), (1.0, False), (2.0**8, True)])
def test_a_quantised_activation_is_quantize_of_the_float32_one(form, norm_const, discrete):
    _, _, act = both(form, activation_const=norm_const, discrete_col_sfd=discrete)
    *four, _ = act.values()
    for x, y in zip(expect(float32_activation(form), form, norm_const), bytes_of(*four, form, discrete)): assert torch.equal(x, y)


@pytest.mark.parametrize("form", FORMS)
def test_the_activation_changes_nothing_else(form):
    make = nvfp4_d if form == "nvfp4" else lambda: blockscaled(form)
    alone, (_, out, _) = run(make()), both(form)
    for key, x in alone.items():
        if x is None: assert out[key] is None; continue
        rows = slice(LIVE) if key == "d_row_tensor" or key == "d_col_tensor" and form != "nvfp4" else slice(None)
        y = out[key]
        if key == "d_col_tensor" and form == "nvfp4": x, y = x[:, :LIVE // 2], y[:, :LIVE // 2]
        assert torch.equal(raw(x[rows].contiguous()), raw(y[rows].contiguous())), key


@pytest.mark.parametrize("act_func", ["dswiglu", "dgeglu", "dsituglu"])
def test_amax_and_dbias_of_an_fp4_d_are_those_of_float32(act_func):
    "The next step's norm_const is made from amax, which is therefore D's before rounding."
    out = run(nvfp4_d(act_func=act_func), generate_dbias=True)
    d = run(blockscaled("nvfp4", act_func=act_func, d_dtype=torch.float32), generate_dbias=True)
    halves = d[0][:LIVE, :, 0].unflatten(1, (-1, 2, 32)).abs()
    want = torch.stack([halves[lo:hi].amax((0, 1, 3)) if hi > lo else torch.zeros(2) for lo, hi in zip([0, *ENDS], ENDS)])
    assert torch.equal(out["amax_tensor"][..., 0], want) and torch.equal(out["dbias_tensor"], d["dbias_tensor"])
    assert torch.equal(out["dprob_tensor"], d["dprob_tensor"])


def test_a_norm_const_from_amax_uses_the_whole_range_of_scales():
    "448·6/amax: the largest block's scale is 448, and nothing saturates."
    first = run(nvfp4_d())
    const = 448 * 6 / first["amax_tensor"].max()
    out = run(nvfp4_d(norm_const_tensor=const.view(1)))
    sf = unpack_sf(raw(out["sfd_row_tensor"]), M, 2 * N // 16)[0]
    assert sf.max() == 0x7E and (sf == 0x7E).sum() < 20
    d = float32_d()
    back = dequantize(out["d_row_tensor"][:LIVE, :, 0], sf[:LIVE].view(torch.float8_e4m3fn), sf_vec_size=16, norm_const=const)
    assert (back - d).norm() < 0.12 * d.norm()


def test_float4_tensors_hold_the_bytes_of_uint8_ones():
    x2 = torch.float4_e2m1fn_x2
    one, two = run(nvfp4_d()), run(nvfp4_d(d_dtype=x2))
    assert two["d_row_tensor"].dtype == two["d_col_tensor"].dtype == x2
    assert torch.equal(one["d_row_tensor"][:LIVE], raw(two["d_row_tensor"])[:LIVE]) and torch.equal(one["d_col_tensor"][:, :LIVE // 2], raw(two["d_col_tensor"])[:, :LIVE // 2])
    acts = [quantised_activation(dtype) for dtype in (U8, x2)]
    for dtype, act in zip((U8, x2), acts): run(nvfp4_d(d_dtype=dtype), **act)
    for x, y in zip(*(act.values() for act in acts)): assert torch.equal(raw(x), raw(y))


# Special blocks ------------------------------------------------------------------------------------------------------------

def zeroed(rows):
    "A call whose rows of R are zero: A's scale factors there are."
    call = nvfp4_d()
    sf = unpack_sf(raw(call["sfa_tensor"]), M, 8)[0]
    sf[rows] = 0
    return call | {"sfa_tensor": sf_view(pack_sf(sf)).view(torch.float8_e4m3fn)}


def codes(out, key): return unpack_fp4(out[f"{key}_tensor"][..., 0])


def test_blocks_of_zeros_by_rows_and_by_columns():
    "Scale 0 and codes 0 (or minus 0), whatever norm_const; a block that is zero in part is not touched by it."
    for norm_const in (2.0**-8, 1.0, 2.0**8):
        out = run(zeroed(slice(32, 56)), norm_const_tensor=torch.full((1,), norm_const))
        row, col = unpack_sf(raw(out["sfd_row_tensor"]), M, 8)[0], unpack_sf(raw(out["sfd_col_tensor"]), 2 * N, M // 16)[0]
        assert not row[32:56].any() and not (codes(out, "d_row")[32:56] & 7).any() and not (codes(out, "d_col")[:, 32:56] & 7).any()
        assert not col[:, 2].any()  # rows 32 to 47
        if norm_const >= 1: assert col[:, 3].all() and row[:32].all()


def test_a_nan_spoils_its_blocks_and_no_others():
    call = nvfp4_d()
    call["c_tensor"][40, 3] = torch.nan  # gate 3: dgate in column 3, dup in column 35
    act = quantised_activation()
    out, plain = run(call, **act), run(nvfp4_d())
    row, col = unpack_sf(raw(out["sfd_row_tensor"]), M, 8)[0], unpack_sf(raw(out["sfd_col_tensor"]), 2 * N, M // 16)[0]
    assert (row[:LIVE] == 0x7F).nonzero().tolist() == [[40, 0], [40, 2]] and (col[:, :LIVE // 16] == 0x7F).nonzero().tolist() == [[3, 2], [35, 2]]
    assert (codes(out, "d_row")[40, [*range(16), *range(32, 48)]] == 7).all() and (codes(out, "d_col")[[3, 35], 32:48] == 7).all()
    same = codes(out, "d_row")[:LIVE] == codes(plain, "d_row")[:LIVE]
    same[40, :16] = same[40, 32:48] = True
    assert same.all() and out["amax_tensor"][0].isnan().all() and out["amax_tensor"][2].isfinite().all()
    row, col = unpack_sf(raw(act["activation_sf_row"]), M, 4)[0], unpack_sf(raw(act["activation_sf_col"]), N, M // 16)[0]
    assert (row[:LIVE] == 0x7F).nonzero().tolist() == [[40, 0]] and (col[:, :LIVE // 16] == 0x7F).nonzero().tolist() == [[3, 2]]


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_saturates(sign):
    "Scale 448 and a code of 6; what stands beside it, divided by 448, becomes 0."
    call = nvfp4_d()
    call["c_tensor"][40, 35] = torch.inf * sign  # up 3: dgate is infinite, dup does not read it
    out, plain = run(call), run(nvfp4_d())
    row = unpack_sf(raw(out["sfd_row_tensor"]), M, 8)[0]
    here = codes(out, "d_row")[40]
    assert row[40, 0] == 0x7E and here[3] & 7 == 7 and not (here[[*range(3), *range(4, 16)]] & 7).any()
    assert torch.equal(here[16:], codes(plain, "d_row")[40, 16:]) and not (row[:LIVE] == 0x7F).any()


def test_every_kind_of_scale_is_met():
    "Small alpha, and norm_const from 2^-8 to 2^8: scales of 0, subnormal, normal, and 448; each block is still `quantize`'s."
    seen = set()
    for scale in (2.0**-12, 1.0, 2.0**8):
        alpha = blockscaled("nvfp4")["alpha_tensor"] * scale
        d = float32_d(alpha_tensor=alpha)
        for norm_const in (2.0**-8, 1.0, 2.0**8):
            out = run(nvfp4_d(alpha_tensor=alpha, norm_const_tensor=torch.full((1,), norm_const)))
            got = bytes_of(*(out[f"{key}_tensor"] for key in ("d_row", "d_col", "sfd_row", "sfd_col")), "nvfp4")
            for x, y in zip(expect(d, "nvfp4", norm_const), got): assert torch.equal(x, y)
            seen |= set(got[1].flatten().tolist()) | set(got[3].flatten().tolist())
    assert {0, 1, 7, 8, 0x7E} <= seen and 0x7F not in seen


@pytest.mark.parametrize("scale, saturated", [(1.0, False), (2.0**10, True)])
def test_beyond_the_largest_scale_elements_saturate(scale, saturated):
    out = run(nvfp4_d(alpha_tensor=torch.full((L,), scale)))
    sf, q = unpack_sf(raw(out["sfd_row_tensor"]), M, 8)[0][:LIVE], codes(out, "d_row")[:LIVE]
    full = (sf == 0x7E).repeat_interleave(16, 1)
    assert full.any() == saturated and (not saturated or (q[full] & 7 == 7).double().mean() > 0.9)


def test_padding_of_atoms_and_spare_rows_keep_their_bytes():
    "N = 32: sfd_col's atoms have 64 rows of padding, the activation's row atoms two blocks; rows past the last expert stay."
    case = replace(FP4_D, n=32, spare=256, activation=U8, outputs=("d_col", "sfd", "activation_sf"))
    t = make_tensors(case)
    execute(case, t, "reference")
    end = case.ends[-1]
    assert (raw(t["d_row"])[end:] == 255).all() and (raw(t["d_col"])[:, end // 2:] == 255).all()
    assert (raw(t["activation_out"])[end:] == 255).all() and (raw(t["activation_col_out"])[:, end // 2:] == 255).all()
    for key, used in (("sfd_col", 64), ("activation_sf_col", 32)):
        sf = unpack_sf(raw(t[key]), 128, case.rows // 16)[0]
        assert (sf[used:] == 255).all() and (sf[:used, end // 16:] == 255).all() and (sf[:used, :end // 16] != 255).all()
    sf = unpack_sf(raw(t["activation_sf_row"]), case.rows, 4)[0]
    assert (sf[:, 2:] == 255).all() and (sf[:end, :2] != 255).all() and (sf[end:] == 255).all()


def test_zero_rows():
    call = nvfp4_d()
    for key in ("a_tensor", "c_tensor", "prob_tensor", "dprob_tensor"): call[key] = call[key][:0].clone()
    call["padded_offsets"] = torch.zeros(L, dtype=torch.int32)
    call["sfa_tensor"] = raw(call["sfa_tensor"])[:, :, :0].clone().view(torch.float8_e4m3fn)
    out = run(call, **quantised_activation(m=0), generate_dbias=True)
    assert out["d_row_tensor"].shape == (0, N, 1) and out["d_col_tensor"].shape == (2 * N, 0, 1)
    assert not out["dbias_tensor"].any() and not out["amax_tensor"].any()


# The next GEMM ---------------------------------------------------------------------------------------------------------------

def product(a, sfa, b, sfb):
    "A·Bᵀ of NVFP4 operands (rows, K/2, 1) and (columns, K/2, 1), by a call of its own: dsReLU with C = ½ as the pre-activation gives D = G."
    rows, cols = len(a), len(b)
    out = grouped_gemm_dsrelu_wrapper_sm100(a, b, torch.full((rows, cols, 1), 0.5), sfa, sfb, torch.tensor([rows], dtype=torch.int32), torch.ones(1),
                                            d_dtype=torch.float32, c_role="preactivation")
    return out["d_row_tensor"][..., 0].double()


def nvfp4(x):
    q, sf = quantize(x, E2M1, sf_vec_size=16, sf_format=E4M3)
    return (q[..., None], pack_sf(sf)), dequantize(q, sf, sf_vec_size=16, dtype=torch.float64)


def test_the_next_gemms_read_d_as_it_lies():
    "d_row as A (the data gradient), d_col as B (the weight gradient), with no byte moved; against the same bytes, dequantised."
    call = nvfp4_d(padded_offsets=torch.tensor([256, 256, M], dtype=torch.int32))
    act = quantised_activation()
    out = run(call, **act)
    gen = torch.Generator().manual_seed(1)
    for row, col, sf_row, sf_col, n in ((*(out[f"{key}_tensor"] for key in ("d_row", "d_col", "sfd_row", "sfd_col")), 2 * N), (*list(act.values())[:4], N)):
        by_row = dequantize(row[..., 0], unpack_sf(sf_row, M, n // 16)[0], sf_vec_size=16, dtype=torch.float64)
        by_col = dequantize(col[..., 0], unpack_sf(sf_col, n, M // 16)[0], sf_vec_size=16, dtype=torch.float64)
        weight, w = nvfp4(torch.randn(96, n, generator=gen))
        inputs, x = nvfp4(torch.randn(256, M, generator=gen))
        for got, want in ((product(row, sf_row, *weight), by_row @ w.T), (product(*inputs, col, sf_col), x @ by_col.T)):
            assert (got - want).norm() < 1e-6 * want.norm()
        assert (by_row - by_col.T).norm() < 0.25 * by_row.norm()  # two roundings of one matrix


def test_d_of_one_call_is_a_of_another():
    "A whole dGLU call that reads D_row, against one that reads the same numbers in BF16, which holds a product of FP4 and E4M3 exactly."
    out = run(nvfp4_d(padded_offsets=torch.tensor([256, 256, M], dtype=torch.int32)))
    d = dequantize(out["d_row_tensor"][..., 0], unpack_sf(out["sfd_row_tensor"], M, 2 * N // 16)[0], sf_vec_size=16)
    scaled, w = zip(*(nvfp4(torch.randn(N, 2 * N, generator=torch.Generator().manual_seed(e))) for e in range(L)))
    nxt = blockscaled("nvfp4", a_tensor=out["d_row_tensor"], sfa_tensor=out["sfd_row_tensor"], b_tensor=dense_b(torch.stack([b[..., 0] for b, _ in scaled])),
                      sfb_tensor=pack_sf(torch.stack([unpack_sf(sf, N, 8)[0] for _, sf in scaled])))
    got = run(nxt)["d_row_tensor"][:LIVE]
    want = run(bf16(a_tensor=d[..., None].bfloat16(), b_tensor=dense_b(torch.stack(w).bfloat16()), **{k: nxt[k] for k in ("c_tensor", "alpha_tensor", "beta_tensor", "prob_tensor")}))
    assert (d.bfloat16().float() == d).all() and all((x.bfloat16().double() == x).all() for x in w)
    torch.testing.assert_close(got.float(), want["d_row_tensor"][:LIVE].float(), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp8"])
def test_columns_packed_by_experts_are_each_an_operand(form):
    "discrete_col_sfd: an expert's scale factors are a tensor of their own, as one matrix of its rows would have them."
    fmt, sf_fmt, vec = FORMS[form]
    (_, _, act), x, start = both(form, discrete_col_sfd=True), float32_activation(form), 0
    for lo, hi in zip([0, *ENDS], ENDS):
        want = sf_physical(pack_sf(raw(quantize(x[lo:hi].T.contiguous(), fmt, sf_vec_size=vec, sf_format=sf_fmt)[1]))).flatten()
        assert torch.equal(raw(sf_physical(act["activation_sf_col"])).flatten()[start:start + want.numel()], want)
        start += want.numel()


def test_columns_packed_by_experts_where_they_are_two_rows_of_atoms():
    "Above 128 columns an expert's atoms are not those of one tensor for all experts."
    result = run_case(variants(FP4_D, dict(discrete_col_sfd=True, n=160, counts=(0, 257, 0, 1), activation=U8, outputs=("d_col", "sfd", "activation_sf")))[0])
    assert result.ok, result.message


# Around the call ----------------------------------------------------------------------------------------------------------------

def test_discrete_weights_and_the_class_give_the_same_bytes():
    call, out, act = both("nvfp4", act_func="dgeglu")
    experts = [call["b_tensor"][..., e].contiguous() for e in range(L)]
    sfs = [sf_physical(call["sfb_tensor"])[e].clone().view(-1, 512) for e in range(L)]
    act2, tensors = quantised_activation(), {k: v for k, v in call.items() if torch.is_tensor(v) and k not in ("b_tensor", "sfb_tensor")}
    outs = {key: torch.zeros_like(raw(out[f"{key}_tensor"])).view(out[f"{key}_tensor"].dtype) for key in ("d_row", "d_col", "sfd_row", "sfd_col", "amax")}
    samples = {f"sample_{k.removesuffix('_tensor')}": v for k, v in (tensors | act2 | outs).items()}
    op = GroupedGemmDgluSm100(**samples, num_experts=L, b_shape=(N, call["a_tensor"].shape[1]), b_dtype=U8, act_func="dgeglu")
    op.compile()
    op.execute(**tensors | {"dprob_tensor": torch.zeros(M, 1, 1)}, b_ptrs=expert_pointers(experts), sfb_ptrs=expert_pointers(sfs), **{f"{k}_tensor": v for k, v in outs.items()}, **act2)
    assert torch.equal(outs["d_row"][:LIVE], out["d_row_tensor"][:LIVE]) and torch.equal(outs["d_col"][:, :LIVE // 2], out["d_col_tensor"][:, :LIVE // 2])
    for key in ("sfd_row", "sfd_col", "amax"): assert torch.equal(raw(outs[key]), raw(out[f"{key}_tensor"]))
    for key in act: assert torch.equal(raw(act[key]), raw(act2[key])), key


def test_dsrelu_has_a_quantised_activation_in_mxfp8_and_no_fp4_d():
    act, plain = quantised_activation(torch.float8_e4m3fn), torch.zeros(M, N, 1)
    grouped_gemm_dsrelu_wrapper_sm100(**blockscaled(op="dsrelu"), **act)
    grouped_gemm_dsrelu_wrapper_sm100(**blockscaled(op="dsrelu"), activation_out=plain)
    *four, _ = act.values()
    for x, y in zip(expect(plain[:LIVE, :, 0], "mxfp8", 1.0), bytes_of(*four, "mxfp8", discrete=True)): assert torch.equal(x, y)
    with pytest.raises(ValueError, match="D's type = torch.uint8.*needs dGLU"):
        grouped_gemm_dsrelu_wrapper_sm100(**blockscaled("nvfp4", op="dsrelu", d_dtype=U8, norm_const_tensor=torch.ones(1)))
