"Every rule of the contract: one call that is accepted, one that is refused, and what the refusal says."
import math

import pytest
import torch
from calls import COUNTS, FORMATS, K, L, M, N, bf16, blockscaled, nvfp4_d, quantised_activation

from dglu import GroupedGemmDgluSm100, expert_pointers, grouped_gemm_dglu_wrapper_sm100, grouped_gemm_dsrelu_wrapper_sm100
from dglu.layout import dense_b
from dglu.quant import E4M3, empty_sf, pack_sf, quantize, sf_physical


def dglu(call): return grouped_gemm_dglu_wrapper_sm100(**call)


def dsrelu(call): return grouped_gemm_dsrelu_wrapper_sm100(**call)


def discrete(dtype=torch.bfloat16, **changes):
    experts = [torch.zeros(N, K, dtype=torch.float32).to(dtype) for _ in range(L)]
    return bf16(b_tensor=None, b_ptrs=expert_pointers(experts), n=N, b_dtype=dtype) | changes


def no_b(call): return {k: v for k, v in call.items() if k not in ("b_tensor", "sfb_tensor")}


def zeros(*shape, dtype=torch.float32): return torch.zeros(*shape, dtype=dtype)


def inference_zeros(*shape):
    with torch.inference_mode(): return zeros(*shape)


F8, U8, BF = torch.float8_e4m3fn, torch.uint8, torch.bfloat16

