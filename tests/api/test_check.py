"`dglu check`: the reference passes its table, planted faults fail it, and its judgement is as sharp as it says."
import os
import random
from dataclasses import replace

import pytest
import torch

from dglu import api
from dglu.check import (
    CASES,
    FAULTS,
    FP4_D,
    MXFP4,
    MXFP8,
    NVFP4,
    Result,
    compare,
    compare_quantised,
    execute,
    half_step,
    jobs_for,
    judge,
    nearest_code,
    random_case,
    run_case,
    run_cases,
    scale_code,
    shows,
    spread,
    variants,
)
from dglu.contract import FP4, FP8, HALF, QUANTISED, WIDE, Config
from dglu.quant import E2M1, E4M3, E8M0, quantize
from dglu.truth import Case, Truth, make_tensors, numbers, oracle, physical, raw

EVERY = [case for family in CASES.values() for case in family]


@pytest.mark.parametrize("case", EVERY, ids=lambda c: c.name)
def test_the_reference_passes(case):
    result = run_case(case, "reference", seed=1)
    assert result.ok and not result.message, result.message
    assert {"d_row", "outputs, stray bytes", "inputs, changed bytes"} <= set(result.errors)
    judged = {key for name in case.outputs for key in (QUANTISED[name][:4] if name in QUANTISED else (name,))}
    assert all(f"{key}, outside" in result.errors for key in judged)


@pytest.mark.parametrize("name, family", [(name, family) for name in FAULTS for family in FAULTS[name].families])
def test_a_planted_fault_is_caught(name, family):
    fault = FAULTS[name]
    able = [case for case in CASES[family] if fault.needs(case) and case.ends[-1]][:2]
    results = [run_case(case, fault.run, seed=1) for case in able]
    assert results and all(not r.ok and shows(fault, r) for r in results), [r.message for r in results]


@pytest.mark.parametrize("field, values", {
    "ab": {torch.bfloat16, *FP8, *FP4}, "sf": {None, torch.float8_e8m0fnu, torch.float8_e4m3fn}, "c": {*WIDE, *FP8},
    "d": {*WIDE, *FP8, *FP4}, "weights": {"dense", "discrete"}, "prob": {True, False}, "activation": {None, *WIDE, *FP8, torch.uint8},
    "data": {"normal", "zeros", "large", "codes", "nan"}}.items())
def test_the_table_has_every_value_of_a_field(field, values): assert {getattr(c, field) for c in EVERY} == values


@pytest.mark.parametrize("field, values", {
    "act_func": {"dswiglu", "dgeglu", "dsituglu"}, "epilogue_op": {None, "identity", "relu", "srelu"},
    "c_role": {"upstream", "preactivation"}, "geglu_filter": {None, "mask", "value"}, "b_major": {"k", "n"},
    "use_dynamic_sched": {False, True}, "discrete_col_sfd": {False, True}, "deterministic": {False, True},
    "use_single_group_runtime_offsets": {False, True}, "vector_f32": {False, True}, "sf_vec_size": {16, 32}}.items())
def test_the_table_has_every_choice(field, values): assert {getattr(c.config, field) for c in EVERY} == values


def test_the_table_has_its_edge_cases():
    assert any(0 in c.counts for c in EVERY) and any(c.ends[-1] == 0 for c in EVERY)
    assert any(len(c.counts) == 1 for c in EVERY) and any(c.spare for c in EVERY)
    assert 80 <= len(EVERY) <= 190 and len({c.name for c in EVERY}) == len(EVERY)


@pytest.mark.parametrize("output", ["sfd", "activation_sf"])
def test_the_table_has_the_edges_of_quantised_outputs(output):
    "In MXFP8 and in NVFP4: N = 32·odd, experts without rows, spare rows, zeros, a constant that is not 1, columns packed by experts, each activation."
    for types in FP8, FP4:
        cases = [c for c in CASES["blockscaled"] if output in c.outputs and c.d in types]
        assert {c.config.act_func for c in cases} == {"dswiglu", "dgeglu", "dsituglu"}
        for seen in (lambda c: c.n % 64 == 32, lambda c: 0 in c.counts, lambda c: c.spare, lambda c: c.data == "zeros", lambda c: c.config.discrete_col_sfd,
                     lambda c: (c.norm_const if output == "sfd" else c.activation_norm_const) != 1):
            assert any(map(seen, cases))
    fp4 = [c for c in EVERY if c.d in FP4]
    for seen in (lambda c: c.weights == "discrete", lambda c: "amax" in c.outputs, lambda c: "dbias" in c.outputs, lambda c: c.norm_const < 1,
                 lambda c: c.data == "nan", lambda c: not c.prob): assert any(map(seen, fp4))


