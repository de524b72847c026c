"""A persistent GEMM that asks for its tiles (cluster launch control): every tile once, whoever gets it."""
import pytest

pytest.importorskip("cutlass")
import torch
from cutlass.cute.runtime import from_dlpack
from kernels_grouped import DynamicGemm, cute

from dglu import emulate

COMPILED = {}           # shapes are not part of the key: layouts are dynamic


def lead(t):
    return from_dlpack(t, assumed_align=16).mark_layout_dynamic(leading_dim=1)


def check(m, n, k, sms=4, orders=(("eager", 0), ("adversarial", 1)), dtype=torch.bfloat16, **kw):
    torch.manual_seed(0)
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    want, key = a.double() @ b.double().t(), (dtype, *sorted(kw.items()))
    for order, seed in orders:
        c = torch.full((m + 3, n), float("nan"))
        with emulate.machine(order=order, seed=seed, sms=sms) as machine:
            args = [lead(t) for t in (a, b, c[:m])]
            if key not in COMPILED:
                COMPILED[key] = cute.compile(DynamicGemm(**kw), *args)
            COMPILED[key](*args)
        assert (c[:m] - want).norm() / want.norm() < 1e-6, (order, seed)
        assert c[m:].isnan().all()
    return machine


@pytest.mark.parametrize("sms", [1, 3, 100])
def test_one_cta(sms):
    "From one CTA that does all twelve tiles to a CTA for each."
    m = check(300, 400, 72, sms=sms)
    assert m.launches[0][1] == (3, 4, 1)


@pytest.mark.parametrize("sms", [2, 4, 100])
def test_two_ctas(sms):
    m = check(600, 300, 72, sms=sms, tile=(256, 128), pair=True)
    assert m.launches[0][1] == (6, 3, 1)


@pytest.mark.parametrize("shape", [(1, 4, 8), (128, 128, 64), (129, 132, 264)], ids=str)
def test_shapes(shape):
    check(*shape, dtype=torch.float16)


@pytest.mark.parametrize("pair", [False, True])
def test_many_orders(pair):
    check(500, 260, 136, tile=(256, 128) if pair else (128, 128), pair=pair, orders=[("adversarial", s) for s in range(2, 7)])
