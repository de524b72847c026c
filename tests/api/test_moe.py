"The torch op and the layer: true gradients, and every way in which tokens can be routed."
import pytest
import torch
from torch.autograd import gradcheck

from dglu import PRESETS, MoEMLP, glu_linear
from dglu.layout import group_offsets
from dglu.nn import glu_linear_backward, glu_linear_op, grouped_linear, grouped_outer, pack_activation, route


def rand(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def inputs(m, counts, dtype=torch.float64, k=8):
    experts = len(counts)
    h, w2, prob, bias = rand(m, 64, dtype=dtype), rand(experts, k, 32, dtype=dtype), rand(m, dtype=dtype).sigmoid(), rand(experts, 64, dtype=dtype)
    return *(t.requires_grad_() for t in (h, w2, prob, bias)), group_offsets(counts)


@pytest.mark.parametrize("counts", [[4, 0, 7], [0, 0, 5], [9, 0, 0], [256, 1, 0]], ids=str)
@pytest.mark.parametrize("act", PRESETS.values(), ids=PRESETS)
def test_gradcheck(act, counts):
    h, w2, prob, bias, offsets = inputs(768, counts)
    assert gradcheck(lambda h, w2, prob, bias: glu_linear(h, w2, prob, offsets, bias=bias, activation=act), (h, w2, prob, bias), fast_mode=True)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_opcheck(dtype, bias):
    h, w2, prob, b, offsets = inputs(512, [3, 100], dtype=torch.float64)
    h, w2, b = (t.detach().to(dtype).requires_grad_() for t in (h, w2, b))
    prob = prob.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    args = (h, b if bias else None, w2, prob, offsets, *pack_activation(PRESETS["swiglu"]), "auto")
    torch.library.opcheck(glu_linear_op, args)
    torch.library.opcheck(glu_linear_backward, (rand(512, 8, dtype=dtype), *(t.detach() if torch.is_tensor(t) else t for t in args)))


def test_opcheck_of_the_grouped_products():
    x, w, offsets = rand(512, 16).requires_grad_(), rand(2, 8, 16).requires_grad_(), group_offsets([100, 200])
    torch.library.opcheck(grouped_linear, (x, w, offsets))
    torch.library.opcheck(grouped_outer, (rand(512, 8), x.detach(), offsets))


@pytest.mark.parametrize("act, bias", [("swiglu", True), ("gpt_oss", False), ("situglu", True)])
def test_compiles_whole_and_gives_the_same(act, bias):
    torch.manual_seed(0)
    layer = MoEMLP(32, 64, 4, activation=PRESETS[act], bias=bias)
    x = rand(37, 32, dtype=torch.float32)
    grads = []
    for f in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        f(x).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in layer.named_parameters()})
    for name in grads[0]: assert torch.equal(grads[0][name], grads[1][name]), name


@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (3, 5, 32), (600, 32), (2, 0, 32)], ids=str)
@pytest.mark.parametrize("backward", ["dglu", "autograd"])
def test_any_number_of_tokens(shape, backward):
    layer = MoEMLP(32, 32, 4, backward=backward)
    x = rand(*shape, dtype=torch.float32).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    assert y.shape == x.shape and x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())


def test_all_tokens_to_one_expert_and_top_k_of_all():
    for top_k in (1, 4):
        layer = MoEMLP(32, 32, 4, top_k, dtype=torch.float64).double()
        with torch.no_grad(): layer.router.weight.zero_()
        x = rand(300, 32)
        layer(x).sum().backward()
        used = [bool(g.any()) for g in layer.w1.grad]
        assert sum(used) == top_k


def one_token_at_a_time(layer, x):
    "The layer, as an independent loop over tokens in float64, from the definition."
    out = []
    for t in x:
        p = (layer.router.weight.double() @ t).softmax(0)
        top = p.topk(layer.top_k)
        parts = []
        for q, e in zip(top.values / top.values.sum(), top.indices):
            h = layer.w1[e].double() @ t + (0 if layer.b1 is None else layer.b1[e].double())
            gate, up = (h.view(-1, 2, 32)[:, i].flatten() for i in (0, 1))
            parts.append(q * (layer.w2[e].double() @ (gate * torch.sigmoid(gate) * up)))
        out.append(sum(parts))
    return torch.stack(out)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.bfloat16, 2**-6)], ids=["float64", "bfloat16"])
def test_layer_is_its_definition(dtype, tolerance):
    # float64: the router's softmax is float32. BF16: three roundings (C, prob·act, y) of 2^-8 and two of the weights; forward and backward share them.
    torch.manual_seed(3)
    layer = MoEMLP(32, 64, 4, bias=True, dtype=dtype).double()
    torch.nn.init.normal_(layer.b1)
    x = rand(40, 32)
    grads = []
    for f in (layer, lambda x: one_token_at_a_time(layer, x)):
        layer.zero_grad()
        y = f(x)
        (y * rand(40, 32, seed=1)).sum().backward()
        grads.append({"y": y.detach()} | {name: p.grad.clone() for name, p in layer.named_parameters()})
    for name, want in grads[1].items(): assert (grads[0][name] - want).norm() <= tolerance * want.norm(), name