def test_random_cases_are_legal():
    for seed in range(200): execute(c := random_case(random.Random(seed)), make_tensors(c), lambda problem, t: None)


def test_random_cases_cover_the_space():
    cases = [random_case(random.Random(seed)) for seed in range(600)]
    schemes = {(c.ab, c.sf, c.config.sf_vec_size) for c in cases}
    assert {ab for ab, _, _ in schemes} == {torch.bfloat16, *FP8, *FP4} and len(schemes) == 1 + 2 + 2 * 3
    assert {c.config.act_func for c in cases} == {"dswiglu", "dgeglu", "dsituglu"}
    assert {c.family for c in cases} == set(CASES) and {c.c for c in cases} == {*WIDE, *FP8}
    assert {c.d for c in cases} == {*WIDE, *FP8, *FP4}
    assert all({c.d in types for c in cases if "activation_sf" in c.outputs} == {False, True} for types in (FP8, FP4))
    assert any("amax" in c.outputs and c.d in HALF for c in cases) and any("amax" in c.outputs and c.d in FP4 for c in cases)
    assert any("sfd" in c.outputs and c.config.discrete_col_sfd for c in cases)


def test_half_step_of_fp4():
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    x = torch.tensor(values[:-1]).double()
    assert (half_step(x, torch.uint8) * 2).tolist() == [b - a for a, b in zip(values, values[1:])]


@pytest.mark.parametrize("dtype", [*WIDE, *FP8], ids=str)
def test_half_step_is_half_the_gap_to_the_next_number(dtype):
    "Against all numbers of an 8-bit type, and against the next bit pattern of the wider ones."
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.finfo(dtype)
    x = torch.rand(500, generator=torch.Generator().manual_seed(0)).mul(100).add(info.smallest_normal).to(dtype)
    above = (x.view(bits) + 1).view(dtype)
    assert torch.equal(half_step(x.double(), dtype) * 2, above.double() - x.double())
    tiny = torch.tensor([0.0]).to(dtype)
    assert half_step(tiny.double(), dtype) * 2 == (tiny.view(bits) + 1).view(dtype).double()


def exact(*values): return Truth(torch.tensor([values]).double(), torch.zeros(1, len(values)).double())


def outside(got, truth, dtype): return compare("x", torch.tensor([got]).double(), truth, dtype)["x, outside"][0]


@pytest.mark.parametrize("dtype, got, want, count", [
    (torch.bfloat16, 1.0, 1.00390625, 0),  # a tie may go to either side
    (torch.bfloat16, 1.0078125, 1.00390625, 0),
    (torch.bfloat16, 1.0, 1.004, 1),
    (torch.bfloat16, torch.nan, 1.0, 1),
    (torch.bfloat16, torch.nan, torch.nan, 0),
    (torch.bfloat16, 0.0, torch.nan, 1),  # a NaN must not be hidden
    (torch.bfloat16, -0.0, 0.0, 0),
    (torch.bfloat16, 1e-30, 0.0, 1),
    (torch.float16, torch.inf, 7e4, 0),  # a true overflow
    (torch.float16, -torch.inf, 7e4, 1),
    (torch.float16, torch.inf, 6e4, 1),
    (torch.float16, 65504.0, 7e4, 1),
    (torch.float8_e4m3fn, 448.0, 1e5, 0),  # FP8 saturates
    (torch.float8_e4m3fn, 416.0, 1e5, 1),
    (torch.float8_e5m2, torch.inf, 1e6, 1),
    (torch.uint8, 6.0, 1e5, 0),  # FP4 too
    (torch.uint8, 4.0, 4.9, 0),
    (torch.uint8, 6.0, 4.9, 1),
    (torch.uint8, 4.0, 5.0, 0),  # a tie
    (torch.uint8, 0.0, 0.26, 1),
    (torch.float32, 1 + 2**-22, 1.0, 1)])
