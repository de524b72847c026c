"The derivatives are derivatives: against float64 autograd, finite differences, and 50-digit arithmetic."
import mpmath as mp
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from dglu.activation import (
    FILTERS,
    PRESETS,
    Activation,
    clamp_mask,
    geglu_grad,
    sech2,
    sigmoid,
    silu,
    silu_grad,
    situglu_grad,
    srelu,
    srelu_grad,
    swiglu_grad,
)

# Forward formulas as the contract writes them; autograd makes the expected derivatives from these.
PLAIN = {
    "dswiglu": lambda gate, up, a: gate * torch.sigmoid(gate) * up,
    "dgeglu": lambda gate, up, a: (
        gate.clamp(max=a.clamp_max) * torch.sigmoid(a.alpha * gate.clamp(max=a.clamp_max))
        * (up.clamp(a.clamp_min, a.clamp_max) + a.offset)),
    "dsituglu": lambda gate, up, a: (
        a.beta1 * torch.tanh(gate / a.beta1) * torch.sigmoid(gate) * a.beta2 * torch.tanh(up / a.beta2)),
}


def autograd(f, *xs):
    xs = [x.detach().clone().requires_grad_() for x in xs]
    return torch.autograd.grad(f(*xs).sum(), xs)


def reals(lo, hi):
    return st.floats(lo, hi, allow_nan=False, allow_subnormal=False)


settings_of_any_activation = st.builds(
    Activation, st.sampled_from(sorted(PLAIN)), alpha=reals(0.1, 4), clamp_max=reals(0.5, 20), clamp_min=reals(-20, 0),
    offset=reals(-2, 2), beta1=reals(0.5, 50), beta2=reals(0.5, 50))
numbers = st.lists(reals(-50, 50), min_size=8, max_size=8)


