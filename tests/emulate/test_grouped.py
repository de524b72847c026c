"""Grouped GEMM over experts: tensor maps rewritten on the device, persistent CTAs, experts without rows, in order and adversarially."""
import pytest

pytest.importorskip("cutlass")
import torch
from cutlass.cute.runtime import from_dlpack
from kernels_grouped import GroupedGemm, TensorMapManager, cute

from dglu import emulate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")        # CuTe DSL's schedulers announce that they will leave the package
COMPILED = {}           # shapes are not part of the key: layouts are dynamic


def aligned(*shape):
    "An int64 tensor at a multiple of 128 bytes, full of nonsense."
    n = torch.Size(shape).numel()
    raw = torch.full((n + 16,), -1)
    return raw[-raw.data_ptr() % 128 // 8:][:n].view(shape)


def lead(t):
    return from_dlpack(t, assumed_align=16).mark_layout_dynamic(leading_dim=t.ndim - 1)


def check(rows, n=144, k=136, extra=5, sms=4, orders=(("eager", 0), ("adversarial", 1)), dtype=torch.bfloat16, strict_maps=False, **kw):
    "Rows of each expert against float64; rows past the last expert must stay as they were."
    torch.manual_seed(0)
    kernel, key, total = GroupedGemm(**kw), (dtype, sms, *sorted(kw.items())), sum(rows)
    a, b = torch.randn(total + extra, k).to(dtype), [torch.randn(n, k).to(dtype) for _ in rows]
    pointers, ends = torch.tensor([x.data_ptr() for x in b]), torch.tensor(rows).cumsum(0).int()
    want = torch.cat([p.double() @ w.double().t() for p, w in zip(a[:total].split(rows), b)])
    for order, seed in orders:
        c, maps = torch.full((total + extra, n), float("nan")), aligned(len(rows), 1, 16) if kernel.before else aligned(sms, kernel.slots, 16)
        with emulate.machine(order=order, seed=seed, sms=sms) as m:
            m.engine.strict_maps = strict_maps
            args = [lead(t) for t in (a, pointers, ends, c, maps)]
            if key not in COMPILED:
                COMPILED[key] = cute.compile(kernel, *args, sms // kernel.atoms)
            COMPILED[key](*args)
        assert c[total:].isnan().all()
        for got, ref in zip(c[:total].split(rows), want.split(rows)):
            assert not len(ref) or (got - ref).norm() / ref.norm() < 1e-6, (order, seed)
    return m


@pytest.mark.parametrize("update", ["smem", "gmem", "before"])
@pytest.mark.parametrize("rows", [(0, 129, 0, 0, 100, 0), (128, 1), (0, 0)], ids=str)
def test_experts_with_and_without_rows(rows, update):
    check(list(rows), update=update)


@pytest.mark.parametrize("rows, update", [((0, 130, 0, 257), "smem"), ((300, 256, 0), "gmem"), ((0, 0, 1), "before")], ids=str)
def test_two_ctas(rows, update):
    check(list(rows), tile=(256, 128), pair=True, update=update)


@pytest.mark.parametrize("tile, pair", [((128, 64), False), ((128, 256), False), ((256, 256), True), ((128, 128), True)])
def test_tiles(tile, pair):
    check([70, 0, 200], tile=tile, pair=pair, stages=2)


@pytest.mark.parametrize("sms, pair", [(1, False), (2, True), (5, False)])
def test_many_tiles_a_cta(sms, pair):
    "Fewer CTAs than tiles: the ring of operands and both accumulators go round several times between experts."
    m = check([200, 3, 0, 140], n=272, sms=sms, tile=(256, 128) if pair else (128, 128), pair=pair)
    assert m.launches[0][1] == (2 if pair else 1, 1, sms // (2 if pair else 1))


ONE_STEP = dict(rows=[5, 6, 0, 7, 8, 9, 10, 11, 12], n=64, k=64, tile=(128, 64), sms=1, strict_maps=True)


@pytest.mark.parametrize("update", ["smem", "gmem"])
def test_one_step_along_k(update):
    "One stage an expert: a slot of the ring of tensor maps comes round as fast as it can, and no load still uses its map."
    check(orders=[("adversarial", s) for s in range(3)], update=update, **ONE_STEP)


@pytest.mark.parametrize("slots", [1, 3])
def test_too_few_maps(slots):
    "With fewer slots than stages + 1 = 4, a map is rewritten while a load may still read it."
    with pytest.raises(emulate.Fault, match="race.*tensormap.cp_fenceproxy.*Wait until the copies that use the map are done"):
        check(orders=[("adversarial", 0)], slots=slots, **ONE_STEP)


@pytest.mark.parametrize("update", ["smem", "gmem", "before"])
def test_a_missing_acquire_is_named(monkeypatch, update):
    monkeypatch.setattr(TensorMapManager, "fence_tensormap_update", lambda *_, **__: None)
    with pytest.raises(emulate.Fault, match="proxy.*uses the tensor map.*fence.proxy.tensormap::generic.acquire"):
        check([5, 6], orders=[("adversarial", 0)], update=update, stages=4)


def test_a_missing_release_is_named(monkeypatch):
    monkeypatch.setattr(cute.nvgpu.cpasync, "fence_tma_desc_release", lambda *_, **__: None)
    with pytest.raises(emulate.Fault, match="proxy.*uses the tensor map.*fence.proxy.tensormap::generic.release"):
        check([5, 6], orders=[("adversarial", 0)], update="gmem", stages=5)


@pytest.mark.parametrize("n, k, dtype", [(4, 8, torch.bfloat16), (132, 72, torch.float16), (260, 264, torch.bfloat16)])
def test_ragged_n_and_k(n, k, dtype):
    check([33, 150], n=n, k=k, dtype=dtype)


@pytest.mark.parametrize("pair, update", [(False, "smem"), (True, "gmem")])
def test_many_orders(pair, update):
    check([100, 0, 140, 60], tile=(256, 128) if pair else (128, 128), pair=pair, update=update,
          orders=[("adversarial", s) for s in range(2, 5)])
