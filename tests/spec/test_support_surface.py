"""The contract's "Support Surface and Constraints", "Additional Type Constraints" and "Shapes and Divisibility", line by line: what is accepted, and the error of
what is not. Metadata alone; no kernel runs. Lines whose refusal tests/spec/test_contract.py holds name its entry in `R`, so that none is lost there."""
import itertools
from dataclasses import fields, replace

import pytest
import test_contract
import torch

from dglu import GroupedGemmDgluSm100, check
from dglu.contract import FP4, FP8, WIDE, Config, argument_name, check_offsets, describe
from dglu.quant import sf_shape
from dglu.truth import atoms

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4, E5, E8, E2, E2X2, I32, I64 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8, torch.float4_e2m1fn_x2, torch.int32, torch.int64
M, N, K, L = 512, 64, 128, 2


def empty(*shape, dtype=F32): return torch.empty(*shape, dtype=dtype, device="meta")


def scales(rows, k, vec, dtype, experts=1): return atoms(torch.empty(sf_physical_shape(rows, k, vec, experts), dtype=torch.uint8, device="meta").view(dtype))


def sf_physical_shape(rows, k, vec, experts):
    _, _, rest_m, _, rest_k, _ = sf_shape(rows, k, vec, experts)
    return experts, rest_m, rest_k, 32, 4, 4


def dense(n, stored, experts, dtype, major="k"):
    if major == "k": return empty(experts, n, stored, dtype=dtype).permute(1, 2, 0)
    return empty(experts, stored, n, dtype=dtype).permute(2, 1, 0)


