"""A persistent GEMM that asks for its tiles (cluster launch control): every tile once, whoever gets it."""
import pytest

pytest.importorskip("cutlass")
import torch
from cutlass.cute.runtime import from_dlpack
from kernels_grouped import DynamicGemm, cute, pipeline

from dglu import emulate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")        # CuTe DSL's schedulers announce that they will leave the package
COMPILED = {}           # shapes are not part of the key: layouts are dynamic


def lead(t):
    return from_dlpack(t, assumed_align=16).mark_layout_dynamic(leading_dim=1)


def check(m, n, k, sms=4, orders=(("eager", 0), ("adversarial", 1)), dtype=torch.bfloat16, **kw):
    torch.manual_seed(0)
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    want, key = a.double() @ b.double().t(), (dtype, *sorted(kw.items()))
    tile = kw.get("tile", (128, 128))
    for order, seed in orders:
        c, owner = torch.full((m + 3, n), float("nan")), torch.full((-(-m // tile[0]), -(-n // tile[1])), -1, dtype=torch.int32)
        with emulate.machine(order=order, seed=seed, sms=sms) as machine:
            args = [lead(t) for t in (a, b, c[:m], owner)]
            if key not in COMPILED:
                COMPILED[key] = cute.compile(DynamicGemm(**kw), *args)
            COMPILED[key](*args)
        assert (c[:m] - want).norm() / want.norm() < 1e-6, (order, seed)
        assert c[m:].isnan().all()
        assert owner.min() >= 0 and all(owner.t().flatten()[i] == i for i in owner.unique())        # whoever ran did its own tile first
    return machine, owner


@pytest.mark.parametrize("sms", [1, 3, 100])
def test_one_cta(sms):
    "From one CTA that does all twelve tiles to a CTA for each."
    m, owner = check(300, 400, 72, sms=sms)
    assert m.launches[0][1] == (3, 4, 1) and owner.shape == (3, 4)


@pytest.mark.parametrize("sms", [2, 4, 100])
def test_two_ctas(sms):
    m, owner = check(600, 300, 72, sms=sms, tile=(256, 128), pair=True)
    assert m.launches[0][1] == (6, 3, 1) and owner.shape == (3, 3)


@pytest.mark.parametrize("shape", [(1, 4, 8), (128, 128, 64), (129, 132, 264)], ids=str)
def test_shapes(shape):
    check(*shape, dtype=torch.float16)


@pytest.mark.parametrize("pair", [False, True])
def test_many_orders(pair):
    check(500, 260, 136, tile=(256, 128) if pair else (128, 128), pair=pair, orders=[("adversarial", s) for s in range(2, 5)])


def test_lanes_of_a_warp_a_phase_apart():
    "A warp with nothing else to do splits between one answer and the next; some of these orders once took the first lane's parity for all."
    check(600, 300, 72, tile=(256, 128), pair=True, orders=[("adversarial", s) for s in range(15)])


@pytest.mark.parametrize("sms, pair", [(1, False), (3, False), (12, False), (4, True)])
def test_clusters_that_fit_start_by_themselves(sms, pair):
    "In order, every SM has a CTA before anybody asks; they share the tiles."
    _, owner = check(300 * (1 + pair), 400, 72, sms=sms, orders=[("eager", 0)], tile=(256, 128) if pair else (128, 128), pair=pair)
    assert owner.unique().tolist() == list(range(sms // (1 + pair)))


def test_a_lost_answer_is_a_deadlock(monkeypatch):
    "If nobody says that the answer has been read, the scheduler waits for its place for ever."
    monkeypatch.setattr(pipeline.PipelineClcFetchAsync, "consumer_release", lambda *_, **__: None)
    with pytest.raises(emulate.Fault, match="(?s)deadlock.*warp 6"):
        check(300, 400, 72, stages=4, orders=[("eager", 0)])


def test_an_answer_read_too_early_is_a_race(monkeypatch):
    monkeypatch.setattr(pipeline.PipelineClcFetchAsync, "consumer_wait", lambda *_, **__: None)
    with pytest.raises(emulate.Fault, match="uninitialised|race"):
        check(300, 400, 72, stages=5, orders=[("adversarial", 0)])


def test_an_answer_without_its_proxy_fence(monkeypatch):
    "Answers are read by ld.shared and written by the async proxy: the scheduler class fences after each read, unless it is told not to."
    monkeypatch.setattr(cute.arch, "fence_proxy", lambda *_, **__: None)
    with pytest.raises(emulate.Fault, match="proxy.*overwrites an answer.*fence.proxy.async"):
        check(300, 400, 72, stages=6, tile=(128, 64), sms=1, orders=[("adversarial", 0)])