@given(settings_of_any_activation, numbers, numbers)
def test_forward_and_gradient_match_autograd(act, gates, ups):
    on_bounds = [act.clamp_max, act.clamp_min]
    gate = torch.tensor(gates + on_bounds * 2, dtype=torch.float64)
    up = torch.tensor(ups + on_bounds + on_bounds[::-1], dtype=torch.float64)
    plain = lambda g, u: PLAIN[act.act_func](g, u, act)  # noqa: E731
    assert_close(act.forward(gate, up), plain(gate, up), rtol=1e-11, atol=0)
    assert_close(act.grad(gate, up), autograd(plain, gate, up), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", PRESETS)
def test_gradcheck_by_finite_differences(name):
    act, rng = PRESETS[name], torch.Generator().manual_seed(3)
    gate, up = (4 * torch.randn(40, generator=rng, dtype=torch.float64) for _ in range(2))  # none near a bound
    step = 1e-6
    by_gate = (act.forward(gate + step, up) - act.forward(gate - step, up)) / (2 * step)
    by_up = (act.forward(gate, up + step) - act.forward(gate, up - step)) / (2 * step)
    assert_close(act.grad(gate, up), (by_gate, by_up), rtol=1e-7, atol=1e-8)
    assert torch.autograd.gradcheck(act.forward, (gate.requires_grad_(), up.requires_grad_()))


@pytest.mark.parametrize("x", [0.0, -0.0, -1.5, 3.0])
def test_autograd_through_the_safe_forms_is_right_even_at_zero(x):
    at = torch.tensor([x], dtype=torch.float64)
    s = 1 / (1 + mp.exp(-mp.mpf(x)))
    assert_close(autograd(sigmoid, at)[0].item(), float(s * (1 - s)))
    assert_close(autograd(silu, at)[0].item(), float(s + x * s * (1 - s)))
    second = 2 * s * (1 - s) + x * s * (1 - s) * (1 - 2 * s)
    assert_close(autograd(silu_grad, at)[0].item(), float(second))


def rotation(grad, gate, up):
    "∂dgate/∂up - ∂dup/∂gate: zero for the gradient of anything."
    _, one = autograd(lambda g, u: grad(g, u)[0] + 0 * g, gate, up)
    other, _ = autograd(lambda g, u: grad(g, u)[1] + 0 * u, gate, up)
    return one - other


@given(settings_of_any_activation, numbers, numbers)
def test_mixed_partials_agree(act, gates, ups):
    gate, up = torch.tensor(gates, dtype=torch.float64), torch.tensor(ups, dtype=torch.float64)
    assert rotation(act.grad, gate, up).abs().max() < 1e-11


# ------------------------------------------------------------------------------------------------- mask and value

# gate (or up), then what the contract's two filters give for the bounds -7 and 7
BOUNDS = [(-8.0, 0, 0), (-7.0, 1, -7), (-6.0, 1, -6), (0.0, 1, 0), (6.0, 1, 6), (7.0, 1, 7), (8.0, 0, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("raw, mask, value", BOUNDS)
def test_filters_at_the_bounds(raw, mask, value, dtype):
    x = torch.tensor(raw, dtype=dtype)
    assert FILTERS["mask"](x, -7, 7).item() == mask and FILTERS["value"](x, -7, 7).item() == value
    assert FILTERS["mask"](x, -7, 7).dtype == FILTERS["value"](x, -7, 7).dtype == dtype
    assert autograd(lambda x: x.clamp(-7, 7), x)[0].item() == mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [7.0, 10.0, 7.1, 0.3])
def test_gradient_is_kept_at_a_bound_and_gone_one_ulp_beyond(bound, dtype):
    at = torch.tensor(bound, dtype=dtype)
    beyond = at.nextafter(torch.tensor(torch.inf, dtype=dtype))
    assert clamp_mask(at, -bound, bound) == clamp_mask(-at, -bound, bound) == 1
    assert clamp_mask(beyond, -bound, bound) == clamp_mask(-beyond, -bound, bound) == 0
    options = dict(clamp_max=bound, clamp_min=-bound)
    assert geglu_grad(at, at, **options)[0] > 0 and geglu_grad(at, at, **options)[1] > 0
    assert geglu_grad(beyond, at, **options)[0] == 0 and geglu_grad(at, beyond, **options)[1] == 0
    assert geglu_grad(-beyond, -at, **options)[1] != 0, "the gate has no lower bound"


@given(reals(0.1, 4), reals(0.5, 20), reals(-20, 0), reals(-2, 2), numbers, numbers)
def test_value_filter_is_the_derivative_times_the_raw_input(alpha, hi, lo, offset, gates, ups):
    gate, up = torch.tensor(gates + [hi, lo], dtype=torch.float64), torch.tensor(ups + [lo, hi], dtype=torch.float64)
    options = dict(alpha=alpha, clamp_max=hi, clamp_min=lo, offset=offset)
    dgate, dup = geglu_grad(gate, up, filter="mask", **options)
    by_value = geglu_grad(gate, up, filter="value", **options)
    assert_close(by_value, (dgate * gate, dup * up), rtol=1e-13, atol=1e-300)


def test_value_filter_by_the_contract_written_out():
    gate, up = torch.tensor([-3.0, 2.0, 8.0, 7.0]).double(), torch.tensor([1.0, -7.5, 2.0, -7.0]).double()
    clamped_gate, clamped_input = gate.minimum(torch.tensor(7.0)), up.clamp(-7, 7)
    gate_filter = torch.tensor([-3.0, 2.0, 0.0, 7.0]).double()
    input_filter = torch.tensor([1.0, 0.0, 2.0, -7.0]).double()
    s = 1 / (1 + torch.exp(-1.702 * clamped_gate))
    dgate = (clamped_input + 1) * s * (1 + 1.702 * clamped_gate * (1 - s)) * gate_filter
    assert_close(geglu_grad(gate, up, filter="value"), (dgate, clamped_gate * s * input_filter), rtol=1e-12, atol=0)


def test_value_filter_is_no_gradient_of_anything():
    gate, up = torch.tensor([-2.0, 1.0, 3.0]).double(), torch.tensor([4.0, -1.0, 3.0]).double()
    act = Activation("dgeglu", filter="value")
    assert_close(rotation(act.grad, gate, up), silu_grad(gate, 1.702) * (gate - up), rtol=1e-12, atol=1e-14)


# -------------------------------------------------------------------------------------------- accuracy, 50 digits

def mp_sigmoid(x):
    return 1 / (1 + mp.exp(-x))


def tail_floats(dtype):
    "Numbers of `dtype` as far out as exp() reaches, dense near zero and in the tails."
    reach, width = {torch.float32: (103, 32), torch.float64: (744, 64)}[dtype]
    return st.one_of(st.floats(-reach, reach, width=width), st.floats(-4, 4, width=width))


def check(values, truths, sizes, dtype, ulps):
    "|value - truth| within `ulps` roundings of the terms it is summed from, plus one of the subnormal grid."
    eps, grid = torch.finfo(dtype).eps, torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    for value, truth, size in zip(values.tolist(), truths, sizes):
        assert abs(mp.mpf(value) - truth) <= ulps * eps * size + 400 * grid, (value, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_safe_forms_are_exact_to_a_few_ulp(dtype):
    @given(st.lists(tail_floats(dtype), min_size=8, max_size=8), st.sampled_from([0.5, 1.0, 2.0]))
    def run(xs, alpha):
        x = torch.tensor(xs, dtype=dtype)
        with mp.workdps(50):
            z = [mp.mpf(v) * alpha for v in x.tolist()]
            s, t = [mp_sigmoid(v) for v in z], [mp_sigmoid(-v) for v in z]
            check(sigmoid(alpha * x), s, s, dtype, 2)
            truth = [v / alpha * a for v, a in zip(z, s)]
            check(silu(x, alpha), truth, map(abs, truth), dtype, 3)
            check(silu_grad(x, alpha), [a + v * a * b for v, a, b in zip(z, s, t)],
                  [a + abs(v) * a * b for v, a, b in zip(z, s, t)], dtype, 5)
            squares = [mp.sech(v / alpha) ** 2 for v in z]
            check(sech2(x), squares, squares, dtype, 4)
    run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_situglu_slope_is_exact_to_a_few_ulp(dtype):
    @given(st.lists(tail_floats(dtype), min_size=8, max_size=8))
    def run(xs):
        x = torch.tensor(xs, dtype=dtype)
        far = torch.full_like(x, torch.inf)  # T_u = β2 = 32 there
        with mp.workdps(50):
            z = [mp.mpf(v) for v in x.tolist()]
            s, t = [mp_sigmoid(v) for v in z], [mp_sigmoid(-v) for v in z]
            first = [32 * a * mp.sech(v / 4) ** 2 for v, a in zip(z, s)]
            second = [32 * a * b * 4 * mp.tanh(v / 4) for v, a, b in zip(z, s, t)]
            check(situglu_grad(x, far, beta2=32.0)[0], [p + q for p, q in zip(first, second)],
                  [p + abs(q) for p, q in zip(first, second)], dtype, 8)
    run()


def test_swiglu_slope_is_zero_at_minus_one_minus_lambert_w():
    root = float(-1 - mp.lambertw(mp.exp(-1)).real)
    at = torch.tensor([root - 1e-12, root, root + 1e-12], dtype=torch.float64)
    dgate, _ = swiglu_grad(at, torch.full_like(at, 3.0))
    assert dgate[0] < 0 < dgate[2] and dgate[1].abs() < 1e-15
    assert_close(silu(at[1]).item(), root + 1, rtol=1e-15, atol=0)


@given(numbers)
def test_squared_relu_and_its_derivative(xs):
    x = torch.tensor(xs, dtype=torch.float64)
    assert torch.equal(srelu(x), torch.tensor([max(v, 0.0) ** 2 for v in xs], dtype=torch.float64))
    assert torch.equal(srelu_grad(x), autograd(lambda x: x.clamp(min=0) ** 2, x)[0])
