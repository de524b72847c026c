"Promise: a wrong argument is named, with what was found, what is allowed and what to do about it."
import pytest
import torch

from dglu.quant import (
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    decode,
    dequantize,
    empty_sf,
    encode,
    format_of,
    is_sf_strided,
    pack_sf,
    pack_sf_col,
    quantize,
    sf_physical,
    sf_view,
    to_values,
    unpack_sf,
    unpack_sf_col,
)

X = torch.ones(4, 64)
BYTES = torch.zeros(256, 8, dtype=torch.uint8)
COLUMNS = torch.zeros(32, 64, dtype=torch.uint8)
Q, S = quantize(X, E4M3, sf_vec_size=32)
NAN, INF = float("nan"), float("inf")

REFUSED = {
    "a float type has no codes": (lambda: format_of(torch.float32), ValueError,
        ["dtype = torch.float32", "float8_e4m3fn", "uint8", "dglu.quant.quantize"]),
    "values of a float tensor": (lambda: to_values(X), ValueError, ["torch.float32", "dglu.quant.quantize"]),
    "decode wants bytes": (lambda: decode(Q, E4M3),
        TypeError, ["codes", "torch.float8_e4m3fn", "uint8", "dglu.quant.to_values"]),
    "decode wants single codes": (lambda: decode(BYTES + 0x21, E2M1),
        ValueError, ["codes holds 33", "0 to 15", "unpack_fp4"]),
    "encode wants floats": (lambda: encode(BYTES, E4M3), TypeError, ["x has dtype torch.uint8", "x.float()"]),
    "quantize wants floats": (lambda: quantize(BYTES, E4M3, sf_vec_size=32),
        TypeError, ["x has dtype torch.uint8", "x.float()"]),
    "three dimensions": (lambda: quantize(X[..., None], E4M3, sf_vec_size=32),
        ValueError, ["x has shape (4, 64, 1)", "(rows, cols)", "reshape"]),
    "one dimension": (lambda: quantize(X[0], E4M3, sf_vec_size=32),
        ValueError, ["x has shape (64,)", "(rows, cols)"]),
    "block length": (lambda: quantize(X, E4M3, sf_vec_size=64), ValueError, ["sf_vec_size = 64", "16", "32"]),
    "dim": (lambda: quantize(X, E4M3, sf_vec_size=32, dim=2), ValueError, ["dim = 2", "-1", "0", "Permute"]),
    "elements in E8M0": (lambda: quantize(X, E8M0, sf_vec_size=32),
        ValueError, ["fmt = E8M0", "E4M3, E5M2, E2M1"]),
    "scales in E5M2": (lambda: quantize(X, E4M3, sf_vec_size=32, sf_format=E5M2),
        ValueError, ["sf_format = E5M2", "E8M0", "E4M3"]),
    "odd columns of FP4": (lambda: quantize(X[:, 1:], E2M1, sf_vec_size=16),
        ValueError, ["x has 63 columns", "odd", "Pad"]),
    "norm_const 0": (lambda: quantize(X, E4M3, sf_vec_size=32, norm_const=0.0),
        ValueError, ["norm_const = 0.0", "positive", "1.0"]),
    "norm_const negative": (lambda: quantize(X, E4M3, sf_vec_size=32, norm_const=-1.0),
        ValueError, ["norm_const = -1.0", "positive"]),
    "norm_const NaN": (lambda: quantize(X, E4M3, sf_vec_size=32, norm_const=NAN),
        ValueError, ["norm_const = nan", "finite"]),
    "norm_const infinite": (lambda: dequantize(Q, S, sf_vec_size=32, norm_const=INF),
        ValueError, ["norm_const = inf", "finite"]),
    "norm_const of two": (lambda: quantize(X, E4M3, sf_vec_size=32, norm_const=torch.ones(2)),
        ValueError, ["norm_const = [1.0, 1.0]", "one"]),
    "scales of the other block length": (lambda: dequantize(Q, S, sf_vec_size=16), ValueError,
        ["scales", "(4, 2)", "(4, 4)", "sf_vec_size = 16"]),
    "scales of the other direction": (lambda: dequantize(Q, S, sf_vec_size=32, dim=0),
        ValueError, ["(4, 2)", "(1, 64)", "dim = 0"]),
    "scales still packed": (lambda: dequantize(Q, pack_sf(S), sf_vec_size=32),
        ValueError, ["(32, 4, 1, 4, 1, 1)", "(4, 2)", "dglu.quant.unpack_sf"]),
    "scales as bytes": (lambda: dequantize(Q, S.view(torch.uint8), sf_vec_size=32),
        ValueError, ["torch.uint8", "float8_e8m0fnu"]),
    "codes of rank 3": (lambda: dequantize(Q[..., None], S, sf_vec_size=32),
        ValueError, ["q has shape (4, 64, 1)", "(rows, cols)"]),
    "plain contiguous atoms": (lambda: sf_view(torch.zeros(32, 4, 2, 4, 2, 1), name="sfa_tensor"), ValueError,
        ["sfa_tensor has shape (32, 4, 2, 4, 2, 1)", "strides (64, 16, 8, 2, 1, 1)", "(L, rest_m, rest_k, 32, 4, 4)",
         "dglu.quant.pack_sf", "dglu.quant.empty_sf"]),
    "contiguous atoms, physical": (lambda: sf_physical(torch.zeros(32, 4, 2, 4, 2, 1)),
        ValueError, ["strides", "dglu.quant.pack_sf"]),
    "contiguous atoms, unpacked": (lambda: unpack_sf(torch.zeros(32, 4, 2, 4, 2, 1), 256, 8),
        ValueError, ["strides", "dglu.quant.pack_sf"]),
    "a matrix of scales": (lambda: sf_view(BYTES),
        ValueError, ["sf has shape (256, 8)", "dglu.quant.pack_sf"]),
    "physical atoms with gaps": (lambda: sf_view(torch.zeros(1, 2, 4, 32, 4, 4)[:, :, ::2]),
        ValueError, ["(1, 2, 2, 32, 4, 4)", "contiguous"]),
    "float32 scales": (lambda: pack_sf(X),
        ValueError, ["torch.float32", "(4, 64)", "(rows, blocks)", "dglu.quant.quantize"]),
    "scales of rank 1": (lambda: pack_sf(BYTES[0]), ValueError, ["(8,)", "(L, rows, blocks)"]),
    "rows of another tensor": (lambda: unpack_sf(pack_sf(BYTES), 512, 8),
        ValueError, ["2 x 2 atoms", "rows = 512", "4 x 2"]),
    "blocks of another tensor": (lambda: unpack_sf(pack_sf(BYTES), 256, 9),
        ValueError, ["2 x 2 atoms", "blocks = 9", "2 x 3"]),
    "columns of another tensor": (
        lambda: unpack_sf_col(pack_sf_col(COLUMNS, sf_vec_size=32), 32, 300, [1024], sf_vec_size=32, discrete=True),
        ValueError, ["1 x 8 atoms", "rows = 300"]),
    "discrete without offsets": (lambda: pack_sf_col(COLUMNS, sf_vec_size=32, discrete=True), ValueError,
        ["offsets = None", "discrete = True", "dglu.layout.group_offsets"]),
    "unaligned expert": (lambda: pack_sf_col(COLUMNS, [256, 700, 1024], sf_vec_size=32, discrete=True),
        ValueError,
        ["offsets[1] = 700", "256", "dglu.layout.pad_groups"]),
    "falling offsets": (lambda: pack_sf_col(COLUMNS, [512, 256, 1024], sf_vec_size=32, discrete=True),
        ValueError,
        ["offsets[1] = 256", "512 to 1024", "cumulative"]),
    "offsets past the end": (
        lambda: unpack_sf_col(pack_sf_col(COLUMNS, sf_vec_size=32), 32, 64, [1280], sf_vec_size=32, discrete=True),
        ValueError, ["offsets[0] = 1280", "0 to 1024"]),
}


@pytest.mark.parametrize("call, error, parts", REFUSED.values(), ids=REFUSED.keys())
def test_refused(call, error, parts):
    with pytest.raises(error) as caught: call()
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_the_advice_of_the_stride_error_works():
    scales = torch.randint(0, 256, (256, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    plain = pack_sf(scales).contiguous()                    # every element at its place, the bytes in another order
    repaired = empty_sf(256, 256, 32, dtype=torch.uint8).copy_(plain)
    assert is_sf_strided(repaired) and torch.equal(unpack_sf(repaired, 256, 8)[0], scales)