def test_route_matches_a_sort():
    picks = torch.randint(0, 5, (100, 3), generator=torch.Generator().manual_seed(0))
    rows, offsets, m = route(picks, 5)
    counts = torch.bincount(picks.flatten(), minlength=5)
    assert torch.equal(offsets, group_offsets(counts)) and len(set(rows.tolist())) == 300 and m >= offsets[-1] and m % 256 == 0
    owner = torch.bucketize(rows, offsets.long(), right=True)
    assert torch.equal(owner, picks.flatten())


@pytest.mark.parametrize("kwargs, text", [
    (dict(hidden=48), "hidden = 48.*multiple of 32"), (dict(d_model=30), "d_model = 30.*multiple of 8"), (dict(top_k=5), "top_k = 5.*an int from 1 to 4"),
    (dict(top_k=0), "top_k = 0"), (dict(top_k=1.5), "top_k = 1.5"), (dict(num_experts=0), "num_experts = 0.*from 1 to 1024"), (dict(backward="cuda"), "backward = 'cuda'.*'dglu', 'autograd'"),
    (dict(backend="nope"), "backend = 'nope'"), (dict(dtype=torch.int32), "dtype = torch.int32"), (dict(activation="swiglu"), "activation = 'swiglu'.*PRESETS")])
def test_layer_refuses(kwargs, text):
    with pytest.raises(ValueError, match=text): MoEMLP(**{"d_model": 32, "hidden": 32, "num_experts": 4} | kwargs)


def test_second_derivatives_are_an_error_not_a_zero():
    h, w2, prob, _, offsets = inputs(256, [256], k=8)
    (g,) = torch.autograd.grad(glu_linear(h, w2[:1], prob, offsets).sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match="glu_linear_backward"): torch.autograd.grad(g.sum(), h)


@pytest.mark.parametrize("change, text", [
    (dict(w2=rand(1, 8, 32)), r"w2.shape\[0\] = 1: must be L = 2"), (dict(bias=rand(1, 64)), r"bias.shape = \(1, 64\): must be \(2, 64\)"),
    (dict(prob=rand(512, 1)), r"prob.shape = \(512, 1\): must be \(512,\)"), (dict(h=rand(500, 64), prob=rand(500)), "M = 500: must be a multiple of 256"),
    (dict(h=rand(512, 96)), "h and w2 = "), (dict(w2=rand(2, 8, 32).float()), "w2.dtype = torch.float32: must be torch.float64"),
    (dict(offsets=torch.tensor([256, 512])), "offsets = torch.int64"), (dict(offsets=torch.tensor([256, 768], dtype=torch.int32)), "at most M = 512"),
    (dict(backend="banana"), "backend = 'banana'"),
])
def test_operator_refuses_in_the_forward(change, text):
    call = dict(h=rand(512, 64), w2=rand(2, 8, 32), prob=rand(512), offsets=group_offsets([3, 100])) | change
    with pytest.raises(ValueError, match=text): glu_linear(**call)


def test_a_named_kernel_backend_does_not_pass_for_the_reference():
    h, w2, prob, _, offsets = inputs(512, [10, 20])
    y = glu_linear(h, w2, prob, offsets, backend="sm90")
    with pytest.raises(ValueError, match="backend = 'sm90': must be one of 'auto', 'reference'"): y.sum().backward()


def test_views_are_taken_and_give_the_same_gradients():
    wide = rand(512, 128, dtype=torch.bfloat16)
    w2, prob, offsets = rand(2, 8, 32, dtype=torch.bfloat16), rand(512, 2).sigmoid().float(), group_offsets([10, 20])
    grads = []
    for h, p in ((wide[:, 64:], prob[:, 1]), (wide[:, 64:].clone(), prob[:, 1].clone())):
        h, p = h.detach().requires_grad_(), p.detach().requires_grad_()
        glu_linear(h, w2, p, offsets).float().sum().backward()
        grads.append((h.grad, p.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def test_double_layer_is_double():
    layer = MoEMLP(8, 32, 2, dtype=torch.float64).double()
    x = rand(3, 8).requires_grad_()
    assert not torch.equal(layer(x), layer(x).float().double())
    assert gradcheck(layer, (x,), fast_mode=True)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_default_dtype_and_other_input_types(default):
    layer, x = MoEMLP(32, 32, 2), rand(5, 32, dtype=torch.bfloat16)
    torch.set_default_dtype(default)
    try: layer(x).float().sum().backward()
    finally: torch.set_default_dtype(torch.float32)
    assert layer.w1.grad.isfinite().all()


def test_autocast_does_not_lower_a_float32_layer():
    layer, x = MoEMLP(32, 32, 2, dtype=torch.float32), rand(40, 32, dtype=torch.float32)
    grads = []
    for on in (False, True):
        layer.zero_grad()
        y = layer.experts(*fixed_rows(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=on): y.square().sum().backward()
        grads.append(layer.w1.grad.clone())
    assert torch.equal(*grads)


def fixed_rows(x):
    rows = torch.zeros(512, x.shape[1]); rows[:20], rows[256:276] = x[:20], x[20:]
    return rows, torch.full((512,), 0.5), group_offsets([20, 20])


def test_gradients_past_the_last_row_are_zero():
    h, w2, prob, _, offsets = inputs(768, [10, 20])
    glu_linear(h, w2, prob, offsets).sum().backward()
    assert not h.grad[512:].any() and not prob.grad[512:].any() and h.grad[:10].any()
