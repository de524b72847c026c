"The plain forms that people have give the contract's numbers, in the form that they came in."
import inspect

import pytest
import torch
from calls import FORMATS, L, M, N, bf16, blockscaled, nvfp4_d, quantised_activation

import dglu
from dglu import GroupedGemmDgluSm100, TupleDict, expert_pointers, grouped_gemm_dglu_wrapper_sm100, grouped_gemm_dsrelu_wrapper_sm100
from dglu.quant import sf_physical, sf_view


def same(x, y):
    "Equal bytes, whatever the form."
    if x is None or y is None: return x is y
    flat = [t.contiguous().view(torch.uint8).flatten() for t in (x, y)]
    return torch.equal(*flat)


def plain(call):
    "The same call in plain forms."
    out = dict(call)
    for key in ("a_tensor", "c_tensor"): out[key] = call[key][..., 0]
    out["b_tensor"] = call["b_tensor"].permute(2, 0, 1)
    for key in ("prob_tensor", "dprob_tensor"): out[key] = call[key].flatten().clone()
    for key in ("sfa_tensor", "sfb_tensor"):
        if call.get(key) is not None: out[key] = sf_physical(call[key])
    if call.get("norm_const_tensor") is not None: out["norm_const_tensor"] = call["norm_const_tensor"][0]
    return out


@pytest.mark.parametrize("family", ["bf16", *FORMATS])
def test_plain_forms_give_the_same_bytes(family):
    make = bf16 if family == "bf16" else lambda: blockscaled(family)
    want = grouped_gemm_dglu_wrapper_sm100(**make(), generate_dbias=True)
    got = grouped_gemm_dglu_wrapper_sm100(**plain(make()), generate_dbias=True)
    assert got["d_row_tensor"].shape == (M, 2 * N) and got["dprob_tensor"].shape == (M,) and got["dbias_tensor"].shape == (L, 2 * N)
    if want["amax_tensor"] is not None: assert got["amax_tensor"].shape == (L, 2)
    live = 768  # rows at and past the last offset are not written
    for key in ("d_row_tensor", "d_col_tensor"):
        if want[key] is not None: assert same(want[key][:live, :, 0], got[key][:live])
    for key in ("dprob_tensor", "dbias_tensor", "amax_tensor"): assert same(want[key], got[key]), key
    for key in ("sfd_row_tensor", "sfd_col_tensor"):
        assert want[key] is got[key] is None or same(sf_physical(want[key]), got[key]), key


