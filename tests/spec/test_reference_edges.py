"Edges of the reference that random problems rarely reach: empty experts, spare rows, chunk borders, NaN, epilogue_op, zero rows."
import pytest
import torch
from calls import FORMATS, K, L, M, N, bf16, blockscaled

from dglu import grouped_gemm_dglu_wrapper_sm100, reference
from dglu.layout import dense_b
from dglu.quant import dequantize, sf_physical, unpack_sf, unpack_sf_col

LIVE = 768  # calls.COUNTS fill 768 of 1024 rows


def run(call, **kw): return grouped_gemm_dglu_wrapper_sm100(**call | kw)


def test_an_empty_expert_has_zero_dbias_and_amax():
    out = run(blockscaled("nvfp4"), generate_dbias=True)
    assert not out["dbias_tensor"][1].any() and not out["amax_tensor"][1].any()
    assert out["dbias_tensor"][0].any() and (out["amax_tensor"][[0, 2]] > 0).all()


@pytest.mark.parametrize("family", ["bf16", *FORMATS])
def test_zero_rows_is_a_valid_call(family):
    call = bf16() if family == "bf16" else blockscaled(family)
    for key in ("a_tensor", "c_tensor", "prob_tensor", "dprob_tensor"): call[key] = call[key][:0].clone()
    call["padded_offsets"] = torch.zeros(L, dtype=torch.int32)
    if family != "bf16": call["sfa_tensor"] = call["sfa_tensor"].view(torch.uint8)[:, :, :0].clone().view(call["sfa_tensor"].dtype)
    out = run(call, generate_dbias=True)
    assert out["d_row_tensor"].shape == (0, 2 * N, 1) and not out["dbias_tensor"].any() and out["dprob_tensor"].shape == (0, 1, 1)


@pytest.mark.parametrize("ends", [(0, 0, 0), (0, 0, M), (M, M, M), (256, 256, 256), (0, 512, 512)], ids=str)
def test_experts_without_rows_anywhere(ends):
    call = bf16(padded_offsets=torch.tensor(ends, dtype=torch.int32))
    out = run(call, generate_dbias=True)
    starts = (0, *ends[:-1])
    for e, (lo, hi) in enumerate(zip(starts, ends)):
        alone = bf16(padded_offsets=torch.tensor([hi - lo], dtype=torch.int32), b_tensor=call["b_tensor"][..., e:e + 1],
                     alpha_tensor=call["alpha_tensor"][e:e + 1], beta_tensor=call["beta_tensor"][e:e + 1])
        for key in ("a_tensor", "c_tensor", "prob_tensor"): alone[key] = call[key][lo:hi].clone()
        alone["dprob_tensor"] = torch.zeros(hi - lo, 1, 1)
        want = run(alone, generate_dbias=True)
        assert torch.equal(out["d_row_tensor"][lo:hi], want["d_row_tensor"]) and torch.equal(out["dbias_tensor"][e], want["dbias_tensor"][0])
        assert torch.equal(out["dprob_tensor"][lo:hi], want["dprob_tensor"])
    assert not out["dprob_tensor"][ends[-1]:].any()


@pytest.mark.parametrize("family", ["bf16", "mxfp8", "nvfp4"])
def test_chunks_do_not_show(monkeypatch, family):
    make = bf16 if family == "bf16" else lambda: blockscaled(family)
    whole = run(make(), generate_dbias=True)
    monkeypatch.setattr(reference, "CHUNK", 256)
    cut = run(make(), generate_dbias=True)
    for key, x in whole.items():
        if x is None: continue
        y = cut[key]
        if key.startswith("d_"): x, y = x[:LIVE], y[:LIVE]
        # sums over rows are taken in another order: one BF16 step of dbias at most
        if key == "dbias_tensor": torch.testing.assert_close(x, y, rtol=2**-7, atol=0)
        else: torch.testing.assert_close(x.float() if x.dtype.itemsize > 1 else x.view(torch.uint8), y.float() if y.dtype.itemsize > 1 else y.view(torch.uint8), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["a_tensor", "c_tensor", "prob_tensor"])