ACCEPTED = {
    "bf16 dense K-major": bf16(),
    "bf16 dense N-major": bf16(b_tensor=zeros(L, K, N, dtype=BF).permute(2, 1, 0)),
    "bf16 discrete": discrete(),
    "bf16 discrete N-major": discrete(b_ptrs=expert_pointers([zeros(K, N, dtype=BF).T for _ in range(L)]), b_major="n"),
    "bf16 C in FP32": bf16(c_tensor=zeros(M, 2 * N, 1)),
    "bf16 C in FP16": bf16(c_tensor=zeros(M, 2 * N, 1, dtype=torch.float16)),
    "bf16 D in FP32": bf16(d_dtype=torch.float32),
    "bf16 D in FP16": bf16(d_dtype=torch.float16),
    "bf16 tile 128 x 96": bf16(mma_tiler_mn=(128, 96)),
    "bf16 tile as a list": bf16(mma_tiler_mn=[128, 96]),
    "bf16 cluster (4, 4)": bf16(cluster_shape_mn=(4, 4)),
    "bf16 cluster (16, 1)": bf16(cluster_shape_mn=(16, 1)),
    "bf16 dgeglu with other bounds": bf16(act_func="dgeglu", glu_clamp_max=10.0, glu_clamp_min=-10.0, geglu_alpha=1.0, linear_offset=0.0, geglu_filter="mask"),
    "dgeglu with no bound": bf16(act_func="dgeglu", glu_clamp_max=math.inf, glu_clamp_min=-math.inf, geglu_filter="mask"),
    "offset 0 with dswiglu": bf16(linear_offset=0.0),
    "no dprob": bf16(dprob_tensor=None),
    "dynamic scheduler": bf16(use_dynamic_sched=True, vector_f32=True),
    "mxfp8": blockscaled("mxfp8"),
    "mxfp8 E5M2 D": blockscaled("mxfp8", d_dtype=torch.float8_e5m2),
    "mxfp8 E5M2 operands": blockscaled("mxfp8_e5m2"),
    "mxfp8 N-major": blockscaled("mxfp8", b_tensor=torch.zeros(L, K, N, dtype=U8).view(F8).permute(2, 1, 0)),
    "mxfp8 FP8 C": blockscaled("mxfp8", c_tensor=zeros(M, 2 * N, 1).to(F8)),
    "mxfp8 without prob": blockscaled("mxfp8", prob_tensor=None, dprob_tensor=None),
    "nvfp4 BF16 D": blockscaled("nvfp4"),
    "nvfp4 FP16 D": blockscaled("nvfp4", d_dtype=torch.float16),
    "nvfp4 FP32 D with dbias": blockscaled("nvfp4", d_dtype=torch.float32, generate_dbias=True),
    "nvfp4 as float4_e2m1fn_x2": blockscaled("nvfp4", a_tensor=zeros(M, K // 2, 1, dtype=U8).view(torch.float4_e2m1fn_x2),
                                             b_tensor=dense_b(zeros(L, N, K // 2, dtype=U8)).view(torch.float4_e2m1fn_x2)),
    "nvfp4 NVFP4 D": nvfp4_d(),
    "nvfp4 NVFP4 D as float4_e2m1fn_x2": nvfp4_d(d_dtype=torch.float4_e2m1fn_x2, generate_dbias=True, epilogue_op="relu", vector_f32=True),
    "nvfp4 NVFP4 D without prob": nvfp4_d(prob_tensor=None, dprob_tensor=None, discrete_col_sfd=True),
    "nvfp4 NVFP4 D and activation": nvfp4_d(**quantised_activation()),
    "nvfp4 NVFP4 D and FP32 activation": nvfp4_d(activation_out=zeros(M, N, 1)),
    "mxfp8 activation": blockscaled("mxfp8", **quantised_activation(F8)),
    "mxfp8 E5M2 D and activation": blockscaled("mxfp8", d_dtype=torch.float8_e5m2, **quantised_activation(torch.float8_e5m2)),
    "mxfp4 FP32 D": blockscaled("mxfp4", d_dtype=torch.float32),
    "mxfp4 blocks of 16": blockscaled("mxfp4_16"),
    "dsituglu": blockscaled("mxfp8", act_func="dsituglu", situ_beta1=2.0),
    "epilogue_op": blockscaled("mxfp8", epilogue_op="srelu"),
    "dgeglu needs no beta": blockscaled("mxfp8", act_func="dgeglu", beta_tensor=None),
    "discrete_col_sfd": blockscaled("mxfp8", discrete_col_sfd=True),
    "tile 128": blockscaled("mxfp8", mma_tiler_mn=(128, 256)),
    "cluster (4, 4)": blockscaled("mxfp8", cluster_shape_mn=(4, 4)),
}


@pytest.mark.parametrize("call", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(call):
    out = dglu(call)
    fp4 = call.get("d_dtype") in (U8, torch.float4_e2m1fn_x2)
    assert out["d_row_tensor"].shape == (M, N if fp4 else 2 * N, 1) and out["d_row_tensor"].dtype == call.get("d_dtype", BF)
    if fp4: assert out["d_col_tensor"].shape == (2 * N, M // 2, 1) and out["amax_tensor"].shape == (L, 2, 1) and out["sfd_row_tensor"].dtype == F8


R = {}  # name -> (call, argument, found, allowed, remedy)
R["mixed families"] = (bf16(b_tensor=zeros(N, K, L).to(F8)), "types of A and B", "float8_e4m3fn", "one matching", "same FP8")
R["FP32 operands"] = (bf16(a_tensor=zeros(M, K, 1)), "types of A and B", "torch.float32", "BF16 and BF16", "Use BF16")
R["A of rank 4"] = (bf16(a_tensor=zeros(M, K, 1, 1, dtype=BF)), "a_tensor", str((M, K, 1, 1)), "rank 3", "as_rank3")
R["A with trailing 2"] = (bf16(a_tensor=zeros(M, K, 2, dtype=BF)), "a_tensor", str((M, K, 2)), "last size of 1", "as_rank3")
R["A not contiguous"] = (bf16(a_tensor=zeros(K, M, dtype=BF).T[..., None]), "a_tensor.stride()", "(1, 1024, 1)", "contiguous", ".contiguous()")
R["K of B"] = (bf16(b_tensor=dense_b(zeros(L, N, 64, dtype=BF))), "K of B", "64", "128", "share K")
R["B in no major"] = (bf16(b_tensor=zeros(N, K, L, dtype=BF)), "b_tensor.stride", "(384, 3, 1)", "K-major or N-major", "dense_b")
R["L of B"] = (bf16(b_tensor=dense_b(zeros(2, N, K, dtype=BF))), "b_tensor", str((N, K, 2)), "L = 3", "dense_b")
R["N not a multiple of 32"] = (bf16(b_tensor=dense_b(zeros(L, 48, K, dtype=BF)), c_tensor=zeros(M, 96, 1, dtype=BF)), "N", "48", "multiple of 32", "Pad B")
R["K not 16 bytes"] = (bf16(a_tensor=zeros(M, 12, 1, dtype=BF), b_tensor=dense_b(zeros(L, N, 12, dtype=BF))), "K", "12", "multiple of 8", "Pad A and B")
R["M not a multiple of 256"] = (bf16(a_tensor=zeros(300, K, 1, dtype=BF), c_tensor=zeros(300, 2 * N, 1, dtype=BF)), "M", "300", "multiple of 256", "pad_groups")
R["C of another M"] = (bf16(c_tensor=zeros(512, 2 * N, 1, dtype=BF)), "c_tensor.shape", "(512, 128, 1)", "(1024, 128, 1)", "follow from")
R["C of another N"] = (bf16(c_tensor=zeros(M, N, 1, dtype=BF)), "c_tensor.shape", "(1024, 64, 1)", "(1024, 128, 1)", "follow from")
R["C in FP8 on BF16"] = (bf16(c_tensor=zeros(M, 2 * N, 1).to(F8)), "c_tensor.dtype", "float8_e4m3fn", "bfloat16", ".to(dtype)")
R["D in FP8 on BF16"] = (bf16(d_dtype=F8), "D's type", "float8_e4m3fn", "BF16, FP16 or FP32", "d_dtype")
R["offsets int64"] = (bf16(padded_offsets=torch.tensor([256, 256, 768])), "padded_offsets.dtype", "int64", "int32", ".to(dtype)")
R["offsets of rank 2"] = (bf16(padded_offsets=torch.tensor([[256], [256], [768]], dtype=torch.int32)), "padded_offsets.shape", "(3, 1)", "(3,)", "follow from")
R["offset 700"] = (bf16(padded_offsets=torch.tensor([256, 256, 700], dtype=torch.int32)), "padded_offsets[2]", "700", "multiple of 256", "pad_groups")
R["offset past M"] = (bf16(padded_offsets=torch.tensor([256, 256, 1280], dtype=torch.int32)), "padded_offsets[2]", "1280", "at most M = 1024", "rows of A")
R["offsets decrease"] = (bf16(padded_offsets=torch.tensor([512, 256, 768], dtype=torch.int32)), "padded_offsets[1]", "256", "at least 512", "group_offsets")
R["offset negative"] = (bf16(padded_offsets=torch.tensor([-256, 256, 768], dtype=torch.int32)), "padded_offsets[0]", "-256", "at least 0", "group_offsets")
R["no experts"] = (bf16(padded_offsets=zeros(0, dtype=torch.int32), b_tensor=zeros(N, K, 0, dtype=BF), alpha_tensor=zeros(0), beta_tensor=zeros(0)), "number of experts", "0", "between 1 and 1024", "padded_offsets")
R["alpha float64"] = (bf16(alpha_tensor=zeros(L, dtype=torch.float64)), "alpha_tensor.dtype", "float64", "float32", ".to(dtype)")
R["alpha of another L"] = (bf16(alpha_tensor=zeros(2)), "alpha_tensor.shape", "(2,)", "(3,)", "follow from")
R["alpha missing"] = (bf16(alpha_tensor=None), "alpha_tensor", "None", "shape (3,)", "table of tensors")
R["alpha on another device"] = (bf16(alpha_tensor=torch.empty(L, device="meta")), "alpha_tensor.device", "meta", "cpu", ".to(device)")
R["beta missing"] = (bf16(beta_tensor=None), "beta_tensor", "None", "shape (3,)", "table of tensors")
R["beta BF16"] = (bf16(beta_tensor=zeros(L, dtype=BF)), "beta_tensor.dtype", "bfloat16", "float32", ".to(dtype)")
R["prob missing on BF16"] = (bf16(prob_tensor=None, dprob_tensor=None), "prob_tensor", "None", "a tensor", "table of tensors")
R["prob (M, 1)"] = (bf16(prob_tensor=zeros(M, 1)), "prob_tensor.shape", "(1024, 1)", "(1024, 1, 1)", "follow from")
R["prob BF16"] = (bf16(prob_tensor=zeros(M, 1, 1, dtype=BF)), "prob_tensor.dtype", "bfloat16", "float32", ".to(dtype)")
R["dprob of another M"] = (bf16(dprob_tensor=zeros(512, 1, 1)), "dprob_tensor.shape", "(512, 1, 1)", "(1024, 1, 1)", "follow from")
R["dprob without prob"] = (blockscaled(prob_tensor=None), "dprob_tensor", "a tensor", "None without prob_tensor", "prob_tensor too")
R["misaligned C"] = (bf16(c_tensor=zeros(M * 2 * N + 1, dtype=BF)[1:].view(M, 2 * N, 1)), "c_tensor.data_ptr()", "16-byte", "multiple of 16", ".clone()")
R["both weights"] = (discrete() | {"b_tensor": bf16()["b_tensor"]}, "weights", "both forms", "one form", "b_ptrs with n")
R["no weights"] = (no_b(bf16()), "weights", "neither form", "one form", "b_tensor (dense)")
R["discrete without n"] = (discrete(n=None), "n", "None", "N of the matrices", "n=N")
R["discrete without b_dtype"] = (discrete(b_dtype=None), "b_dtype", "None", "torch.dtype", "what type")
R["b_major"] = (discrete(b_major="m"), "b_major", "'m'", "'k', 'n'", "contiguous")
R["b_ptrs int32"] = (discrete(b_ptrs=zeros(L, dtype=torch.int32)), "b_ptrs.dtype", "int32", "int64", ".to(dtype)")
R["b_ptrs null"] = (discrete(b_ptrs=zeros(L, dtype=torch.int64)), "b_ptrs[0]", "0x0", "address", "expert_pointers")
R["sfa with BF16"] = (bf16(sfa_tensor=pack_sf(zeros(M, 4, dtype=U8))), "sfa_tensor", "a tensor", "None with BF16", "no scale factors")
R["norm_const with BF16"] = (bf16(norm_const_tensor=torch.ones(1)), "norm_const_tensor", "a tensor", "None with BF16", "no scale factors")
R["sf_vec_size with BF16"] = (bf16(sf_vec_size=32), "sf_vec_size", "32", "16 with BF16", "no scale control")
R["discrete_col_sfd with BF16"] = (bf16(discrete_col_sfd=True), "discrete_col_sfd", "True", "False with BF16", "no scale control")
R["epilogue_op with BF16"] = (bf16(epilogue_op="relu"), "epilogue_op", "'relu'", "None with BF16", "no epilogue_op")
R["single group with BF16"] = (bf16(use_single_group_runtime_offsets=True), "use_single_group_runtime_offsets", "True", "False with BF16", "block-scaled")
R["dsituglu with BF16"] = (bf16(act_func="dsituglu"), "act_func", "'dsituglu'", "'dswiglu' or 'dgeglu'", "block-scaled only")
R["act_func"] = (bf16(act_func="swiglu"), "act_func", "'swiglu'", "'dswiglu', 'dgeglu', 'dsituglu'", "dgeglu")
R["acc_dtype"] = (bf16(acc_dtype=BF), "acc_dtype", "bfloat16", "float32", "accumulate")
R["m_aligned"] = (bf16(m_aligned=128), "m_aligned", "128", "256", "pad_groups")
R["cd_major"] = (bf16(cd_major="m"), "cd_major", "'m'", "'n'", "N-major")
R["epilogue_op name"] = (blockscaled(epilogue_op="gelu"), "epilogue_op", "'gelu'", "'srelu'", "each element of D")
R["sf_vec_size"] = (blockscaled(sf_vec_size=64), "sf_vec_size", "64", "16, 32", "MXFP8")
R["vector_f32 an int"] = (bf16(vector_f32=1), "vector_f32", "1", "False, True", "bool")
R["geglu_filter"] = (bf16(act_func="dgeglu", geglu_filter="masks"), "geglu_filter", "'masks'", "'mask', 'value'", "derivative")
R["backend"] = (bf16(backend="cuda"), "backend", "'cuda'", "'reference'", "dglu info")
R["tile M"] = (bf16(mma_tiler_mn=(64, 256)), "mma_tiler_mn", "(64, 256)", "TILE_M 128 or 256", "default")
R["tile N on BF16"] = (bf16(mma_tiler_mn=(128, 48)), "mma_tiler_mn", "(128, 48)", "TILE_N 32 or 64", "default")
R["tile N block-scaled"] = (blockscaled(mma_tiler_mn=(128, 128)), "mma_tiler_mn", "(128, 128)", "TILE_N 256", "default")
R["tile not a pair"] = (bf16(mma_tiler_mn=(256,)), "mma_tiler_mn", "(256,)", "a pair of ints", "default")
R["cluster 3"] = (bf16(cluster_shape_mn=(2, 3)), "cluster_shape_mn", "(2, 3)", "powers of two", "None")
R["cluster 32"] = (bf16(cluster_shape_mn=(32, 1)), "cluster_shape_mn", "(32, 1)", "at most 16", "None")
R["cluster side 8 block-scaled"] = (blockscaled(cluster_shape_mn=(8, 1)), "cluster_shape_mn", "(8, 1)", "at most 4", "None")
R["cluster odd at 256"] = (bf16(cluster_shape_mn=(1, 1)), "cluster_shape_mn", "(1, 1)", "even", "(2, 1)")
R["alpha NaN"] = (bf16(act_func="dgeglu", geglu_alpha=math.nan), "geglu_alpha", "nan", "positive finite", "1.702")
R["alpha 0"] = (bf16(act_func="dgeglu", geglu_alpha=0.0), "geglu_alpha", "0.0", "positive finite", "1.702")
R["clamps crossed"] = (bf16(act_func="dgeglu", glu_clamp_max=-8.0), "glu_clamp_min", "-7.0", "not below", "-8.0")
R["clamp NaN"] = (bf16(act_func="dgeglu", glu_clamp_min=math.nan), "glu_clamp_min", "nan", "number", "inf")
R["offset infinite"] = (bf16(act_func="dgeglu", linear_offset=math.inf), "linear_offset", "inf", "finite", "1.0")
R["beta1 0"] = (blockscaled(act_func="dsituglu", situ_beta1=0.0), "situ_beta1", "0.0", "positive finite", "4.0")
R["beta2 negative"] = (blockscaled(act_func="dsituglu", situ_beta2=-1.0), "situ_beta2", "-1.0", "positive finite", "25.0")
R["clamp that dswiglu ignores"] = (bf16(glu_clamp_max=10.0), "glu_clamp_max", "10.0", "default (7.0)", "'dgeglu'")
R["beta1 that dgeglu ignores"] = (blockscaled(act_func="dgeglu", situ_beta1=2.0), "situ_beta1", "2.0", "default (4.0)", "'dsituglu'")
R["offset that dswiglu ignores"] = (bf16(linear_offset=1.0), "linear_offset", "1.0", "default (None)", "'dgeglu'")
R["FP8 without sfa"] = (blockscaled(sfa_tensor=None), "sfa_tensor", "None", "a tensor", "table of tensors")
R["FP8 without sfb"] = (blockscaled(sfb_tensor=None), "sfb_tensor", "None", "shape (32, 4, 1", "table of tensors")
R["scale dtype"] = (blockscaled(sfa_tensor=pack_sf(zeros(M, 4, dtype=U8))), "scale factors' type", "uint8", "float8_e8m0fnu", "quantize")
R["scale dtypes differ"] = (blockscaled("nvfp4", sfb_tensor=pack_sf(zeros(L, N, 8, dtype=U8).view(torch.float8_e8m0fnu))), "sfb_tensor.dtype", "float8_e8m0fnu", "float8_e4m3fn", ".to(dtype)")
R["E4M3 scales with 32"] = (blockscaled("nvfp4", sf_vec_size=32), "sf_vec_size", "32", "16 with E4M3", "E8M0")
R["FP8 with 16"] = (blockscaled(sf_vec_size=16), "sf_vec_size", "16", "32 with FP8", "MXFP8")
R["FP8 with BF16 D"] = (blockscaled(d_dtype=BF), "D's type", "bfloat16", "float8_e4m3fn", "d_dtype")
R["FP4 with FP8 D"] = (blockscaled("nvfp4", d_dtype=F8, norm_const_tensor=torch.ones(1)), "D's type", "float8_e4m3fn", "bfloat16", "d_dtype")
R["FP8 C with vector_f32"] = (blockscaled(c_tensor=zeros(M, 2 * N, 1).to(F8), vector_f32=True), "vector_f32", "True", "False with an FP8 C", "Packed")
R["FP4 N-major"] = (blockscaled("nvfp4", b_tensor=zeros(L, K // 2, N, dtype=U8).permute(2, 1, 0)), "b_major", "n", "'k' for FP4", "share a byte")
R["A and B differ"] = (blockscaled(b_tensor=dense_b(zeros(L, N, K, dtype=U8).view(torch.float8_e5m2))), "types of A and B", "float8_e5m2", "one matching", "same FP8")
R["FP8 D without norm_const"] = (blockscaled(norm_const_tensor=None), "norm_const_tensor", "None", "shape (1,)", "torch.ones(1)")
R["norm_const 0"] = (blockscaled(norm_const_tensor=zeros(1)), "norm_const_tensor", "0.0", "positive", "torch.ones(1)")
R["norm_const infinite"] = (blockscaled(norm_const_tensor=torch.full((1,), math.inf)), "norm_const_tensor", "inf", "finite", "torch.ones(1)")
R["norm_const of two"] = (blockscaled(norm_const_tensor=torch.ones(2)), "norm_const_tensor.shape", "(2,)", "(1,)", "follow from")
R["three experts, single group"] = (blockscaled(use_single_group_runtime_offsets=True), "use_single_group_runtime_offsets", "True", "3 experts", "one expert")
R["sfa of another shape"] = (blockscaled(sfa_tensor=empty_sf(M, 256, 32, dtype=torch.float8_e8m0fnu)), "sfa_tensor.shape", "(32, 4, 8, 4, 2, 1)", "(32, 4, 8, 4, 1, 1)", "follow from")
R["sfa contiguous"] = (blockscaled(sfa_tensor=blockscaled()["sfa_tensor"].view(U8).contiguous().view(torch.float8_e8m0fnu)), "sfa_tensor.stride", "(128, 32, 4, 1", "atom", "pack_sf")
R["tile an int"] = (bf16(mma_tiler_mn=256), "mma_tiler_mn", "256", "a pair of ints", "default")
R["n of another size"] = (bf16(n=999), "n", "999", "64, as b_tensor is", "dense weights")
R["b_dtype of another type"] = (bf16(b_dtype=F8), "b_dtype", "float8_e4m3fn", "bfloat16, as b_tensor is", "dense weights")
R["n a string"] = (discrete(n="32"), "n", "'32'", "two ints", "how large")
R["sfb_ptrs with dense weights"] = (blockscaled(sfb_ptrs=zeros(L, dtype=torch.int64)), "sfb_ptrs", "a tensor", "None, as the weights are dense", "Drop it")
R["generate_dbias a tensor"] = (bf16(generate_dbias=torch.tensor(True)), "generate_dbias", "tensor(True)", "False, True", "bool")
R["validate a string"] = (bf16(validate="yes"), "validate", "'yes'", "None, True, False", "free")
R["half experts as BF16"] = (discrete(b_ptrs=expert_pointers([zeros(N, K, dtype=torch.float16) for _ in range(L)])), "ptrs[0]", "float16", "bfloat16", "convert")
R["transposed experts"] = (discrete(b_ptrs=expert_pointers([zeros(K, N, dtype=BF) for _ in range(L)])), "ptrs[0]", str((K, N)), str((N, K)), "n and K")
R["N-major experts read K-major"] = (discrete(b_ptrs=expert_pointers([zeros(K, N, dtype=BF).T for _ in range(L)])), "ptrs[0]", "(1, 64)", "'k'", "other major")
R["output made in inference mode"] = (bf16(dprob_tensor=inference_zeros(M, 1, 1)), "dprob_tensor", "inference mode", "can be written", ".clone()")
R["alias D over C"] = (bf16(dprob_tensor=(shared := zeros(M, 1, 1)), prob_tensor=shared), "dprob_tensor", "prob_tensor uses too", "memory of its own", "Allocate")
R["activation_out in FP8"] = (bf16(activation_out=zeros(M, N, 1).to(F8)), "activation_out.dtype", "float8_e4m3fn", "bfloat16", ".to(dtype)")
R["FP4 D with MXFP4"] = (blockscaled("mxfp4_16", d_dtype=U8, norm_const_tensor=torch.ones(1)), "D's type", "uint8", "bfloat16", "E4M3 scale factors, sf_vec_size = 16")
R["FP4 D with MXFP8"] = (blockscaled(d_dtype=U8), "D's type", "uint8", "float8_e4m3fn", "needs dGLU and NVFP4 operands")
R["FP4 D with BF16"] = (bf16(d_dtype=U8), "D's type", "uint8", "BF16, FP16 or FP32", "d_dtype")
R["FP4 D without norm_const"] = (nvfp4_d(norm_const_tensor=None), "norm_const_tensor", "None", "shape (1,)", "torch.ones(1)")
R["FP4 D, norm_const negative"] = (nvfp4_d(norm_const_tensor=torch.tensor([-1.0])), "norm_const_tensor", "-1.0", "positive", "torch.ones(1)")
R["FP4 D, C in FP8, vector_f32"] = (nvfp4_d(c_tensor=zeros(M, 2 * N, 1).to(F8), vector_f32=True), "vector_f32", "True", "False with an FP8 C", "Packed")
R["activation, four of five"] = (nvfp4_d(**quantised_activation() | {"activation_sf_col": None}), "activation_sf_col", "None", "a tensor where the activation", "activation_out alone")
R["activation without activation_out"] = (nvfp4_d(**quantised_activation() | {"activation_out": None}), "activation_out", "None", "a tensor where the activation", "activation_out alone")
R["activation of another type than D"] = (nvfp4_d(**quantised_activation(F8)), "activation_out.shape", str((M, N, 1)), str((M, N // 2, 1)), "follow from")
R["activation E5M2, D E4M3"] = (blockscaled(**quantised_activation(torch.float8_e5m2)), "activation_out.dtype", "float8_e5m2", "float8_e4m3fn", ".to(dtype)")
R["activation quantised, D not"] = (blockscaled("nvfp4", **quantised_activation()), "activation_sf_row", "tensors", "None where D has no scale factors", "activation_out alone")
R["activation quantised with BF16"] = (bf16(**quantised_activation()), "activation_col_out", "a tensor", "None with BF16", "no scale factors")
R["activation_norm_const 0"] = (nvfp4_d(**quantised_activation(norm_const=0.0)), "activation_norm_const", "0.0", "positive", "torch.ones(1)")
R["activation_norm_const NaN"] = (blockscaled(**quantised_activation(F8, math.nan)), "activation_norm_const", "nan", "finite", "torch.ones(1)")
R["activation scale factors contiguous"] = (nvfp4_d(**quantised_activation() | {"activation_sf_row": quantised_activation()["activation_sf_row"].view(U8).contiguous().view(F8)}), "activation_sf_row.stride", "(", "atom", "pack_sf")
R["activation over D's scale factors"] = (nvfp4_d(**quantised_activation() | {"activation_col_out": (mine := zeros(M * N // 2, dtype=U8)).view(N, M // 2, 1), "activation_out": mine.view(M, N // 2, 1)}), "activation_", "uses too", "memory of its own", "Allocate")
R["activation_out of another N"] = (bf16(activation_out=zeros(M, 2 * N, 1)), "activation_out.shape", "(1024, 128, 1)", "(1024, 64, 1)", "follow from")


@pytest.mark.parametrize("name", R)
def test_refused(name):
    call, argument, found, allowed, remedy = R[name]
    poison = call.get("dprob_tensor")
    before = None if poison is None else poison.clone()
    with pytest.raises((ValueError, RuntimeError)) as error: dglu(call)
    message = str(error.value)
    assert error.type is ValueError
    for part in (argument, found, allowed, remedy): assert part in message, f"{part!r} is not in {message!r}"
    if before is not None: assert torch.equal(poison, before), "a refused call wrote into the caller's buffer"


def test_not_a_tensor():
    with pytest.raises(TypeError, match="a_tensor = list: must be a torch.Tensor"): dglu(bf16(a_tensor=[[1.0]]))
    with pytest.raises(TypeError, match="alpha_tensor = float"): dglu(bf16(alpha_tensor=1.0))


def test_not_implemented_error_for_nvfp4_float32_without_dbias():
    with pytest.raises(NotImplementedError, match=r"D's type = torch.float32: must be BF16 or FP16 .* Ask for dbias"):
        dglu(blockscaled("nvfp4", d_dtype=torch.float32))


def test_runtime_error_for_a_missing_backend():
    with pytest.raises(RuntimeError, match="backend = 'sm100' cannot run here.*capability 10.0.*dglu info"): dglu(bf16(backend="sm100"))


def test_1024_experts_are_accepted_and_1025_refused():
    def call(experts):
        return bf16(padded_offsets=torch.full((experts,), M, dtype=torch.int32), b_tensor=dense_b(zeros(experts, 32, 8, dtype=BF)),
                    a_tensor=zeros(M, 8, 1, dtype=BF), c_tensor=zeros(M, 64, 1, dtype=BF), alpha_tensor=zeros(experts), beta_tensor=zeros(experts))
    assert dglu(call(1024))[0].shape == (M, 64, 1)
    with pytest.raises(ValueError, match="number of experts = 1025"): dglu(call(1025))


def test_validation_can_be_turned_off_and_reads_offsets_by_default():
    call = blockscaled(norm_const_tensor=torch.tensor([-1.0]))
    with pytest.raises(ValueError, match="norm_const"): dglu(call)
    from dglu.contract import check_values
    check_values(None, {}, validate=False)


def test_a_call_is_refused_or_not_whatever_came_before_it():
    for first, second in ((True, 1), (1, True)):
        from dglu.api import make_config
        from dglu.contract import describe
        make_config.cache_clear(); describe.cache_clear()
        for value in (first, second):
            if value is True: dglu(bf16(vector_f32=True))
            else:
                with pytest.raises(ValueError, match="vector_f32 = 1"): dglu(bf16(vector_f32=1))


def test_outputs_carry_no_graph_and_autocast_changes_nothing():
    call = bf16(d_dtype=torch.float32)
    want = dglu(call)
    learns = bf16(d_dtype=torch.float32)
    for key in ("a_tensor", "b_tensor", "c_tensor", "prob_tensor", "alpha_tensor"): learns[key].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16): got = dglu(learns)
    for x, y in zip(want, got):
        assert x is y is None or not y.requires_grad and torch.equal(x[:768], y[:768])


def test_an_output_over_an_experts_memory_is_refused():
    memory = zeros(M * 2 * N, dtype=BF)
    experts = [memory[i * N * K:(i + 1) * N * K].view(N, K) for i in range(L)]
    with pytest.raises(ValueError, match=r"b_ptrs\[\d\] uses too|b_ptrs\[\d\] = memory"):
        dglu(discrete(b_ptrs=expert_pointers(experts), activation_out=memory[:M * N].view(M, N, 1)))


def test_meta_tensors_are_described_but_not_run():
    with pytest.raises(ValueError, match="tensors' device = meta"):
        dglu({k: v.to("meta") if torch.is_tensor(v) else v for k, v in bf16().items()})


# dsReLU ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("role", ["upstream", "preactivation"])
def test_dsrelu_accepted(fmt, role):
    out = dsrelu(blockscaled(fmt, op="dsrelu", c_role=role))
    assert out["d_row_tensor"].shape == (M, N, 1) and (out["amax_tensor"] is None) == fmt.startswith("mxfp8")


@pytest.mark.parametrize("changes, argument, allowed", [
    (dict(discrete_col_sfd=False), "discrete_col_sfd = False", "True for dsReLU"),
    (dict(c_role="c"), "c_role = 'c'", "'upstream', 'preactivation'"),
    (dict(c_tensor=zeros(M, 2 * N, 1)), "c_tensor.shape = (1024, 128, 1)", "(1024, 64, 1)"),
    (dict(mma_tiler_mn=(256, 64)), "mma_tiler_mn = (256, 64)", "TILE_N 128 or 256"),
    (dict(a_tensor=zeros(M, K, 1, dtype=BF), b_tensor=dense_b(zeros(L, N, K, dtype=BF))), "A's type = torch.bfloat16", "FP8 or FP4"),
])
def test_dsrelu_refused(changes, argument, allowed):
    with pytest.raises(ValueError) as error: dsrelu(blockscaled(op="dsrelu") | changes)
    assert argument in str(error.value) and allowed in str(error.value)


# The class -----------------------------------------------------------------------------------------------------------

def samples(**changes):
    call = bf16()
    named = {("sample_" + k.removesuffix("_tensor")): v for k, v in call.items()}
    return named | dict(sample_d_row=zeros(M, 2 * N, 1, dtype=BF), sample_d_col=None) | changes


@pytest.mark.parametrize("changes, argument, allowed", [
    (dict(sample_d_row=None), "sample_d_row = None", "a tensor"),
    (dict(sample_dprob=None), "sample_dprob = None", "a tensor"),
    (dict(sample_d_col=zeros(M, 2 * N, 1, dtype=BF)), "sample_d_col = a tensor", "None with BF16"),
    (dict(sample_amax=zeros(L, 2, 1)), "sample_amax = a tensor", "None with BF16"),
    (dict(sample_dbias=zeros(L, 2 * N, 1)), "sample_dbias.dtype = torch.float32", "bfloat16"),
    (dict(sample_alpha=zeros(2)), "sample_alpha.shape = (2,)", "(3,)"),
    (dict(num_experts=L, b_shape=(N, K), b_dtype=BF), "sample_b and num_experts = both", "exactly one"),
    (dict(sample_b=None), "sample_b and num_experts = neither", "exactly one"),
    (dict(sample_b=None, num_experts=5, b_shape=(N, K), b_dtype=BF), "num_experts = 5", "3, the length"),
])
def test_class_refuses(changes, argument, allowed):
    with pytest.raises(ValueError) as error: GroupedGemmDgluSm100(**samples(**changes)).check_support()
    assert argument in str(error.value) and allowed in str(error.value)


def test_class_accepts_discrete_samples():
    assert GroupedGemmDgluSm100(**samples(sample_b=None, num_experts=L, b_shape=(N, K), b_dtype=BF)).check_support()


def test_class_sfd_all_or_none():
    qa, sa = quantize(torch.randn(M, K), E4M3, sf_vec_size=32)
    base = {("sample_" + k.removesuffix("_tensor")): v for k, v in blockscaled().items() if k not in ("sf_vec_size", "d_dtype", "norm_const_tensor")}
    d = zeros(M, 2 * N, 1).to(F8)
    make = lambda **kw: GroupedGemmDgluSm100(**base, sample_d_row=d, sample_d_col=d.clone(), sf_vec_size=32, **kw).check_support()  # noqa: E731
    row, col = (empty_sf(r, c, 32, dtype=torch.float8_e8m0fnu) for r, c in ((M, 2 * N), (2 * N, M)))
    assert make()  # none: D is a plain saturating cast
    assert make(sample_sfd_row=row, sample_sfd_col=col, sample_norm_const=torch.ones(1))
    with pytest.raises(ValueError, match="all together or not at all"): make(sample_sfd_row=row, sample_norm_const=torch.ones(1))
    with pytest.raises(ValueError, match="all together or not at all"): make(sample_sfd_row=row, sample_sfd_col=col)


def test_every_size_in_this_file_is_what_the_tables_assume():
    assert sum(-(-c // 256) * 256 for c in COUNTS) < M and sf_physical(blockscaled()["sfa_tensor"]).shape == (1, 8, 1, 32, 4, 4)