def test_plain_forms_of_an_fp4_d():
    want, got = grouped_gemm_dglu_wrapper_sm100(**nvfp4_d()), grouped_gemm_dglu_wrapper_sm100(**plain(nvfp4_d()))
    assert got["d_row_tensor"].shape == (M, N) and got["d_col_tensor"].shape == (2 * N, M // 2) and got["amax_tensor"].shape == (L, 2)
    assert same(want["d_row_tensor"][:768], got["d_row_tensor"][:768]) and same(want["d_col_tensor"][:, :384], got["d_col_tensor"][:, :384])
    for key in ("amax_tensor", "dprob_tensor"): assert same(want[key], got[key])
    for key in ("sfd_row_tensor", "sfd_col_tensor"): assert got[key].dim() == 6 and same(sf_physical(want[key]), got[key])


@pytest.mark.parametrize("form", ["2-D and physical", "2-D and flat"])
@pytest.mark.parametrize("d", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_quantised_activation_in_a_plain_form_is_written_in_place(d, form):
    call = lambda: nvfp4_d() if d == torch.uint8 else blockscaled(d_dtype=d)  # noqa: E731
    want = quantised_activation(d, 0.3)
    grouped_gemm_dglu_wrapper_sm100(**call(), **want)
    mine = {key: sf_physical(x) if "_sf_" in key else x.clone() for key, x in quantised_activation(d, 0.3).items()}
    for key in mine:
        if key.endswith("_out"): mine[key] = mine[key][..., 0]
        if "_sf_" in key and form.endswith("flat"): mine[key] = mine[key].flatten()
    mine["activation_norm_const"] = mine["activation_norm_const"][0]
    grouped_gemm_dglu_wrapper_sm100(**plain(call()), **mine)
    for key, x in want.items():
        y = mine[key]
        if "_sf_" in key: y = sf_view(y.view(sf_physical(x).shape)) if y.dim() == 1 else sf_view(y)
        assert same(x, y.reshape(x.shape) if "_sf_" not in key else y), key
        assert x.view(torch.uint8).any(), key


def test_new_arguments_are_keyword_only():
    names = ["activation_col_out", "activation_sf_row", "activation_sf_col", "activation_norm_const"]
    for f in (grouped_gemm_dglu_wrapper_sm100, grouped_gemm_dsrelu_wrapper_sm100, GroupedGemmDgluSm100.execute, dglu.GroupedGemmDsreluSm100.execute):
        found = {k: p for k, p in inspect.signature(f).parameters.items() if k in names}
        assert list(found) == names and all(p.kind is p.KEYWORD_ONLY and p.default is None for p in found.values())
    for f in (GroupedGemmDgluSm100, dglu.GroupedGemmDsreluSm100):
        found = {k: p for k, p in inspect.signature(f).parameters.items() if k.removeprefix("sample_") in names}
        assert len(found) == 4 and all(p.kind is p.KEYWORD_ONLY and p.default is None for p in found.values())


def test_flat_scale_factors_come_back_flat():
    call = blockscaled()
    want = grouped_gemm_dglu_wrapper_sm100(**call)
    flat = {key: sf_physical(call[key]).flatten() for key in ("sfa_tensor", "sfb_tensor")}
    got = grouped_gemm_dglu_wrapper_sm100(**blockscaled() | flat)
    assert got["sfd_col_tensor"].dim() == 1 and same(got["sfd_col_tensor"], sf_physical(want["sfd_col_tensor"]))


def test_outputs_given_in_a_plain_form_are_written_in_place():
    out = torch.full((M, N), torch.nan)
    dprob = torch.full((M,), 2.0)
    got = grouped_gemm_dglu_wrapper_sm100(**plain(bf16()) | {"activation_out": out, "dprob_tensor": dprob})
    fresh = grouped_gemm_dglu_wrapper_sm100(**bf16())["dprob_tensor"].flatten()
    assert got["dprob_tensor"] is dprob and torch.allclose(dprob, fresh + 2.0)
    assert out[:768].isfinite().all() and out[768:].isnan().all()


def test_cube_weights_are_read_by_the_form_of_a():
    n = k = experts = 64
    gen = torch.Generator().manual_seed(0)
    w = torch.randn(experts, n, k, generator=gen).bfloat16()
    call = dict(c_tensor=torch.randn(256, 2 * n, generator=gen).bfloat16(), sfa_tensor=None, padded_offsets=torch.full((experts,), 256, dtype=torch.int32),
                alpha_tensor=torch.ones(experts), beta_tensor=torch.ones(experts), prob_tensor=torch.ones(256))
    a = torch.randn(256, k, generator=gen).bfloat16()
    as_plain = grouped_gemm_dglu_wrapper_sm100(a_tensor=a, b_tensor=w, **call)["d_row_tensor"]
    as_contract = grouped_gemm_dglu_wrapper_sm100(a_tensor=a[..., None], b_tensor=w.permute(1, 2, 0), **call | {"c_tensor": call["c_tensor"][..., None]})[0]
    assert same(as_plain, as_contract[..., 0])


@pytest.mark.parametrize("fmt", FORMATS)
def test_discrete_weights_give_the_dense_bytes(fmt):
    call = blockscaled(fmt)
    experts = [call["b_tensor"][..., e].contiguous() for e in range(L)]
    scales = [sf_physical(call["sfb_tensor"])[e].clone().view(-1, 512) for e in range(L)]
    loose = {k: v for k, v in call.items() if k not in ("b_tensor", "sfb_tensor")}
    want = grouped_gemm_dglu_wrapper_sm100(**call)
    got = grouped_gemm_dglu_wrapper_sm100(**loose | dict(b_ptrs=expert_pointers(experts), sfb_ptrs=expert_pointers(scales), n=N,
                                                         b_dtype=experts[0].dtype, dprob_tensor=torch.zeros(M, 1, 1)))
    assert same(want[0][:768], got[0][:768]) and same(want["dprob_tensor"], got["dprob_tensor"])


def test_single_group_takes_its_end_from_a():
    call = blockscaled("nvfp4")
    one = {"padded_offsets": torch.tensor([7], dtype=torch.int32), "alpha_tensor": call["alpha_tensor"][:1], "beta_tensor": call["beta_tensor"][:1],
           "b_tensor": call["b_tensor"][..., :1], "sfb_tensor": call["sfb_tensor"][..., :1]}
    got = grouped_gemm_dglu_wrapper_sm100(**call | one, use_single_group_runtime_offsets=True)
    want = grouped_gemm_dglu_wrapper_sm100(**blockscaled("nvfp4") | one | {"padded_offsets": torch.tensor([M], dtype=torch.int32)})
    assert same(got[0], want[0])


# TupleDict, signatures, cache -------------------------------------------------------------------------------------------

def test_tuple_dict():
    td = TupleDict(a=1, b=None, c=3)
    assert list(td) == [1, None, 3] and td[2] == 3 and td["b"] is None and len(td) == 3 and "a" in td and dict(td.items()) == {"a": 1, "b": None, "c": 3}
    for wrong in (3, -1):
        with pytest.raises(IndexError): td[wrong]
    with pytest.raises(KeyError): td["d"]


def test_argument_order_and_defaults_are_the_contracts():
    def positional(f): return [p for p in inspect.signature(f).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    wrapper, cls = positional(grouped_gemm_dglu_wrapper_sm100), positional(GroupedGemmDgluSm100)
    config = ["mma_tiler_mn", "cluster_shape_mn", "sf_vec_size", "vector_f32", "m_aligned", "discrete_col_sfd", "act_func"]
    assert [p.name for p in wrapper][:20] == [
        "a_tensor", "c_tensor", "sfa_tensor", "padded_offsets", "alpha_tensor", "beta_tensor", "prob_tensor", "dprob_tensor", "b_tensor", "sfb_tensor",
        "generate_dbias", "b_ptrs", "sfb_ptrs", "n", "b_dtype", "b_major", "norm_const_tensor", "acc_dtype", "d_dtype", "cd_major"]
    assert [p.name for p in wrapper][20:27] == config and wrapper[-1].name == "current_stream"
    assert [p.name for p in cls][:14] == [
        "sample_a", "sample_c", "sample_d_row", "sample_d_col", "sample_sfa", "sample_padded_offsets", "sample_alpha", "sample_beta", "sample_prob",
        "sample_dprob", "sample_b", "sample_sfb", "sample_dbias", "num_experts"]
    defaults = {p.name: p.default for p in cls}
    assert [p.name for p in cls][21:28] == config and defaults["linear_offset"] is None
    assert (defaults["geglu_alpha"], defaults["glu_clamp_max"], defaults["glu_clamp_min"], defaults["situ_beta1"], defaults["situ_beta2"]) == (1.702, 7.0, -7.0, 4.0, 25.0)


def test_return_order():
    names = ["d_row_tensor", "d_col_tensor", "dprob_tensor", "dbias_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"]
    assert list(grouped_gemm_dglu_wrapper_sm100(**bf16()).keys()) == names
    assert list(grouped_gemm_dsrelu_wrapper_sm100(**blockscaled(op="dsrelu")).keys()) == names


def test_cache_counts_kernels_not_rows():
    wrapper = dglu.grouped_gemm_dglu_wrapper_sm100
    wrapper.cache_clear()
    call = bf16()
    for rows in (1024, 768, 1024):
        cut = {k: v[:rows] for k, v in call.items() if k in ("a_tensor", "c_tensor", "prob_tensor", "dprob_tensor")}
        wrapper(**call | cut)
    assert (wrapper.cache_info().misses, wrapper.cache_info().hits) == (1, 2)
    wrapper(**call, generate_dbias=True)
    assert wrapper.cache_info().misses == 2


def test_results_are_bitwise_reproducible():
    one, two = (grouped_gemm_dglu_wrapper_sm100(**bf16(), generate_dbias=True, deterministic=True) for _ in range(2))
    assert all(same(x if x is None else x[:768], y if y is None else y[:768]) for x, y in zip(one, two))


def test_execute_takes_other_row_counts_and_refuses_other_types():
    call = bf16()
    named = {("sample_" + k.removesuffix("_tensor")): v for k, v in call.items()}
    op = GroupedGemmDgluSm100(**named, sample_d_row=torch.zeros(M, 2 * N, 1, dtype=torch.bfloat16), sample_d_col=None)
    with pytest.raises(RuntimeError, match="before compile"): op.execute(**call, d_row_tensor=torch.zeros(1), d_col_tensor=None)
    op.compile()
    cut = call | {k: v[:768].clone() for k, v in call.items() if k in ("a_tensor", "c_tensor", "prob_tensor", "dprob_tensor")}
    d = torch.full((768, 2 * N, 1), torch.nan, dtype=torch.bfloat16)
    op.execute(**cut, d_row_tensor=d, d_col_tensor=None, workspace=None)
    assert same(d, grouped_gemm_dglu_wrapper_sm100(**bf16())[0][:768])
    with pytest.raises(ValueError, match="c_dtype = torch.float32: must be torch.bfloat16"):
        op.execute(**cut | {"c_tensor": cut["c_tensor"].float()}, d_row_tensor=d, d_col_tensor=None)
    with pytest.raises(ValueError, match="d_row_tensor = None"): op.execute(**cut, d_row_tensor=None, d_col_tensor=None)
