"""Dense GEMMs: one and two CTAs, multicast, K- and MN-major operands, several types, in order and adversarially."""
import pytest

pytest.importorskip("cutlass")
import torch
from cutlass.cute.runtime import from_dlpack
from kernels import Gemm, cute

from dglu import emulate


def operand(rows, k, dtype, major):
    "A (rows, k, 1) operand, contiguous along k or along the rows."
    x = torch.randn(rows, k).to(dtype)
    return x.unsqueeze(-1) if major == "k" else x.t().contiguous().t().unsqueeze(-1)


def lead(t):
    return from_dlpack(t).mark_layout_dynamic(leading_dim=[i for i, s in enumerate(t.stride()) if s == 1 and t.shape[i] > 1][0])


def check(m, n, k, dtype=torch.bfloat16, majors=("k", "k"), orders=(("eager", 0), ("adversarial", 1)), **kw):
    torch.manual_seed(0)
    a, b, compiled = operand(m, k, dtype, majors[0]), operand(n, k, dtype, majors[1]), None
    want = a[..., 0].double() @ b[..., 0].double().t()
    for order, seed in orders:
        c = torch.full((m, n, 1), float("nan"))
        with emulate.machine(order=order, seed=seed) as machine:
            compiled = compiled or cute.compile(Gemm(**kw), lead(a), lead(b), lead(c))
            compiled(lead(a), lead(b), lead(c))
        assert (c[..., 0] - want).norm() / want.norm() < 1e-6, (order, seed)
    return machine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_one_cta(dtype):
    m = check(256, 128, 256, dtype)
    assert m.stats["tensor"]["flops"] == 2 * 256 * 128 * 256


@pytest.mark.parametrize("majors", [("m", "k"), ("k", "n"), ("m", "n")])
def test_mn_major(majors):
    check(128, 128, 128, majors=majors)


@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (128, 192), (128, 256)])
def test_tiles_of_one_cta(tile):
    check(tile[0], tile[1], 128, tile=tile)


@pytest.mark.parametrize("tile, cluster", [((256, 128), (2, 1)), ((128, 128), (2, 1)), ((256, 128), (2, 2)), ((256, 64), (4, 2))])
def test_two_ctas_with_multicast(tile, cluster):
    m = check(512, 256, 256, tile=tile, cluster=cluster, pair=True)
    assert (cluster == (2, 1)) == ("tma.multicast" not in m.stats["bytes"])


def test_multicast_without_pairs():
    check(256, 256, 256, cluster=(2, 2))


def test_ragged_edges_are_filled_with_zeros_and_not_written():
    check(256, 128, 200)


@pytest.mark.parametrize("seed", range(4))
def test_two_ctas_in_many_orders(seed):
    check(256, 128, 192, tile=(256, 128), cluster=(2, 1), pair=True, orders=(("adversarial", seed),))
