"An activation's settings: presets by name, defaults as in the contract, and errors that say what to do."
import inspect
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from dglu.activation import ACT_FUNCS, EPILOGUE_OPS, FILTERS, PRESETS, SETTINGS, Activation, geglu_grad

PRESET_TABLE = {  # name: contract's act_func and the settings that it reads
    "swiglu": ("dswiglu", {}),
    "gpt_oss": ("dgeglu", dict(alpha=1.702, clamp_max=7.0, clamp_min=-7.0, offset=1.0)),
    "deepseek_v4": ("dgeglu", dict(alpha=1.0, clamp_max=10.0, clamp_min=-10.0, offset=0.0)),
    "situglu": ("dsituglu", dict(beta1=4.0, beta2=25.0)),
}


@pytest.mark.parametrize("name", PRESET_TABLE)
def test_preset(name):
    act_func, settings = PRESET_TABLE[name]
    assert PRESETS[name].act_func == act_func and PRESETS[name].settings == settings and PRESETS[name].filter == "mask"
    assert set(PRESETS) == set(PRESET_TABLE)


@pytest.mark.parametrize("name, forward", {
    "swiglu": lambda g, u: torch.nn.functional.silu(g) * u,
    "gpt_oss": lambda g, u: g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)) * (u.clamp(-7, 7) + 1),
    "deepseek_v4": lambda g, u: torch.nn.functional.silu(g.clamp(max=10)) * u.clamp(-10, 10),
    "situglu": lambda g, u: 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25),
}.items())
def test_preset_computes_the_model_it_is_named_after(name, forward):
    gate, up = 12 * torch.randn(2, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(PRESETS[name].forward(gate, up), forward(gate, up), rtol=1e-12, atol=0)


def test_a_value_filter_changes_dgeglu_alone():
    gate, up = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, act in PRESETS.items():
        same = all(map(torch.equal, act.grad(gate, up), replace(act, filter="value").grad(gate, up)))
        assert same == (act.act_func != "dgeglu"), name


def test_defaults_are_the_contracts():
    assert Activation() == Activation("dswiglu", 1.702, 7.0, -7.0, 1.0, 4.0, 25.0, "mask")
    defaults = {f.name: f.default for f in fields(Activation)}
    for functions in ACT_FUNCS.values():
        for f in functions[:2]:
            options = {n: p.default for n, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}
            assert options == {n: defaults[n] for n in options}, f.__name__


def test_the_same_settings_are_one_cache_key():
    same = [Activation("dgeglu"), Activation("dgeglu", clamp_max=7), Activation("dgeglu", clamp_min=np.float64(-7.0))]
    assert len(set(same)) == 1 and all(type(a.clamp_max) is type(a.clamp_min) is float for a in same)
    assert len({Activation("dgeglu"), Activation("dgeglu", alpha=1.0), Activation("dgeglu", filter="value")}) == 3
    assert pickle.loads(pickle.dumps(same[0])) == same[0]


def test_frozen():
    with pytest.raises(FrozenInstanceError): Activation().alpha = 1.0


@pytest.mark.parametrize("options", [
    dict(clamp_max=float("inf"), clamp_min=float("-inf")), dict(clamp_min=3, clamp_max=4), dict(offset=0),
    dict(offset=-1), dict(alpha=2.0**-126), dict(alpha=1), dict(beta1=1e30)], ids=str)
def test_accepted(options):
    assert Activation("dgeglu", **options)


inf, nan = float("inf"), float("nan")
NAMES, FILTER_NAMES = "'dswiglu', 'dgeglu', 'dsituglu'", "'mask', 'value'"
SCALES = [("alpha", "geglu_alpha", "1.702"), ("beta1", "situ_beta1", "4.0"), ("beta2", "situ_beta2", "25.0")]
REJECTED = [  # field, value: error, and what its message must contain (argument = found, allowed, remedy)
    ("act_func", "swiglu", ValueError, "act_func = 'swiglu'", NAMES, "Did you mean 'dswiglu'?"),
    ("act_func", "tanh", ValueError, "act_func = 'tanh'", NAMES, "Pass one of these"),
    ("act_func", None, ValueError, "act_func = None", NAMES, "Pass one of these"),
    ("filter", "masks", ValueError, "geglu_filter = 'masks'", FILTER_NAMES, "Did you mean 'mask'?"),
    ("filter", ["mask"], ValueError, "geglu_filter = ['mask']", FILTER_NAMES, "mask"),
    *[(field, value, ValueError, f"{argument} = {value}", "positive finite float32 (1.18e-38 to 3.4e+38)", usual)
      for field, argument, usual in SCALES for value in (0.0, -1.0, inf, -inf, nan, 1e-40, 1e39)],
    *[("offset", value, ValueError, f"linear_offset = {value}", "finite float32", "1.0 (gpt-oss) or 0.0 (DeepSeek V4)")
      for value in (inf, -inf, nan, -1e39)],
    ("clamp_max", nan, ValueError, "glu_clamp_max = nan", "a number or an infinity", "inf for no bound"),
    ("clamp_min", nan, ValueError, "glu_clamp_min = nan", "a number or an infinity", "-inf for no bound"),
    ("clamp_max", -7.0, ValueError, "glu_clamp_min = -7.0", "not below glu_clamp_max = -7.0", "as -7.0 and 7.0 do"),
    ("clamp_min", 8, ValueError, "glu_clamp_min = 8.0", "not below glu_clamp_max = 7.0", "as -7.0 and 7.0 do"),
    ("clamp_max", -inf, ValueError, "glu_clamp_min = -7.0", "not below glu_clamp_max = -inf", "as -7.0 and 7.0 do"),
    ("alpha", "1.702", TypeError, "geglu_alpha = '1.702' is a str", "not a number", "Pass a Python float"),
    ("alpha", None, TypeError, "geglu_alpha = None is a NoneType", "not a number", "Pass a Python float"),
    ("alpha", True, TypeError, "geglu_alpha = True is a bool", "not a number", "Pass a Python float"),
    ("beta1", torch.ones(2), TypeError, "situ_beta1 = tensor([1., 1.]) is a Tensor", "not a number", ".item()"),
]


@pytest.mark.parametrize("act_func", ACT_FUNCS)
@pytest.mark.parametrize("field, value, error, found, allowed, remedy", REJECTED,
                         ids=[f"{field}={value!r:.12}" for field, value, *_ in REJECTED])
def test_rejected_with_what_is_allowed_and_a_remedy(act_func, field, value, error, found, allowed, remedy):
    with pytest.raises(error) as caught: Activation(**{"act_func": act_func, field: value})
    for part in (found, allowed, remedy): assert part in str(caught.value)


def test_a_wrong_filter_is_named_by_the_function_too():
    with pytest.raises(ValueError, match="geglu_filter = .values. is not one of .mask., .value.. Did you mean .value."):
        geglu_grad(torch.zeros(1), torch.zeros(1), filter="values")


def test_tables_cover_the_contract():
    assert set(ACT_FUNCS) == {"dswiglu", "dgeglu", "dsituglu"} and set(FILTERS) == {"mask", "value"}
    assert set(EPILOGUE_OPS) == {None, "identity", "relu", "srelu"}
    assert {argument for argument, _, _ in SETTINGS.values()} == {
        "geglu_alpha", "glu_clamp_max", "glu_clamp_min", "linear_offset", "situ_beta1", "situ_beta2"}
