"""The kernels' activations at the ends of the numbers: every pair of odd gates and ups, with odd R, against the reference, element by element."""
from itertools import product

import pytest

pytest.importorskip("cutlass")
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, const_expr, range_constexpr
from cutlass.cute import arch
from cutlass.cute.runtime import from_dlpack

from dglu.activation import Activation
from dglu.emulate import machine
from dglu.kernels.epilogue import Fragment, fold_columns, folded_row, gate_of, glu_step
from dglu.reference import glu_backward

INF, NAN = torch.inf, torch.nan
C = [INF, -INF, NAN, 0.0, -0.0, 1e-39, -1e-39, 3.38e38, -3.38e38, 1e9, -1e9, 120.0, -120.0, 7.0, -7.0, 3.0, -1.5, 0.01]
R = [0.0, -0.0, INF, -INF, NAN, 1.5, -2.0**-10, 1e30]
PROBS, BETA = (0.75, 1.0, 0.0), 0.5
TYPES = {torch.bfloat16: BFloat16, torch.float16: Float16, torch.float32: Float32}
ACTS = {"swiglu": Activation(), "geglu": Activation("dgeglu"), "geglu, value": Activation("dgeglu", filter="value"),
        "geglu, no bounds": Activation("dgeglu", clamp_max=INF, clamp_min=-INF), "geglu, half": Activation("dgeglu", clamp_min=-INF, offset=0.0),
        "situ": Activation("dsituglu"), "situ, other": Activation("dsituglu", beta1=2.0, beta2=8.0)}


