"Small legal calls of each family, for tests that change one thing at a time."
import torch

from dglu.layout import dense_b, group_offsets
from dglu.quant import E2M1, E4M3, E5M2, E8M0, empty_sf, pack_sf, quantize

M, N, K, L = 1024, 64, 128, 3
COUNTS = (200, 0, 300)  # one expert has no rows; rows 768 to 1023 belong to nobody
FORMATS = {"mxfp8": (E4M3, E8M0, 32), "mxfp8_e5m2": (E5M2, E8M0, 32), "nvfp4": (E2M1, E4M3, 16), "mxfp4": (E2M1, E8M0, 32), "mxfp4_16": (E2M1, E8M0, 16)}


def common(gen, columns):
    "The tensors that every family has, all different per expert and row."
    return dict(
        c_tensor=torch.randn(M, columns, 1, generator=gen).bfloat16(), padded_offsets=group_offsets(COUNTS),
        alpha_tensor=torch.rand(L, generator=gen) + 0.5, prob_tensor=torch.rand(M, 1, 1, generator=gen), dprob_tensor=torch.zeros(M, 1, 1))


def bf16(seed=0, **changes):
    "A BF16 wrapper call."
    gen = torch.Generator().manual_seed(seed)
    a, b = torch.randn(M, K, 1, generator=gen).bfloat16(), torch.randn(L, N, K, generator=gen).bfloat16()
    call = dict(a_tensor=a, b_tensor=dense_b(b), sfa_tensor=None, beta_tensor=torch.rand(L, generator=gen) + 0.5, **common(gen, 2 * N))
    return call | changes


def blockscaled(fmt="mxfp8", seed=0, *, op="dglu", **changes):
    "A block-scaled wrapper call in one of FORMATS."
    gen = torch.Generator().manual_seed(seed)
    values, scales, vec = FORMATS[fmt]
    qa, sa = quantize(torch.randn(M, K, generator=gen), values, sf_vec_size=vec, sf_format=scales)
    qb, sb = zip(*(quantize(torch.randn(N, K, generator=gen), values, sf_vec_size=vec, sf_format=scales) for _ in range(L)))
    call = dict(a_tensor=qa[..., None], b_tensor=dense_b(torch.stack(qb)), sfa_tensor=pack_sf(sa), sfb_tensor=pack_sf(torch.stack(sb)),
                sf_vec_size=vec, **common(gen, N if op == "dsrelu" else 2 * N))
    if op == "dglu": call["beta_tensor"] = torch.rand(L, generator=gen) + 0.5
    if fmt.startswith("mxfp8"): call |= dict(norm_const_tensor=torch.ones(1), d_dtype=values.dtype)
    if op == "dsrelu" and fmt.startswith("mxfp8"): call["discrete_col_sfd"] = True
    return call | changes


def nvfp4_d(seed=0, **changes):
    "A call with NVFP4 operands whose D is in NVFP4."
    return blockscaled("nvfp4", seed, **dict(d_dtype=torch.uint8, norm_const_tensor=torch.ones(1)) | changes)


def quantised_activation(d_dtype=torch.uint8, norm_const=1.0, m=M, n=N):
    "The five tensors of an activation that is quantised as D is, zeroed."
    fp4 = d_dtype in (torch.uint8, torch.float4_e2m1fn_x2)
    shapes = ((m, n // 2, 1), (n, m // 2, 1)) if fp4 else ((m, n, 1),) * 2
    row, col = (torch.zeros(shape, dtype=torch.uint8).view(d_dtype) for shape in shapes)
    sf = dict(sf_vec_size=16 if fp4 else 32, dtype=torch.float8_e4m3fn if fp4 else torch.float8_e8m0fnu)
    return dict(activation_out=row, activation_col_out=col, activation_sf_row=empty_sf(m, n, **sf), activation_sf_col=empty_sf(n, m, **sf),
                activation_norm_const=torch.full((1,), norm_const))