def test_one_rounding_and_no_more(dtype, got, want, count): assert outside((got,), exact(want), dtype) == count


@pytest.mark.parametrize("dtype, good, bad", [(torch.bfloat16, torch.inf, 3e38), (torch.float32, torch.inf, torch.nan), (torch.float32, torch.inf, -torch.inf),
                                             (torch.float8_e4m3fn, 448.0, 416.0), (torch.uint8, 6.0, 4.0)])
def test_an_infinity_has_no_bound(dtype, good, bad):
    "An uncertain infinity is one all the same, and what stands beside it is measured."
    truth = Truth(torch.tensor([[torch.inf, 1.0]]).double(), torch.tensor([[torch.inf, 0.0]]).double())
    (error, limit), (count, _) = compare("x", torch.tensor([[good, 1.0]]).double(), truth, dtype).values()
    assert error == count == 0 and 0 < limit < 1
    assert outside((bad, 1.0), truth, dtype) == 1 and outside((good, 3.0), truth, dtype) == 1


def test_the_worst_block_is_reported():
    x = torch.ones(512, 8).double()
    got = x.clone()
    got[300] *= 2  # in the third block of 128 rows
    error, limit = compare("x", got, Truth(x, 0 * x), torch.bfloat16)["x"]
    assert error == pytest.approx((8 / (128 * 8)) ** 0.5) and limit == pytest.approx(2**-8)


@pytest.mark.parametrize("a, code", [(0.0, 0), (1.0, 127), (1.0000001, 128), (0.5, 126), (2.0**-127, 0), (2.0**-126, 1),
                                     (2.0**127, 254), (1e39, 254), (torch.nan, 255)])
def test_scale_code_rounds_up(a, code): assert scale_code(torch.tensor([a], dtype=torch.float64)).item() == code


@pytest.mark.parametrize("a, code", [(0.0, 0), (2.0**-10, 0), (1.01 * 2**-10, 1), (2.0**-9, 1), (1.0, 0x38), (1.0625, 0x38), (1.07, 0x39), (448.0, 0x7E), (1e39, 0x7E),
                                     (torch.inf, 0x7E), (torch.nan, 0x7F)])
def test_nearest_code_rounds_to_nearest(a, code): assert nearest_code(torch.tensor([a], dtype=torch.float64)).item() == code


# A quantised output, judged ----------------------------------------------------------------------------------------------------

NV = Case(ab=torch.uint8, sf=torch.float8_e4m3fn, d=torch.uint8, outputs=("d_col", "sfd"))
MX = Case(Config(sf_vec_size=32), ab=torch.float8_e4m3fn, sf=torch.float8_e8m0fnu, d=torch.float8_e4m3fn, outputs=("d_col", "sfd"))


def judged(x, case, norm_const=1.0, bound=None, change=lambda q, sf: None, dim=1):
    "Elements and scales outside, after `quantize` and a change of its bytes."
    fp4 = case.d in FP4
    q, sf = quantize(x.float(), E2M1 if fp4 else E4M3, sf_vec_size=case.config.sf_vec_size, sf_format=E4M3 if fp4 else E8M0, norm_const=norm_const, dim=dim)
    q, sf = numbers(q), sf.view(torch.uint8).clone()
    change(q, sf)
    truth = Truth(x.double(), torch.zeros_like(x).double() if bound is None else bound)
    return [n for key, (n, _) in compare_quantised(("q", "sf"), q, sf, truth, case, dim, norm_const).items() if "outside" in key]


SAMPLE = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("case, norm_const, dim", [(c, n, dim) for c in (NV, MX) for n in (2.0**-8, 0.3, 1.0, 64.0, 2.0**8) for dim in (0, 1)])
def test_quantize_passes_at_every_constant(case, norm_const, dim): assert judged(SAMPLE, case, norm_const, dim=dim) == [0, 0]