class Step:
    "glu_step on tiles of (128, 32)."
    def __init__(self, act, c, op=None): self.act, self.c, self.op = act, c, op

    @cute.jit
    def __call__(self, ins: list[cute.Tensor], prob: cute.Tensor, outs: list[cute.Tensor], dprob: cute.Tensor, beta: Float32):
        self.kernel(ins, prob, outs, dprob, beta).launch(grid=(prob.shape[0] // 128, 1, 1), block=(128, 1, 1))

    @cute.kernel
    def kernel(self, ins: list[cute.Tensor], prob: cute.Tensor, outs: list[cute.Tensor], dprob: cute.Tensor, beta: Float32):
        fr, lane, first = Fragment(), arch.lane_idx(), 128 * arch.block_idx()[0] + 32 * arch.warp_idx()
        def regs(t, *shape): return cute.make_rmem_tensor(cute.make_layout(shape), t)
        frags, written = [regs(t, 32) for t in (Float32, self.c, self.c)], [regs(Float32, 32) for _ in outs]
        scales, rows = regs(Float32, 2, 2, 2), regs(Float32, 8)
        rows.fill(0.0)
        places = [((first + fr.row(lane, h, i), 8 * j + 2 * (lane % 4) + c), fr.at(i, j) + 2 * h + c)
                  for i in range(2) for h in range(2) for j in range(4) for c in range(2)]
        for at, k in places:
            for x, f in zip(ins, frags): f[k] = x[at]
        for i in range_constexpr(2):
            for h in range_constexpr(2):
                p = prob[first + fr.row(lane, h, i)]
                scales[0, h, i], scales[1, h, i] = (p * beta, p * beta * beta) if const_expr(self.act.linear) else (p, p)
        glu_step(self.act, fr, *frags, *written, scales, rows, None, beta, self.op)
        for at, k in places:
            for y, f in zip(outs, written): y[at] = f[k]
        fold_columns(rows, fr, lane)
        dprob[first + folded_row(fr, lane)] = rows[0]


def inputs(dtype):  # R, gate, up (rows, 32) with one odd element a row, prob (rows,), the odd elements' columns
    "Every triple of odd numbers."
    hot = torch.tensor(list(product(C, C, R)))
    rows = -(-len(hot) // 128) * 128
    gate, up, r = (torch.zeros(rows, 32) for _ in range(3))
    column = torch.arange(len(hot)) * 5 % 32
    for x, v in zip((gate, up, r), hot.T): x[torch.arange(len(hot)), column] = v
    return r, gate.to(dtype), up.to(dtype), torch.tensor(PROBS)[torch.arange(rows) % 3], column


def on_kernel(act, dtype, beta=BETA, **options):  # dgate, dup, prob·act, dprob of each odd triple
    "What a kernel makes of them."
    r, gate, up, prob, column = inputs(dtype)
    outs, dprob, kernel = [torch.full_like(r, NAN) for _ in range(3)], torch.full_like(prob, NAN), gate_of(act)
    args = [from_dlpack(x) for x in (r, gate, up)], from_dlpack(prob), [from_dlpack(x) for x in outs], from_dlpack(dprob), Float32(beta)
    with machine(**options): cute.compile(Step(kernel, TYPES[dtype]), *args)(*args)
    at = torch.arange(len(column)), column
    return [x[at] for x in outs] + [dprob[:len(column)] * (beta**2 if kernel.linear else 1)]


def wanted(act, dtype, work, beta=BETA):  # as on_kernel
    "What the reference makes of them, in a type of its own."
    r, gate, up, prob, column = inputs(dtype)
    at = torch.arange(len(column)), column
    r, gate, up = (x[at][:, None] for x in (r, gate.float() * beta, up.float() * beta))
    dgate, dup, dprob, out = glu_backward(r.to(work), gate.to(work), up.to(work), prob[at[0]][:, None].to(work), act)
    return dgate[:, 0], dup[:, 0], out[:, 0], dprob


def kind(x):
    "0 finite, 1 and -1 infinite, 2 NaN."
    return torch.where(x.isnan(), 2, torch.where(x.isinf(), x.sign(), 0)).long()


def odd(dtype):  # gate, up, R of each odd triple, float64
    "The triples as the kernel reads them."
    gate, up, r = torch.tensor(list(product(C, C, R))).T
    return gate.to(dtype).double(), up.to(dtype).double(), r.double()


def excused(act, dtype, beta):
    "Where the kernel may give another kind of number than the reference; each has its line in the notebook."
    gate, up, r = odd(dtype)
    if act.act_func == "dswiglu":                        # F and U without beta: a product overflows where |gate·up| does
        size = (gate * up * 1.2).abs()
        return size * r.abs().where(r.isfinite(), 0).clamp(min=1) > torch.finfo(torch.float32).max
    if act.act_func == "dsituglu": return r.isinf()      # 0·∞ in the reference, a number near 0 times ∞ in the kernel
    return (beta * act.alpha * gate < -87) & (up.isinf() | r.isinf())  # σ is subnormal in the reference, 0 in the kernel


def allowed(act, dtype, beta):
    "The epilogue's 32 roundings (the truth page), beside R."
    gate, up, _ = (x.abs() * abs(beta) for x in odd(dtype))
    if act.act_func == "dgeglu": gate, up = gate.clamp(max=act.clamp_max), up.clamp(max=max(act.clamp_max, -act.clamp_min))
    if act.act_func == "dsituglu": gate, up = gate.clamp(max=act.beta1), up.clamp(max=act.beta2)
    gate, up = (x.nan_to_num(0, 0, 0) for x in (gate, up))  # an infinity leaves no room
    more = (1 + gate) * (1 + up) if act.filter == "value" else 1
    return 2.0**-19 * (1 + 1.702 * gate) * (2 + up) * more


@pytest.mark.parametrize("name, dtype, beta", [(n, torch.bfloat16, BETA) for n in ACTS] + [
    ("swiglu", torch.float32, BETA), ("swiglu", torch.float16, 1.0), ("geglu", torch.float32, 1.0), ("swiglu", torch.bfloat16, -0.5),
    ("geglu", torch.bfloat16, 8.0), ("geglu", torch.float32, 8.0)],
    ids=str)
def test_every_odd_triple(name, dtype, beta):
    act = ACTS[name]
    got, single, double = on_kernel(act, dtype, beta), wanted(act, dtype, torch.float32, beta), wanted(act, dtype, torch.float64, beta)
    gate, up, r = odd(dtype)
    skip, bound = excused(act, dtype, beta), allowed(act, dtype, beta)
    p = torch.tensor(PROBS)[torch.arange(len(r)) % 3].double()
    for what, y, one, two, weight in zip(("dgate", "dup", "out", "dprob"), got, single, double, (r * p, r * p, p, r)):
        other = (kind(y) != kind(one)) & (kind(y) != kind(two.float())) & ~skip
        off = (y - two).abs() > bound * weight.abs() + 2.0**-126
        off &= y.isfinite() & two.isfinite() & (two.abs() < 3e38)
        if beta < 0: other, off = (x & (gate.abs() < 2.0**100) for x in (other, off))  # gates are cut on the other side
        for bad in (other, off):
            first = bad.nonzero().flatten().tolist()[:5]
            shown = [f"gate {gate[i]:g}, up {up[i]:g}, R {r[i]:g}, prob {p[i]:g}: {y[i]:g}, not {two[i]:g}" for i in first]
            assert not shown, f"{what}: {int(bad.sum())} of {len(bad)}\n" + "\n".join(shown)


@pytest.mark.parametrize("name", ACTS)
def test_an_odd_element_is_alone(name):
    "What a NaN or an infinity does to the elements around it: nothing."
    gate, up, r = (torch.full((128, 32), x) for x in (1.5, -0.75, 2.0))
    prob, act = torch.ones(128), gate_of(ACTS[name])
    outs, dprob = [torch.full((128, 32), NAN) for _ in range(3)], torch.full((128,), NAN)
    args = [from_dlpack(x) for x in (r, gate, up)], from_dlpack(prob), [from_dlpack(x) for x in outs], from_dlpack(dprob), Float32(BETA)
    here = torch.zeros(128, 32, dtype=torch.bool)
    with machine():
        run = cute.compile(Step(act, Float32), *args)
        run(*args)
        before, row = torch.stack(outs), dprob.clone()
        for i, x in enumerate((NAN, INF, -INF)):
            for j, t in enumerate((gate, up, r)):
                at = 3 + 17 * i + 40 * j, 5 * i + 2 * j
                t[at], here[at] = x, True
        run(*args)
    after, row_after = torch.stack(outs), dprob
    assert torch.equal(before[:, ~here], after[:, ~here]) and torch.equal(row[~here.any(1)], row_after[~here.any(1)])
    assert after[:2, 3, 0].isnan().all() and row_after[3].isnan()  # the gate's NaN


@pytest.mark.parametrize("op", ["relu", "srelu"])
def test_a_nan_passes_the_epilogues_op(op):
    act = ACTS["swiglu"]
    r, gate, up = torch.ones(128, 32), torch.ones(128, 32), torch.ones(128, 32)
    gate[5, 5] = NAN
    prob, outs, dprob = torch.ones(128), [torch.full((128, 32), 7.0) for _ in range(3)], torch.zeros(128)
    args = [from_dlpack(x) for x in (r, gate, up)], from_dlpack(prob), [from_dlpack(x) for x in outs], from_dlpack(dprob), Float32(1.0)
    with machine(): cute.compile(Step(gate_of(act), Float32, op), *args)(*args)
    assert all(x.isnan().nonzero().tolist() == [[5, 5]] for x in outs[:2])