def test_nan_stays_in_its_row_and_shows_in_amax(where):
    call = blockscaled("nvfp4")
    if where == "a_tensor": call["sfa_tensor"].view(torch.uint8)[5, 0, 0, 0, 0, 0] = 0x7F  # an E4M3 NaN scale: row 5, block 0
    else: call[where][5] = torch.nan
    out = run(call, generate_dbias=True)
    bad = out["d_row_tensor"][:LIVE].isnan().any(1).flatten().nonzero().flatten().tolist()
    assert bad == [5]
    assert out["amax_tensor"][0].isnan().all() and out["amax_tensor"][2].isfinite().all()
    assert out["dbias_tensor"][0].isnan().any() and out["dbias_tensor"][2].isfinite().all()


def test_nan_is_confined_to_its_scale_block():
    call = blockscaled("mxfp8")
    call["c_tensor"][40, 3] = torch.nan  # gate column 3 of block 0: dgate and dup of that column, both NaN
    out = run(call)
    row = unpack_sf(out["sfd_row_tensor"].view(torch.uint8), M, 2 * N // 32)[0]
    col = unpack_sf_col(out["sfd_col_tensor"].view(torch.uint8), M // 32, 2 * N, None, sf_vec_size=32)
    assert (row[:LIVE] == 0xFF).nonzero().tolist() == [[40, 0], [40, 1]]  # block 0 is the gate's, block 1 the up's
    assert (col[:LIVE // 32] == 0xFF).nonzero().tolist() == [[1, 3], [1, 35]]


def test_epilogue_op_acts_before_quantisation_amax_and_dbias():
    plain = run(blockscaled("nvfp4", d_dtype=torch.float32), generate_dbias=True)
    for op, f in (("identity", lambda x: x), ("relu", torch.relu), ("srelu", lambda x: x.relu() ** 2)):
        got = run(blockscaled("nvfp4", d_dtype=torch.float32, epilogue_op=op), generate_dbias=True)
        want = f(plain["d_row_tensor"][:LIVE])
        assert torch.equal(got["d_row_tensor"][:LIVE], want)
        sums = torch.stack([want[:256].double().sum(0), want[256:].double().sum(0)])
        torch.testing.assert_close(got["dbias_tensor"][[0, 2]].double(), sums, rtol=2**-8, atol=2**-8 * 1e-3 * want.abs().max().item())
        assert torch.equal(got["dprob_tensor"], plain["dprob_tensor"])  # dprob is not D
    half = run(blockscaled("nvfp4", epilogue_op="relu"))
    for i, cols in enumerate((slice(0, 32), slice(32, 64))):
        blocks = plain["d_row_tensor"][:256, :, 0].view(256, -1, 64)[..., cols].relu()
        assert half["amax_tensor"][0, i, 0] == blocks.amax()


def test_spare_rows_keep_their_bytes():
    poison = dict(d=torch.full((M, 2 * N, 1), 0x55, dtype=torch.uint8).view(torch.float8_e4m3fn))
    call = blockscaled("mxfp8")
    out = run(call)
    from dglu import GroupedGemmDgluSm100
    tensors = {k: v for k, v in call.items() if torch.is_tensor(v)}
    outs = dict(d_row=poison["d"].clone(), d_col=poison["d"].clone(), sfd_row=torch.empty_like(out["sfd_row_tensor"]), sfd_col=torch.empty_like(out["sfd_col_tensor"]))
    for key in ("sfd_row", "sfd_col"): outs[key].view(torch.uint8).fill_(0x55)
    op = GroupedGemmDgluSm100(**{"sample_" + k.removesuffix("_tensor"): v for k, v in tensors.items()}, **{"sample_" + k: v for k, v in outs.items()}, sf_vec_size=32)
    op.compile()
    op.execute(**tensors | {"dprob_tensor": torch.zeros(M, 1, 1)}, **{k + "_tensor": v for k, v in outs.items()})
    for key in ("d_row", "d_col"): assert (outs[key].view(torch.uint8)[LIVE:] == 0x55).all() and torch.equal(outs[key].view(torch.uint8)[:LIVE], out[key + "_tensor"].view(torch.uint8)[:LIVE])
    row, col = sf_physical(outs["sfd_row"]).view(torch.uint8), sf_physical(outs["sfd_col"]).view(torch.uint8)
    assert (row[:, LIVE // 128:] == 0x55).all() and (col[:, :, LIVE // 128:] == 0x55).all()


def test_row_and_column_quantisation_stand_for_the_same_values():
    call = blockscaled("mxfp8", norm_const_tensor=torch.full((1,), 4.0))
    out = run(call)
    row = dequantize(out["d_row_tensor"][..., 0], unpack_sf(out["sfd_row_tensor"], M, 2 * N // 32)[0], sf_vec_size=32, norm_const=4.0)
    col = dequantize(out["d_col_tensor"][..., 0], unpack_sf_col(out["sfd_col_tensor"], M // 32, 2 * N, None, sf_vec_size=32), sf_vec_size=32, norm_const=4.0, dim=0)
    assert (row[:LIVE] - col[:LIVE]).norm() < 2**-3 * row[:LIVE].norm()  # each is within 2^-4 of the truth


def test_float64_accumulation_is_closer():
    call = bf16(d_dtype=torch.float32)
    from dglu.contract import Config, describe, meta_of
    t = {k.removesuffix("_tensor"): v for k, v in call.items() if torch.is_tensor(v)} | {"d_row": torch.zeros(M, 2 * N, 1, dtype=torch.float64)}
    metas = tuple((k, meta_of(v, k)) for k, v in t.items() if k != "d_row")
    p = describe(Config(), metas, d_dtype=torch.float32)
    rows = {}
    for acc in (torch.float32, torch.float64):
        t["d_row"] = torch.zeros(M, 2 * N, 1, dtype=torch.float64)
        import dataclasses
        reference.run(dataclasses.replace(p, d_dtype=torch.float64), t | {"dprob": torch.zeros(M, 1, 1, dtype=torch.float64)}, acc_dtype=acc)
        rows[acc] = t["d_row"][:LIVE]
    err = (rows[torch.float32] - rows[torch.float64]).norm() / rows[torch.float64].norm()
    assert 1e-9 < err < 1e-6


def test_one_token_one_expert_and_a_weight_of_one_block():
    call = dict(a_tensor=torch.zeros(256, 8, 1, dtype=torch.bfloat16), b_tensor=dense_b(torch.ones(1, 32, 8, dtype=torch.bfloat16)), sfa_tensor=None,
                c_tensor=torch.ones(256, 64, 1, dtype=torch.bfloat16), padded_offsets=torch.tensor([256], dtype=torch.int32), alpha_tensor=torch.tensor([2.0]),
                beta_tensor=torch.tensor([1.0]), prob_tensor=torch.full((256, 1, 1), 0.5))
    call["a_tensor"][0] = 1.0
    out = run(call, generate_dbias=True, d_dtype=torch.float32)
    s = torch.sigmoid(torch.tensor(1.0))
    r = 4.0 * 8  # alpha² · K
    want = torch.cat([(r * 0.5 * s * (1 + (1 - s))).expand(32), (r * 0.5 * s).expand(32)])
    torch.testing.assert_close(out["d_row_tensor"][0, :, 0], want, rtol=1e-6, atol=0)
    assert not out["d_row_tensor"][1:].any()
    torch.testing.assert_close(out["dprob_tensor"][0, 0, 0], 32 * r * s, rtol=1e-6, atol=0)
    assert torch.equal(out["dbias_tensor"][0, :, 0], want.bfloat16())


def test_k_of_this_file_is_a_whole_number_of_blocks():
    assert K % 32 == 0