@pytest.mark.parametrize("scale", [1e-6, 2e-3, 1e3, 1e30])
def test_blocks_that_underflow_or_saturate(scale):
    "A scale of 0, subnormal ones, and 448."
    assert judged(SAMPLE * scale, NV) == [0, 0]


def test_a_scale_of_zero_stands_for_zeros():
    def one(q, sf): q[3, 5] = 0.5
    assert judged(SAMPLE * 1e-6, NV, change=one) == [1, 0]


def test_a_nan_of_nvfp4_shows_in_its_scale():
    x = SAMPLE.clone()
    x[5, 20] = torch.nan
    assert judged(x, NV) == [0, 0]
    def hidden(q, sf): sf[5, 1] = 0x30
    def other_code(q, sf): q[5, 16] = 4.0
    assert judged(x, NV, change=hidden) == [16, 1] and judged(x, NV, change=other_code) == [1, 0]
    def spread(q, sf): sf[6, 0], q[6, :16] = 0x7F, 6.0
    assert judged(x, NV, change=spread) == [16, 1]
    def poison(q, sf): sf[:], q[:] = 255, torch.nan  # what nobody wrote
    assert judged(SAMPLE, MX, change=poison) == judged(SAMPLE, NV, change=poison)[:1] + [SAMPLE.numel() // 32] == [SAMPLE.numel(), SAMPLE.numel() // 32]


def test_infinities_saturate():
    x = SAMPLE.clone()
    x[5, 20], x[9, 40] = torch.inf, -torch.inf
    assert judged(x, NV) == judged(x, MX) == [0, 0]


def test_a_backend_that_raises_is_a_failed_case_and_the_table_goes_on():
    def broken(problem, t): raise NotImplementedError("no such tile")
    results = run_cases(broken, "dsrelu")
    assert len(results) == len(CASES["dsrelu"])
    assert all(not r.ok and r.message == "NotImplementedError: no such tile" and r.errors == {} for r in results)


def test_an_unavailable_backend_says_what_it_needs_before_the_first_case():
    seen = []
    with pytest.raises(RuntimeError, match="(?s)backend = 'sm100'.*Blackwell"):
        run_cases("sm100", device="cpu", progress=seen.append)
    with pytest.raises(ValueError, match="backend = 'gpu'.*one of"): run_cases("gpu")
    assert seen == []


def test_progress_hears_of_every_case_of_the_family():
    seen = []
    results = run_cases("reference", "dsrelu", seen.append)
    assert seen == results and [r.case for r in results] == list(CASES["dsrelu"])
    assert all(r.ok and r.seconds > 0 for r in results)


# The truth at the ends of float32 -------------------------------------------------------------------------------------------

def judged_with(case, change):
    "The reference on a case whose inputs a function has edited: the names of what failed, and the tensors."
    t = make_tensors(case)
    change(t)
    truth = oracle(case, t)
    execute(case, t, "reference")
    return [key for key, (error, limit) in judge(case, t, truth).items() if not error <= limit], t


def tiny(t):
    "Products below float32's normal numbers."
    for key in ("sfa", "sfb"): raw(physical(t[key]))[:] = 0x46  # 2^-57
    for key in "ab": t[key].copy_((t[key].float() * 2.0**-8).to(t[key].dtype))


def test_underflow_is_within_its_bound():
    "Beside numbers of 1e-42, whose float32 has two digits; the bound is no blank cheque: half of them missing is seen."
    case = replace(MXFP8[0], d=torch.float8_e4m3fn, outputs=("d_col",))
    wide = replace(MXFP4[0], d=torch.float32, k=64, outputs=())
    for c in (case, MXFP8[0], wide):
        failed, t = judged_with(c, tiny if c.ab in FP8 else lambda t: [raw(physical(t[key]))[:].fill_(0x38) for key in ("sfa", "sfb")])
        assert not failed, failed
    truth = oracle(wide, t)
    live = t["d_row"][:wide.ends[-1], :, 0].double()
    assert 0 < live.abs().max() < 2.0**-120
    t["d_row"][:128] = 0
    assert not all(error <= limit for error, limit in judge(wide, t, truth).values())


C_VALUES = (torch.nan, torch.inf, -torch.inf)
GATE, UP = 5, 37  # columns of one pair


@pytest.mark.parametrize("base", [MXFP8[0], NVFP4[0], FP4_D, replace(NVFP4[0], d=torch.float32, outputs=("dbias",))], ids=["mxfp8", "nvfp4", "fp4 D", "f32 D"])
@pytest.mark.parametrize("act, at, value", [("dswiglu", GATE, torch.nan), *(("dswiglu", UP, v) for v in C_VALUES), *((a, c, v) for a in ("dgeglu", "dsituglu") for c in (GATE, UP) for v in C_VALUES
                                             if (a, c, v) != ("dgeglu", GATE, -torch.inf))])  # there the formula has 0·inf, whose limit the reference takes
def test_nan_and_infinities_of_c(base, act, at, value):
    "A NaN spoils what reads it and nothing else: the block of up's gradient, under dSwiGLU, is not lost to a NaN of up."
    def change(t): t["c"][70, at] = value
    case = variants(base, dict(act_func=act))[0]
    failed, t = judged_with(case, change)
    assert not failed, failed
    if value == value: return
    lost = oracle(case, t)["d"].value[70].isnan().nonzero().flatten().tolist()
    assert lost == ([GATE] if (act, at) == ("dswiglu", UP) else [GATE, UP])


@pytest.mark.parametrize("value", ["mask", "value"])
def test_a_nan_of_c_under_both_filters(value):
    def change(t): t["c"][70, UP], t["c"][71, GATE] = torch.nan, torch.nan
    failed, t = judged_with(Case(Config(act_func="dgeglu", geglu_filter=value)), change)
    assert not failed and t["d_row"][70, [GATE, UP], 0].isnan().all() and t["d_row"][71, [GATE, UP], 0].isnan().all()


def test_a_bound_that_is_no_number_loses_no_block():
    x, bound = SAMPLE.clone(), torch.zeros(64, 64).double()
    bound[3, 5] = torch.nan
    assert judged(x, NV, bound=bound) == judged(x, MX, bound=bound) == [0, 0]
    def hidden(q, sf): q[3, 40] *= 2
    assert judged(x, MX, bound=bound, change=hidden) == [1, 0]  # the block beside it is judged


# In several processes ---------------------------------------------------------------------------------------------------

def told(results): return [(r.case, r.ok, r.errors, r.message, r.supported) for r in results]


def test_one_job_and_two_give_the_same_results_in_the_same_order():
    seen = []
    one, two = run_cases("reference", "dsrelu", jobs=1), run_cases("reference", "dsrelu", seen.append, jobs=2)
    assert told(one) == told(two) == told(seen) and [r.case for r in two] == list(CASES["dsrelu"])


def dies(case):
    "A worker that dies on the second case, raises nothing and leaves no result."
    if case == CASES["dsrelu"][1]: os._exit(3)
    return Result(case, True)


def test_a_worker_that_dies_fails_its_own_case_only():
    cases = list(CASES["dsrelu"][:5])
    results = list(spread(dies, cases, 2))
    assert [r.case for r in results] == cases and [r.ok for r in results] == [True, False, True, True, True]
    assert "worker process of this case died" in results[1].message


def raises(case): raise LookupError(f"no data for {case.name}")


def test_what_a_worker_raises_is_raised_here():
    with pytest.raises(LookupError, match="no data for bf16 dswiglu"): list(spread(raises, [Case(), Case(k=8)], 2))


def test_jobs_of_a_backend():
    assert jobs_for("reference") == jobs_for("sm100") == jobs_for("sm90") == jobs_for(dies) == 1
    assert 1 <= jobs_for("emulate") <= os.cpu_count()


def test_an_output_that_differs_from_run_to_run_is_seen_under_deterministic():
    case, calls = replace(Case(), config=Config(deterministic=True)), []
    def unstable(problem, t):
        api.BACKENDS["reference"].compile(problem)(problem, t)
        calls.append(1)
        t["dprob"][0] *= 1 + 2.0**-20 * len(calls)  # within the bound, but not the same
    result = run_case(case, unstable)
    assert not result.ok and result.message.startswith("repeat, other bytes")
