"At the ends of the number line: limits where they exist, NaN exactly where NaN went in, overflow to infinity."
import math

import pytest
import torch
from torch.testing import assert_close

from dglu.activation import (
    EPILOGUE_OPS,
    FILTERS,
    PRESETS,
    Activation,
    geglu,
    geglu_grad,
    sech2,
    sigmoid,
    silu,
    silu_grad,
    srelu,
    srelu_grad,
    swiglu,
    swiglu_grad,
)

inf, nan = math.inf, math.nan
ACTS = {**PRESETS, "value filter": Activation("dgeglu", filter="value")}
DTYPES = [torch.float32, torch.float64]


def at(act, gate, up, dtype):
    "[act, dgate, dup] at one point, as floats."
    gate, up = torch.tensor([gate], dtype=dtype), torch.tensor([up], dtype=dtype)
    return [v.item() for v in (act.forward(gate, up), *act.grad(gate, up))]


TANH, SECH2 = 25 * math.tanh(2 / 25), 1 / math.cosh(2 / 25) ** 2
Q = 7 / (1 + math.exp(-1.702 * 7))  # GeGLU's gate at its bound, 7·σ(7a)
S = 1 / (1 + math.exp(-1.702))      # and its sigmoid at 1
TABLE = [  # activation, gate, up: act, dgate, dup
    ("swiglu", -inf, 2.0, 0, 0, 0),
    ("swiglu", inf, 2.0, inf, 2, inf),
    ("swiglu", inf, -2.0, -inf, -2, inf),
    ("swiglu", -1e30, 2.0, 0, 0, 0),
    ("swiglu", 1e30, 2.0, 2e30, 2, 1e30),
    ("swiglu", 0.0, 2.0, 0, 1, 0),
    ("swiglu", -0.0, 2.0, 0, 1, 0),
    ("swiglu", 1.0, inf, inf, inf, 1 / (1 + math.exp(-1))),
    ("gpt_oss", -inf, 2.0, 0, 0, 0),
    ("gpt_oss", inf, 2.0, 3 * Q, 0, Q),
    ("gpt_oss", -1e30, 2.0, 0, 0, 0),
    ("gpt_oss", 1e30, 2.0, 3 * Q, 0, Q),
    ("gpt_oss", 0.0, 2.0, 0, 1.5, 0),
    ("gpt_oss", 7.0, inf, 8 * Q, 8 * Q / 7 * (1 + 1.702 * 7 * (1 - Q / 7)), 0),
    ("gpt_oss", inf, -inf, -6 * Q, 0, 0),
    ("gpt_oss", -inf, inf, 0, 0, 0),
    ("deepseek_v4", inf, inf, 100 / (1 + math.exp(-10)), 0, 0),
    ("situglu", -inf, 2.0, 0, 0, 0),
    ("situglu", inf, 2.0, 4 * TANH, 0, 4 * SECH2),
    ("situglu", 1e30, 2.0, 4 * TANH, 0, 4 * SECH2),
    ("situglu", inf, -inf, -100, 0, 0),
    ("situglu", -inf, inf, 0, 0, 0),
    ("value filter", -inf, 2.0, 0, 0, 0),
    ("value filter", -1e30, 2.0, 0, 0, 0),
    ("value filter", inf, 2.0, 3 * Q, 0, 2 * Q),
    ("value filter", 1.0, -inf, -6 * S, -6 * S * (1 + 1.702 * (1 - S)), 0),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, gate, up, value, dgate, dup", TABLE)
def test_limits(name, gate, up, value, dgate, dup, dtype):
    rel = 1e-6 if dtype == torch.float32 else 1e-13
    assert at(ACTS[name], gate, up, dtype) == [pytest.approx(v, rel=rel, abs=0) for v in (value, dgate, dup)]


def special(dtype):
    info = torch.finfo(dtype)
    tiny = [0.0, info.tiny * info.eps, info.tiny]
    magnitudes = tiny + [1.2784645, 7.0, 7.0 + 4 * info.eps, 10.0, 17.0, 88.8, 89.0, 709.0, 1e4, info.max]
    return [sign * m for m in magnitudes for sign in (1, -1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTS)
def test_no_nan_without_one_going_in(name, dtype):
    ends = torch.tensor(special(dtype) + [inf, -inf], dtype=dtype)
    gate, up = torch.cartesian_prod(ends, ends).T
    if name == "swiglu":  # no clamp: ∞·0 between its two factors stays NaN
        keep = up.isfinite() & ~(gate.isposinf() & (up == 0))
        gate, up = gate[keep], up[keep]
    for out in (ACTS[name].forward(gate, up), *ACTS[name].grad(gate, up)):
        assert not out.isnan().any(), (gate[out.isnan()], up[out.isnan()])
        assert out.dtype == dtype and out.shape == gate.shape


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v4", "situglu", "value filter"])
def test_bounded_activations_have_bounded_derivatives(name):
    gates = torch.tensor(special(torch.float32) + [inf, -inf])
    grid = torch.cartesian_prod(gates, gates).T
    for out in (ACTS[name].forward(*grid), *ACTS[name].grad(*grid)):
        assert out.isfinite().all() and out.abs().max() <= 121


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize("other", [0.0, 2.0, -9.0, 11.0, inf, -inf])
def test_nan_passes_clamps_masks_and_filters(name, other, dtype):
    assert all(map(math.isnan, at(ACTS[name], nan, other, dtype)))
    value, dgate, dup = at(ACTS[name], other, nan, dtype)
    assert math.isnan(value) and math.isnan(dgate)
    assert math.isnan(dup) == (name != "swiglu"), "only SwiGLU's dup does not depend on up"


@pytest.mark.parametrize("name", FILTERS)
def test_filters_pass_nan_on_and_torch_does_not(name):
    x = torch.tensor(nan, requires_grad=True)
    x.clamp(-7, 7).backward()
    assert FILTERS[name](x.detach(), -7, 7).isnan() and x.grad == 0


@pytest.mark.parametrize("f", [sigmoid, silu, silu_grad, sech2, srelu, srelu_grad, *EPILOGUE_OPS.values()])
def test_nan_in_nan_out(f):
    out = f(torch.tensor([nan, 1.0]))
    assert out[0].isnan() and not out[1].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_beyond_the_largest_number_are_infinities_with_the_right_sign(dtype):
    big = torch.finfo(dtype).max / 4
    gate, up = torch.tensor([big, big, -big], dtype=dtype), torch.tensor([big, -big, big], dtype=dtype)
    assert swiglu(gate, up).tolist() == [inf, -inf, 0]
    assert [d.tolist() for d in swiglu_grad(gate, up)] == [[big, -big, 0], [big, big, 0]], "the derivative fits"


def test_large_alpha_and_no_clamps_at_infinity():
    gate, up = torch.tensor([-inf, -3e38, 3e38, inf]), torch.ones(4)
    options = dict(alpha=3e38, clamp_max=inf, clamp_min=-inf, offset=0.0)
    assert geglu(gate, up, **options).tolist() == [0, 0, gate[2].item(), inf]
    assert geglu_grad(gate, up, **options)[0].tolist() == [0, 0, 1, 1]
    assert geglu_grad(gate, up, filter="value", **options)[0].tolist() == [0, 0, gate[2].item(), inf]


def test_the_sigmoid_reaches_the_last_subnormal():
    x = torch.tensor([-89.0, -100.0, -103.0])
    assert (x.sigmoid() == 0).all(), "torch's stops early; if this fails, `sigmoid` can become torch's"
    assert_close(sigmoid(x).double(), x.double().sigmoid(), rtol=0, atol=2.0**-149)
    assert sigmoid(torch.tensor(-720.0, dtype=torch.float64)) > 0


def test_infinity_times_zero_is_nan_without_a_clamp_and_a_number_with_one():
    gate, up = torch.tensor([-inf, -1000.0, 0.0, inf]), torch.tensor([inf, inf, inf, 0.0])
    assert swiglu(gate, up).isnan().all()
    assert PRESETS["deepseek_v4"].forward(gate, up).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("op, expected", [(None, [-2, 0.5, 3, inf, -inf]), ("identity", [-2, 0.5, 3, inf, -inf]),
                                          ("relu", [0, 0.5, 3, inf, 0]), ("srelu", [0, 0.25, 9, inf, 0])])
def test_epilogue_ops(op, expected):
    assert EPILOGUE_OPS[op](torch.tensor([-2.0, 0.5, 3.0, inf, -inf])).tolist() == expected
    assert EPILOGUE_OPS[op](torch.tensor([nan])).isnan()
