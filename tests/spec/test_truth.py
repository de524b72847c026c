"The oracle's tensors say what a case says; its bounds hold for float32 sums in any order, cut off as in tensor cores."
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest
import torch

from dglu.check import CASES
from dglu.contract import OUTPUTS, Config
from dglu.truth import GUARD, Case, Truth, expert_truth, make_tensors, memory, numbers, oracle, row_sum, scale_bytes

FP8 = Case(Config(sf_vec_size=32), ab=torch.float8_e4m3fn, sf=torch.float8_e8m0fnu, d=torch.float8_e4m3fn,
           outputs=("d_col", "sfd"), k=96)
FP4 = Case(Config(sf_vec_size=16), ab=torch.uint8, sf=torch.float8_e4m3fn, outputs=("amax",), k=96)
EVERY = [case for family in CASES.values() for case in family]


def truncated_sum(products: torch.Tensor) -> torch.Tensor:
    "Sum along the last dimension in float32, each addition cut off instead of rounded."
    total = torch.zeros(products.shape[:-1])
    for term in products.double().unbind(-1):
        exact = total.double() + term
        near = exact.float()
        past = near.double().abs() > exact.abs()
        total = torch.where(past, torch.nextafter(near, torch.zeros_like(near)), near)
    return total


@pytest.mark.parametrize("seed", range(4))
def test_the_product_bound_holds_for_truncated_sums_in_any_order(seed):
    case = Case(counts=(256,), n=32, k=96)
    t = make_tensors(case, seed)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(seed))
    a, b = t["a"][:64, order, 0].float(), t["b"][:, order, 0].float()
    r = truncated_sum(a[:, None] * b) * (t["alpha"] ** 2)
    exact = t["alpha"].double() ** 2 * (a.double() @ b.double().T)
    bound = 96 * 2**-23 * t["alpha"].double() ** 2 * (a.double().abs() @ b.double().abs().T)
    assert ((r.double() - exact).abs() <= bound).all()
    assert (r.double() - exact).abs().max() > bound.max() / 1e4  # and the errors are not zero


def test_a_sum_in_float32_stays_within_its_bound():
    x = torch.randn(50, 400, generator=torch.Generator().manual_seed(0))
    start = torch.randn(50, generator=torch.Generator().manual_seed(1))
    total = start.clone()
    for column in x.T: total += column
    truth = row_sum(Truth(x.double(), torch.zeros(50, 400).double()), 1, start.double())
    assert ((total.double() - truth.value).abs() <= truth.bound).all()


@pytest.mark.parametrize("act", ["dswiglu", "dgeglu", "dsituglu"])
def test_derivatives_equal_finite_differences(act):
    "Change one element of C in float64 and watch the loss: D is the slope, times prob, of sum(R act)."
    case = replace(FP8, config=replace(FP8.config, act_func=act), c=torch.float32, counts=(256,), n=32)
    t = make_tensors(case)
    t["beta"].fill_(1.0)
    t["c"].mul_(0.3)  # off the clamps' bounds
    at = expert_truth(case, t, 0, slice(0, 256))
    step = 2.0**-8
    for column, row in ((5, 7), (40, 200)):
        sums = []
        for sign in (1, -1):
            moved = t | {"c": t["c"].clone()}
            moved["c"][row, column] += sign * step
            loss = expert_truth(case, moved, 0, slice(0, 256))["dprob"].value[row].sum()
            sums.append((loss, moved["c"][row, column].item()))
        (high, right), (low, left) = sums
        slope = (high - low) / (right - left) * t["prob"][row, 0, 0]
        torch.testing.assert_close(at["d"].value[row, column], slope, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_every_code_decodes_as_in_ml_dtypes(name):
    codes = torch.arange(256, dtype=torch.uint8)
    ours, theirs = numbers(codes.view(getattr(torch, name))).numpy(), codes.numpy().view(getattr(ml_dtypes, name))
    assert np.array_equal(ours, theirs.astype(np.float64), equal_nan=True)


def test_every_fp4_pair_decodes_as_in_ml_dtypes():
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = np.stack([codes.numpy() & 15, codes.numpy() >> 4], 1).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(numbers(codes[:, None]).numpy(), pairs.astype(np.float64))


@pytest.mark.parametrize("case", EVERY[::5], ids=lambda c: c.name)
def test_outputs_are_poisoned_and_guarded(case):
    t = make_tensors(case)
    for key in set(OUTPUTS) - {"dprob"}:
        if key in t: assert (memory(t[key]) == 255).all() and t[key].data_ptr() % 16 == 0
    if "dprob" in t: assert (memory(t["dprob"])[:GUARD] == 255).all() and t["dprob"].isfinite().all()


@pytest.mark.parametrize("case", [Case(), FP8, FP4], ids=lambda c: c.name)
def test_no_scalar_hides_a_mistake(case):
    t = make_tensors(case)
    for key in ("alpha", "beta"): assert t[key].abs().unique().numel() == 3 and (t[key].abs() != 1).all()
    assert t["prob"].unique().numel() > 500 and (t["prob"] == 0).any() and t["prob"].max() < 1
    assert t["dprob"].unique().numel() > 500  # it accumulates


def test_the_same_seed_gives_the_same_tensors():
    a, b, c = make_tensors(FP8, 1), make_tensors(FP8, 1), make_tensors(FP8, 2)
    assert all(torch.equal(memory(a[key]), memory(b[key])) for key in a)
    assert not torch.equal(memory(a["a"]), memory(c["a"])) and not torch.equal(memory(a["sfb"]), memory(c["sfb"]))


def test_scale_bytes_follow_the_formula():
    t = make_tensors(replace(FP8, n=160, k=320))
    flat = memory(t["sfa"].clone(memory_format=torch.preserve_format))
    got = scale_bytes(t["sfa"], 768, 10)
    for row, block in ((0, 0), (33, 5), (767, 9), (130, 4), (95, 3)):
        at = row % 32 * 16 + row // 32 % 4 * 4 + block % 4 + 512 * (block // 4) + 512 * 3 * (row // 128)
        assert got[row, block] == flat[at] != 0


@pytest.mark.parametrize("case", EVERY[::7], ids=lambda c: c.name)
def test_truth_is_finite_and_its_bounds_are_bounds(case):
    truth = oracle(case, make_tensors(case))
    for key, (value, bound) in truth.items():
        assert value.shape == bound.shape and (bound[value.isfinite()] >= 0).all(), key
        assert case.data == "nan" or value.isfinite().all(), key


def test_a_name_tells_every_field():
    "Changing any one field of a case or of its configuration changes its name."
    other = {"ab": torch.float8_e5m2, "sf": torch.float8_e4m3fn, "c": torch.float16, "d": torch.float8_e5m2,
             "weights": "discrete", "counts": (1,), "spare": 256, "n": 96, "k": 64, "outputs": (),
             "activation": torch.float16, "prob": False, "norm_const": 2.0, "activation_norm_const": 2.0, "data": "zeros"}
    assert set(other) == {f.name for f in fields(Case)} - {"config"}
    assert len({replace(FP8, **{key: value}).name for key, value in other.items()} | {FP8.name}) == len(other) + 1