def by_rows(m, columns, dtype): return empty(m, columns // 2 if dtype in FP4 else columns, 1, dtype=dtype)


def by_columns(m, columns, dtype): return empty(columns, m // 2, 1, dtype=dtype) if dtype in FP4 else empty(m, columns, 1, dtype=dtype)


def samples(ab=E4, sf=E8, vec=32, *, c=BF16, d=None, m=M, n=N, k=K, experts=L, outputs=None, major="k", discrete=False, **config):
    "Arguments of the class's constructor: meta tensors of one family, all of a size, and the configuration."
    scaled, fp4 = ab != BF16, ab in FP4
    d = d or (ab if ab in FP8 else BF16)
    stored = k // 2 if fp4 else k
    outputs = (("d_col", "sfd") if d in FP8 + FP4 else ()) if outputs is None else outputs
    t = dict(a=empty(m, stored, 1, dtype=ab), c=empty(m, 2 * n, 1, dtype=c), d_row=by_rows(m, 2 * n, d),
             padded_offsets=empty(experts, dtype=I32), alpha=empty(experts), beta=empty(experts), prob=empty(m, 1, 1), dprob=empty(m, 1, 1), d_col=None, sfa=None)
    if scaled: t["sfa"] = scales(m, k, vec, sf)
    if not discrete:
        t["b"] = dense(n, stored, experts, ab, major)
        if scaled: t["sfb"] = scales(n, k, vec, sf, experts)
    else: config |= dict(num_experts=experts, b_shape=(n, k), b_dtype=ab, b_major=major)
    if "d_col" in outputs: t["d_col"] = by_columns(m, 2 * n, d)
    if "dbias" in outputs: t["dbias"] = empty(experts, 2 * n, 1, dtype=BF16)
    if "amax" in outputs: t["amax"] = empty(experts, 2, 1)
    d_sf = E4 if d in FP4 else E8
    if "sfd" in outputs: t |= dict(sfd_row=scales(m, 2 * n, vec, d_sf), sfd_col=scales(2 * n, m, vec, d_sf), norm_const=empty(1))
    if "activation_sf" in outputs:
        t |= dict(activation_out=by_rows(m, n, d), activation_col_out=by_columns(m, n, d), activation_sf_row=scales(m, n, vec, d_sf),
                  activation_sf_col=scales(n, m, vec, d_sf), activation_norm_const=empty(1))
    return {f"sample_{key}": x for key, x in t.items()} | dict(sf_vec_size=vec if scaled else 16) | config


def supported(**arguments) -> bool:
    "What check_support does, without its last step, the choice of a backend: none runs meta tensors."
    op = GroupedGemmDgluSm100(**arguments, backend="reference")
    describe(op._config, op._metas, sample=True, **op._b)
    return True


def refused(argument, found, allowed, error=ValueError, **arguments):
    "An error of this class that names the argument, what it was and what is allowed."
    with pytest.raises((ValueError, NotImplementedError, RuntimeError, TypeError)) as caught: supported(**arguments)
    assert type(caught.value) is error, repr(caught.value)
    message = str(caught.value)
    for part in (argument, found, allowed): assert part in message, f"{part!r} is not in {message!r}"


# Data types: the whole product of operands, scales, block sizes and D against the table ----------------------------------

def in_table(ab, sf, vec, d, dbias) -> type | None:
    "None if the contract's table and the constraints below it allow a format, else the class of the error (interface facts, 'Rules checked')."
    if sf == E4 and vec == 32: return ValueError                           # "sf_dtype=float8_e4m3fn is incompatible with sf_vec_size=32"
    if ab in FP8: return None if sf == E8 and vec == 32 and d in FP8 else ValueError
    if d in FP4: return None if sf == E4 else ValueError                      # beyond the contract: D in NVFP4 with NVFP4 operands
    if d not in WIDE: return ValueError                                      # FP16 beyond the table: design page
    if vec == 16 and d == F32 and not dbias: return NotImplementedError       # "For non-dbias paths, …"
    return None


@pytest.mark.parametrize("ab", [E4, E5, E2, E2X2], ids=str)
def test_every_format(ab):
    "Operands × scale type × block size × type of D × dbias, all of them."
    for sf, vec, d, dbias in itertools.product((E8, E4), (16, 32), (*WIDE, *FP8, *FP4), (False, True)):
        wanted = in_table(ab, sf, vec, d, dbias)
        call = samples(ab, sf, vec, d=d, outputs=(*(("d_col", "sfd") if d in FP4 else ()), *(("dbias",) if dbias else ())))
        if wanted is None: assert supported(**call)
        else: refused("sf_vec_size" if sf == E4 and vec == 32 or ab in FP8 and vec == 16 else "D's type", "", "must be", wanted, **call)


@pytest.mark.parametrize("sf", [torch.uint8, E5, F32], ids=str)
def test_other_scale_types(sf):
    call = samples(E4) | dict(sample_sfa=empty(32, 4, 4, 4, 1, 1, dtype=sf))
    refused("the scale factors' type", str(sf), "float8_e8m0fnu or torch.float8_e4m3fn", **call)


@pytest.mark.parametrize("a, b", [(a, b) for a in (BF16, E4, E5, E2, E2X2) for b in (BF16, E4, E5, E2, E2X2) if a != b], ids=str)
def test_operands_of_two_types(a, b):
    call = samples(a, E4 if a in FP4 else E8, 16 if a in FP4 else 32)
    refused("the types of A and B", f"{a} and {b}", "one matching FP8 or FP4 type", **call | dict(sample_b=dense(N, K, L, b)))


@pytest.mark.parametrize("ab", [F16, F32, F64, torch.int8, E8], ids=str)
def test_operands_of_no_family(ab):
    refused("the types of A and B", str(ab), "BF16 and BF16", **samples(E4) | dict(sample_a=empty(M, K, 1, dtype=ab), sample_b=dense(N, K, L, ab)))


C_TYPES = {BF16: WIDE, E4: (*WIDE, *FP8), E2: (*WIDE, *FP8)}


@pytest.mark.parametrize("ab, c", list(itertools.product(C_TYPES, (*WIDE, *FP8, F64, torch.uint8))), ids=str)
def test_types_of_c(ab, c):
    call = samples(ab, vec=16 if ab == E2 else 32, c=c)
    if c in C_TYPES[ab]: assert supported(**call)
    else: refused("sample_c.dtype", str(c), " or ".join(map(str, C_TYPES[ab])), **call)


@pytest.mark.parametrize("ab, c, packed", list(itertools.product((E4, E2), (*WIDE, *FP8), (False, True))), ids=str)
def test_fp8_c_with_vector_f32(ab, c, packed):
    call = samples(ab, vec=16 if ab == E2 else 32, c=c, vector_f32=packed)
    if c in FP8 and packed: refused("vector_f32", "True", "False with an FP8 C", **call)
    else: assert supported(**call)


OTHER_TYPES = {  # key: (its type, types that it may not be)
    "padded_offsets": (I32, (I64, F32)), "alpha": (F32, (BF16, F64)), "beta": (F32, (BF16, F64)), "prob": (F32, (BF16, F64)), "dprob": (F32, (BF16, F64)),
    "dbias": (BF16, (F16, F32)), "amax": (F32, (BF16, F64)), "norm_const": (F32, (BF16, F64)), "sfd_row": (E8, (E4, torch.uint8)), "sfd_col": (E8, (E4, torch.uint8))}


@pytest.mark.parametrize("key", OTHER_TYPES)
def test_types_of_vectors_and_outputs(key):
    dtype, wrong = OTHER_TYPES[key]
    call = samples(E2, E4, 16, outputs=("amax", "dbias")) if key == "amax" else samples(outputs=("d_col", "sfd", "dbias"))
    name = f"sample_{key}"
    assert supported(**call) and call[name].dtype == dtype
    for other in wrong:
        x = torch.empty_strided(call[name].shape, call[name].stride(), dtype=other, device="meta")
        refused(f"{argument_name(key, sample=True)}.dtype", str(other), str(dtype), **call | {name: x})


@pytest.mark.parametrize("key, other", [("sfb", E8), ("d_col", E5)])
def test_types_that_must_agree(key, other):
    "A's and B's scale factors; D_row and D_col."
    call = samples(E2, E4, 16) if key == "sfb" else samples()
    x = call[f"sample_{key}"]
    refused(f"sample_{key}.dtype", str(other), str(x.dtype), **call | {f"sample_{key}": torch.empty_strided(x.shape, x.stride(), dtype=other, device="meta")})


# Layouts and strides -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ab, major, discrete", list(itertools.product((BF16, E4, E5, E2, E2X2), "kn", (False, True))), ids=str)
def test_major_of_b(ab, major, discrete):
    call = samples(ab, vec=16 if ab in FP4 else 32, major=major, discrete=discrete)
    if ab in FP4 and major == "n": refused("b_major", "n", "'k' for FP4", **call)
    else: assert supported(**call)


NOT_CONTIGUOUS = ("a", "c", "d_row", "d_col", "dbias", "alpha", "prob", "dprob", "amax")


@pytest.mark.parametrize("key", NOT_CONTIGUOUS)
def test_strides(key):
    "A is K-major; C and D are N-major; everything else is contiguous. A stride of 2 is none of them."
    call = samples(E2, E4, 16, outputs=("amax", "dbias", "d_col"))
    x = call[f"sample_{key}"]
    spaced = torch.empty_strided(x.shape, [2 * s for s in x.stride()], dtype=x.dtype, device="meta")
    refused(f"sample_{key}.stride()", str(spaced.stride()), "contiguous", **call | {f"sample_{key}": spaced})
    if key in ("a", "c", "d_row", "d_col"):
        across = torch.empty_strided(x.shape, (1, x.shape[0], x.shape[0] * x.shape[1]), dtype=x.dtype, device="meta")
        refused(f"sample_{key}.stride()", str(across.stride()), "contiguous", **call | {f"sample_{key}": across})


@pytest.mark.parametrize("key", ["sfa", "sfb", "sfd_row", "sfd_col"])
def test_scale_factors_in_another_order(key):
    call = samples(n=256, k=256)
    x = call[f"sample_{key}"]
    plain = torch.empty(x.shape, dtype=x.dtype, device="meta")
    refused(f"sample_{key}.stride()", str(plain.stride()), "scale-factor atom", **call | {f"sample_{key}": plain})


def on_cpu(call): return {key: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if isinstance(x, torch.Tensor) else x for key, x in call.items()}


def moved(x: torch.Tensor, offset: int) -> torch.Tensor:
    "A tensor like x, `offset` bytes behind a line of 64."
    size = x.nbytes + offset + 64
    memory = torch.zeros(size, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + offset
    return torch.as_strided(memory[start:start + x.nbytes].view(x.dtype), x.shape, x.stride())


@pytest.mark.parametrize("key", ["a", "b", "c", "d_row", "d_col", "sfa", "sfb", "sfd_row", "sfd_col", "dbias"])
def test_alignment(key):
    "16 bytes for whatever is moved in lines; elements that are read one at a time lie anywhere."
    call = on_cpu(samples(outputs=("d_col", "sfd", "dbias")))
    x = call[f"sample_{key}"]
    assert supported(**call | {f"sample_{key}": moved(x, 16)})
    for offset in (2, 8): refused(f"sample_{key}.data_ptr()", "16-byte", "multiple of 16", **call | {f"sample_{key}": moved(x, offset)})


@pytest.mark.parametrize("key", ["alpha", "beta", "prob", "dprob", "padded_offsets", "norm_const"])
def test_vectors_lie_anywhere(key):
    call = on_cpu(samples())
    assert supported(**call | {f"sample_{key}": moved(call[f"sample_{key}"], 4)})


def test_devices_agree():
    call = on_cpu(samples(outputs=("d_col", "sfd", "dbias")))
    for key in [k for k, x in call.items() if isinstance(x, torch.Tensor) and k != "sample_a"]:
        refused(f"{key}.device", "meta", "cpu, where A is", **call | {key: torch.empty_strided(call[key].shape, call[key].stride(), dtype=call[key].dtype, device="meta")})


# Shapes and divisibility ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ab, n", list(itertools.product((BF16, E4, E2), (0, 1, 16, 31, 32, 33, 48, 64, 96, 160, 2080))), ids=str)
def test_n(ab, n):
    call = samples(ab, vec=16 if ab == E2 else 32, n=n)
    if n and n % 32 == 0: assert supported(**call)
    else: refused("N", str(n), "positive multiple of 32", **call)


@pytest.mark.parametrize("ab, step", [(BF16, 8), (E4, 16), (E5, 16), (E2, 32), (E2X2, 32)], ids=str)
def test_k(ab, step):
    "Whole lines of 16 bytes; a block of scale factors, or a stage of the kernel, need not be full."
    vec = 16 if ab in FP4 else 32
    for k in (step, 3 * step, 7 * step, 4096 + step): assert supported(**samples(ab, vec=vec, k=k))
    for k in (0, step // 2, step + step // 2): refused("K", str(k), f"positive multiple of {step}", **samples(ab, vec=vec, k=k))


@pytest.mark.parametrize("ab", [BF16, E4, E2], ids=str)
def test_m(ab):
    "Each group's rows are aligned to 256, and so is M; no rows at all is a call."
    vec = 16 if ab == E2 else 32
    for m in (0, 256, 768): assert supported(**samples(ab, vec=vec, m=m))
    for m in (1, 128, 300): refused("M", str(m), "multiple of 256", **samples(ab, vec=vec, m=m))


@pytest.mark.parametrize("values, i, allowed", [((128, 512), 0, "a multiple of 256"), ((256, 300), 1, "a multiple of 256"), ((512, 256), 1, "at least 512"),
                                                ((256, 768), 1, "at most M = 512")])
def test_groups(values, i, allowed):
    check_offsets([256, 512], M)
    check_offsets([0, 512], M)
    with pytest.raises(ValueError) as error: check_offsets(list(values), M)
    assert f"padded_offsets[{i}] = {values[i]}" in str(error.value) and allowed in str(error.value)


@pytest.mark.parametrize("ab, discrete", list(itertools.product((BF16, E4, E2), (False, True))), ids=str)
def test_number_of_experts(ab, discrete):
    vec = 16 if ab == E2 else 32
    for experts in (1, 1024): assert supported(**samples(ab, vec=vec, experts=experts, discrete=discrete))
    for experts in (0, 1025): refused("the number of experts", str(experts), "between 1 and 1024", **samples(ab, vec=vec, experts=experts, discrete=discrete))


@pytest.mark.parametrize("experts, ok", [(1, True), (2, False), (1024, False)])
def test_single_group_runtime_offsets(experts, ok):
    for ab, vec in ((E4, 32), (E2, 16)):
        call = samples(ab, vec=vec, experts=experts, use_single_group_runtime_offsets=True)
        if ok: assert supported(**call)
        else: refused("use_single_group_runtime_offsets", "True", f"False with {experts} experts", **call)
    refused("use_single_group_runtime_offsets", "True", "False with BF16", **samples(BF16, experts=1, use_single_group_runtime_offsets=True))


def test_single_group_still_needs_its_tensor():
    call = samples(experts=1, use_single_group_runtime_offsets=True)
    refused("sample_padded_offsets.dtype", "int64", "int32", **call | dict(sample_padded_offsets=empty(1, dtype=I64)))
    refused("sample_padded_offsets", "None", "a tensor", **call | dict(sample_padded_offsets=None))


WRONG_SHAPES = {"c": (M, N, 1), "d_row": (M, N, 1), "d_col": (M, N, 1), "alpha": (L + 1,), "beta": (L, 1), "prob": (M, 1), "dprob": (M - 256, 1, 1),
                "dbias": (L, N, 1), "norm_const": (2,), "sfa": (32, 4, 3, 4, 1, 1), "sfb": (32, 4, 1, 4, 1, L + 1), "sfd_row": (32, 4, 4, 4, 2, 1),
                "sfd_col": (32, 4, 2, 4, 4, 1)}


@pytest.mark.parametrize("key", WRONG_SHAPES)
def test_shapes(key):
    "Every shape follows from A, B and padded_offsets."
    call = samples(outputs=("d_col", "sfd", "dbias"))
    x, shape = call[f"sample_{key}"], WRONG_SHAPES[key]
    refused(f"sample_{key}.shape", str(shape), str(tuple(x.shape)), **call | {f"sample_{key}": torch.empty(shape, dtype=x.dtype, device="meta")})


def test_shape_of_amax():
    call = samples(E2, E4, 16, outputs=("amax",))
    refused("sample_amax.shape", f"({L}, 1, 1)", f"({L}, 2, 1)", **call | dict(sample_amax=empty(L, 1, 1)))


# Outputs of the class --------------------------------------------------------------------------------------------------------

def run_on_cpu(case, **late):
    "The class on a small case; arguments of `execute` beyond those that it was made for."
    t = check.make_tensors(case)
    given = {f.name: getattr(case.config, f.name) for f in fields(Config)} | {argument_name(k, sample=True): x for k, x in t.items()}
    op = GroupedGemmDgluSm100(**check.arguments(GroupedGemmDgluSm100, given | dict(backend="reference")))
    op.compile()
    op.execute(**check.arguments(GroupedGemmDgluSm100.execute, {argument_name(k): x for k, x in t.items()} | late))


@pytest.mark.parametrize("base", [check.Case(), check.MXFP8[0], check.NVFP4[0]], ids=lambda c: c.name)
def test_dbias_without_its_sample(base):
    "\"passing a runtime dbias_tensor without sample_dbias raises ValueError\": in every family."
    case = replace(base, outputs=tuple(k for k in base.outputs if k != "dbias"), counts=(5,), n=32, k=32)
    run_on_cpu(case)
    run_on_cpu(replace(case, outputs=(*case.outputs, "dbias")))
    with pytest.raises(ValueError) as error: run_on_cpu(case, dbias_tensor=torch.zeros(1, 64, 1, dtype=BF16))
    assert "dbias_tensor" in str(error.value) and "sample_dbias" in str(error.value)


def test_fp4_d_says_what_it_needs():
    for sf, vec in ((E8, 16), (E8, 32)): refused("D's type", "uint8", "must be one of", **samples(E2, sf, vec, d=E2))
    with pytest.raises(ValueError, match="needs dGLU and NVFP4 operands: FP4 with E4M3 scale factors, sf_vec_size = 16"): supported(**samples(E2, E8, 32, d=E2))
    refused("D's type", "uint8", "float8_e4m3fn", **samples(E4, d=E2))
    refused("D's type", "uint8", "BF16, FP16 or FP32", **samples(BF16, d=E2, outputs=()))


def test_fp4_d_goes_with_its_scale_factors():
    call = samples(E2, E4, 16, d=E2)
    assert supported(**call) and supported(**samples(E2, E4, 16, d=E2, outputs=("d_col", "sfd", "amax", "dbias")))
    refused("sfd_row, sfd_col and norm_const", "none", "given with D in FP4", **samples(E2, E4, 16, d=E2, outputs=()))
    refused("d_col", "None", "a tensor with scale factors", **call | dict(sample_d_col=None))
    for key in ("sfd_row", "sfd_col", "norm_const"): refused("norm_const", "", "must be", **{k: x for k, x in call.items() if k != f"sample_{key}"})
    for key in ("sfd_row", "sfd_col"):
        x = call[f"sample_{key}"]
        other = torch.empty_strided(x.shape, x.stride(), dtype=E8, device="meta")
        refused(f"sample_{key}.dtype", "float8_e8m0fnu", "float8_e4m3fn", **call | {f"sample_{key}": other})


@pytest.mark.parametrize("d", [E2, E2X2], ids=str)
def test_fp4_d_is_packed_along_the_reduction_of_the_next_gemm(d):
    "By rows (M, N) bytes, by columns transposed; D's type need not be spelt as A's."
    for ab in (E2, E2X2): assert supported(**samples(ab, E4, 16, d=d, discrete_col_sfd=True))
    call = samples(E2, E4, 16, d=d)
    refused("sample_d_row.shape", f"({M}, {2 * N}, 1)", f"({M}, {N}, 1)", **call | dict(sample_d_row=empty(M, 2 * N, 1, dtype=d)))
    refused("sample_d_col.shape", f"({M}, {N}, 1)", f"({2 * N}, {M // 2}, 1)", **call | dict(sample_d_col=empty(M, N, 1, dtype=d)))
    refused("sample_d_col.dtype", "", str(d), **call | dict(sample_d_col=empty(2 * N, M // 2, 1, dtype=E2X2 if d == E2 else E2)))


QUANTISED_D = {"mxfp8": dict(ab=E4, d=E4), "mxfp8 E5M2": dict(ab=E4, d=E5), "nvfp4": dict(ab=E2, sf=E4, vec=16, d=E2)}
BOTH = ("d_col", "sfd", "activation_sf")


@pytest.mark.parametrize("form", QUANTISED_D)
def test_quantised_activation(form):
    "All five tensors or activation_out alone, of D's types and of N columns."
    base = QUANTISED_D[form]
    call, d = samples(**base, outputs=BOTH), base["d"]
    assert supported(**call) and supported(**samples(**base, outputs=BOTH, n=96, discrete_col_sfd=True)) and supported(**samples(**base, outputs=BOTH, m=0))
    five = [f"sample_{key}" for key in ("activation_out", "activation_col_out", "activation_sf_row", "activation_sf_col", "activation_norm_const")]
    for missing in five: refused(missing, "None", "a tensor where the activation is quantised", **call | {missing: None})
    alone = {key: x for key, x in call.items() if key not in five}
    for wide in WIDE: assert supported(**alone, sample_activation_out=empty(M, N, 1, dtype=wide))
    refused("sample_activation_out.dtype", str(d), "bfloat16", **alone, sample_activation_out=empty(M, N, 1, dtype=d))
    other = E5 if d == E4 else E4
    refused("sample_activation_out.dtype", str(other), str(d), **call | dict(sample_activation_out=by_rows(M, N, d).view(E4 if d == E2 else d).to(other)))


@pytest.mark.parametrize("key", ["activation_out", "activation_col_out", "activation_sf_row", "activation_sf_col", "activation_norm_const"])
def test_shapes_types_and_strides_of_a_quantised_activation(key):
    call, name = samples(E2, E4, 16, d=E2, outputs=BOTH), f"sample_{key}"
    x = call[name]
    more = torch.empty_strided((x.shape[0] + 1, *x.shape[1:]), x.stride(), dtype=x.dtype, device="meta")
    refused(f"{name}.shape", str(tuple(more.shape)), str(tuple(x.shape)), **call | {name: more})
    refused(f"{name}.dtype", "int32", str(x.dtype), **call | {name: torch.empty_strided(x.shape, x.stride(), dtype=I32, device="meta")})
    if x.numel() > 1:
        spaced = torch.empty_strided(x.shape, [2 * s for s in x.stride()], dtype=x.dtype, device="meta")
        refused(f"{name}.stride()", "", "scale-factor atom" if "_sf_" in key else "contiguous", **call | {name: spaced})


def test_quantised_activation_goes_with_quantised_d():
    call = samples(E4, outputs=BOTH)
    plain = {key: x for key, x in call.items() if key not in ("sample_sfd_row", "sample_sfd_col", "sample_norm_const")}
    refused("activation_sf_row, activation_sf_col", "tensors", "None where D has no scale factors", **plain)
    nvfp4 = samples(E2, E4, 16, d=E2, outputs=BOTH)
    for key in ("activation_col_out", "activation_sf_row", "activation_sf_col", "activation_norm_const"):
        name = f"sample_{key}"
        refused(name, "a tensor", "None with BF16", **samples(BF16) | {name: nvfp4[name]})
    wide = {key: nvfp4[f"sample_{key}"] for key in ("activation_out", "activation_col_out", "activation_sf_row", "activation_sf_col", "activation_norm_const")}
    refused("activation_sf_row, activation_sf_col", "tensors", "None where D has no scale", **samples(E2, E4, 16) | {f"sample_{key}": x for key, x in wide.items()})


@pytest.mark.parametrize("base", [check.FP4_D, check.MXFP8[0]], ids=lambda c: c.name)
def test_the_activation_is_compiled_in_with_its_samples(base):
    case = replace(base, activation=base.d, outputs=("d_col", "sfd", "activation_sf"), counts=(5,), n=32, k=32)
    run_on_cpu(case)
    with pytest.raises(ValueError, match=r"activation_norm_const = None: must be a tensor where the activation is quantised"):
        run_on_cpu(case, activation_norm_const=None)
    none = dict.fromkeys(("activation_out", "activation_col_out", "activation_sf_row", "activation_sf_col", "activation_norm_const"))
    with pytest.raises(ValueError, match=r"activation_\w+ = None: must be given, as sample_activation_\w+ was"): run_on_cpu(case, **none)
    t = check.make_tensors(case)
    with pytest.raises(ValueError, match=r"activation_\w+ = a tensor: must be None, as sample_activation_\w+ was"):
        run_on_cpu(replace(case, activation=None, outputs=("d_col", "sfd")), **{key: t[key] for key in none})
    if base.d in FP4: return
    with pytest.raises(ValueError, match="d_dtype = torch.float8_e5m2: must be torch.float8_e4m3fn, as in the samples"):
        t = check.make_tensors(replace(case, d=E5, activation=E5))
        run_on_cpu(case, **{argument_name(key): t[key] for key in ("d_row", "d_col", *none)})


@pytest.mark.parametrize("d, ok", [(BF16, True), (F16, True), (F32, False)], ids=str)
def test_amax(d, ok):
    call = samples(E2, E8, 32, d=d, outputs=("amax",))
    if ok: assert supported(**call)
    else: refused("amax_tensor", "a tensor", f"None with D in {d}", **call)


@pytest.mark.parametrize("given", [s for n in range(4) for s in itertools.combinations(("sfd_row", "sfd_col", "norm_const"), n)], ids=str)
def test_scale_outputs_together(given):
    "All three, or none; norm_const alone asks for nothing."
    call = samples()
    for key in {"sfd_row", "sfd_col", "norm_const"} - set(given): call.pop(f"sample_{key}")
    if len(given) in (0, 3) or given == ("norm_const",): assert supported(**call)
    else: refused("norm_const" if "norm_const" not in given else "sfd_row, sfd_col and norm_const", "", "must be", **call)


def test_scale_outputs_need_d_col():
    refused("d_col", "None", "a tensor with scale factors", **samples() | dict(sample_d_col=None))


# Tiles and clusters --------------------------------------------------------------------------------------------------------

def test_tiles():
    for ab, widths in ((BF16, range(32, 257, 32)), (E4, (256,)), (E2, (256,))):
        for rows, columns in itertools.product((64, 128, 192, 256), (0, 32, 48, 64, 128, 224, 256, 288)):
            call = samples(ab, vec=16 if ab == E2 else 32, mma_tiler_mn=(rows, columns))
            if rows in (128, 256) and columns in widths: assert supported(**call)
            else: refused("mma_tiler_mn", str((rows, columns)), "TILE_M 128 or 256", **call)


def test_clusters():
    for ab, rows in itertools.product((BF16, E4), (128, 256)):
        for side in itertools.product((1, 2, 3, 4, 8, 16, 32), repeat=2):
            call = samples(ab, mma_tiler_mn=(rows, 256), cluster_shape_mn=side)
            fits = 3 not in side and max(side) <= (16 if ab == BF16 else 4) and side[0] * side[1] <= 16
            if fits and (rows == 128 or side[0] % 2 == 0): assert supported(**call)
            else: refused("cluster_shape_mn", str(side), "even" if fits else "powers of two", **call)


# Lines that tests/spec/test_contract.py holds --------------------------------------------------------------------------------

ELSEWHERE = {
    "mixed families": ("mixed families", "FP32 operands", "A and B differ"),
    "BF16 with a scale control": ("sfa with BF16", "norm_const with BF16", "sf_vec_size with BF16", "discrete_col_sfd with BF16", "epilogue_op with BF16"),
    "both or neither form of weights": ("both weights", "no weights"),
    "acc_dtype, m_aligned, cd_major, act_func, b_major, epilogue_op": ("acc_dtype", "m_aligned", "cd_major", "act_func", "b_major", "epilogue_op name"),
    "activation parameters": ("alpha NaN", "alpha 0", "clamps crossed", "clamp NaN", "offset infinite", "beta1 0", "beta2 negative"),
    "dsituglu is block-scaled": ("dsituglu with BF16",),
    "values": ("norm_const 0", "norm_const infinite", "offset 700", "offset past M", "offsets decrease", "b_ptrs null")}


@pytest.mark.parametrize("line", ELSEWHERE)
def test_lines_held_elsewhere(line):
    for name in ELSEWHERE[line]: assert name in test_contract.R
