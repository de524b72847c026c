"`dglu check`: the reference passes its table, planted faults fail it, and its judgement is as sharp as it says."
import random
from dataclasses import replace

import pytest
import torch

from dglu import api
from dglu.check import CASES, FAULTS, compare, execute, half_step, random_case, run_case, run_cases, scale_code, shows
from dglu.contract import FP4, FP8, HALF, WIDE, Config
from dglu.truth import Case, Truth, make_tensors

EVERY = [case for family in CASES.values() for case in family]


@pytest.mark.parametrize("case", EVERY, ids=lambda c: c.name)
def test_the_reference_passes(case):
    result = run_case(case, "reference", seed=1)
    assert result.ok and not result.message, result.message
    assert {"d_row", "outputs, stray bytes", "inputs, changed bytes"} <= set(result.errors)
    assert all(f"{key}, outside" in result.errors for key in case.outputs if key != "sfd")


@pytest.mark.parametrize("name, family", [(name, family) for name in FAULTS for family in FAULTS[name].families])
def test_a_planted_fault_is_caught(name, family):
    fault = FAULTS[name]
    able = [case for case in CASES[family] if fault.needs(case) and case.ends[-1]][:2]
    results = [run_case(case, fault.run, seed=1) for case in able]
    assert results and all(not r.ok and shows(fault, r) for r in results), [r.message for r in results]


@pytest.mark.parametrize("field, values", {
    "ab": {torch.bfloat16, *FP8, *FP4}, "sf": {None, torch.float8_e8m0fnu, torch.float8_e4m3fn}, "c": {*WIDE, *FP8},
    "d": {*WIDE, *FP8}, "weights": {"dense", "discrete"}, "prob": {True, False}, "activation": {None, *WIDE},
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
    assert 80 <= len(EVERY) <= 170 and len({c.name for c in EVERY}) == len(EVERY)


def test_random_cases_are_legal():
    for seed in range(200): execute(c := random_case(random.Random(seed)), make_tensors(c), lambda problem, t: None)


def test_random_cases_cover_the_space():
    cases = [random_case(random.Random(seed)) for seed in range(600)]
    schemes = {(c.ab, c.sf, c.config.sf_vec_size) for c in cases}
    assert {ab for ab, _, _ in schemes} == {torch.bfloat16, *FP8, *FP4} and len(schemes) == 1 + 2 + 2 * 3
    assert {c.config.act_func for c in cases} == {"dswiglu", "dgeglu", "dsituglu"}
    assert {c.family for c in cases} == set(CASES) and {c.d for c in cases} == {c.c for c in cases} == {*WIDE, *FP8}
    assert any("amax" in c.outputs and c.d in HALF for c in cases)
    assert any("sfd" in c.outputs and c.config.discrete_col_sfd for c in cases)


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
    (torch.float32, 1 + 2**-22, 1.0, 1)])
def test_one_rounding_and_no_more(dtype, got, want, count): assert outside((got,), exact(want), dtype) == count


def test_the_worst_block_is_reported():
    x = torch.ones(512, 8).double()
    got = x.clone()
    got[300] *= 2  # in the third block of 128 rows
    error, limit = compare("x", got, Truth(x, 0 * x), torch.bfloat16)["x"]
    assert error == pytest.approx((8 / (128 * 8)) ** 0.5) and limit == pytest.approx(2**-8)


@pytest.mark.parametrize("a, code", [(0.0, 0), (1.0, 127), (1.0000001, 128), (0.5, 126), (2.0**-127, 0), (2.0**-126, 1),
                                     (2.0**127, 254), (1e39, 254), (torch.nan, 255)])
def test_scale_code_rounds_up(a, code): assert scale_code(torch.tensor([a], dtype=torch.float64)).item() == code


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


def test_an_output_that_differs_from_run_to_run_is_seen_under_deterministic():
    case, calls = replace(Case(), config=Config(deterministic=True)), []
    def unstable(problem, t):
        api.BACKENDS["reference"].compile(problem)(problem, t)
        calls.append(1)
        t["dprob"][0] *= 1 + 2.0**-20 * len(calls)  # within the bound, but not the same
    result = run_case(case, unstable)
    assert not result.ok and result.message.startswith("repeat, other bytes")
