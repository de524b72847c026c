# ruff: noqa: E402
"""The SM100 mainloop alone, in every format of operands: tiles, clusters, tails, pointers, orders; and whether its three promises about tensor memory are needed.

R is compared with float64. Products of two scaled numbers are exact in float32, so K additions are off by less than K·2^-24.
"""
import pytest

pytest.importorskip("cutlass")
from cutlass import Float4E2M1FN, Float8E4M3FN, Float8E5M2, Float8E8M0FNU

from dglu.emulate import setup

setup()
import cutlass.cute as cute

from dglu.emulate import Fault
from dglu.kernels import formats, product
from dglu.kernels.formats import Scaled
from dglu.kernels.mainloop_sm100 import Plan
from dglu.kernels.product import product_error
from dglu.kernels.scale_factors import ScaleSlots

MXFP8, E5M2 = Scaled(Float8E4M3FN, Float8E8M0FNU, 32), Scaled(Float8E5M2, Float8E8M0FNU, 32)
MXFP4, MXFP4_16, NVFP4 = (Scaled(Float4E2M1FN, *x) for x in ((Float8E8M0FNU, 32), (Float8E8M0FNU, 16), (Float8E4M3FN, 16)))
FORMATS = {"mxfp8": MXFP8, "mxfp8 e5m2": E5M2, "mxfp4": MXFP4, "mxfp4 16": MXFP4_16, "nvfp4": NVFP4}
COUNTS = 512, 0, 256   # one expert has no rows; one ends within the widest cluster


def check(plan, n, k, clusters=1, counts=COUNTS, **options):
    "Error within the bound; rows that belong to nobody stay as they are."
    error, chip = product_error(plan, counts, n, k, clusters, **options)
    assert error < k * 2.0**-24
    return chip


SHAPES = {
    "pair": dict(tile=(256, 256), cluster=(2, 1)), "one CTA": dict(tile=(128, 256), cluster=(1, 1)),
    "pairs, multicast": dict(tile=(256, 256), cluster=(4, 2)), "CTAs, multicast, 192": dict(tile=(128, 192), cluster=(2, 2)),
    "pair, 192": dict(tile=(256, 192), cluster=(2, 1)), "64 along N": dict(tile=(128, 64), cluster=(1, 2)),
    "pointers": dict(cluster=(2, 2), discrete=True), "pointers, dynamic, 128": dict(tile=(128, 128), cluster=(2, 1), discrete=True, dynamic=True),
}
ALL = [*(("mxfp8", s) for s in SHAPES), *(("nvfp4", s) for s in ("pair", "pairs, multicast", "CTAs, multicast, 192", "pointers, dynamic, 128")),
       ("mxfp4", "pair"), ("mxfp4", "pointers"), ("mxfp4 16", "one CTA"), ("mxfp8 e5m2", "pair")]


ALWAYS = ("mxfp8", "64 along N"), ("nvfp4", "CTAs, multicast, 192")  # tiles that begin inside an atom; clusters with both sides


@pytest.mark.parametrize("fmt, shape", [c if c in ALWAYS else pytest.param(*c, marks=pytest.mark.slow) for c in ALL])
def test_formats_tiles_and_clusters(fmt, shape):
    plan = Plan(scaled=FORMATS[fmt], **SHAPES[shape])
    check(plan, 352, 416, 12 if plan.dynamic else 1)   # K: a short stage, half a product of FP4; N: half a step pair


@pytest.mark.parametrize("fmt, discrete", [("mxfp8", False), ("mxfp8 e5m2", True)], ids=["dense", "pointers"])
def test_n_major(fmt, discrete):
    check(Plan(b_major="n", discrete=discrete, scaled=FORMATS[fmt]), 288, 288)


@pytest.mark.parametrize("fmt, k", [*((f, k) for f in ("mxfp8", "nvfp4") for k in (32, 96, 1056)), ("mxfp4", 96), ("mxfp4 16", 96)])
def test_tails_of_k(fmt, k):
    "All lengths of the last stage, one of them the only stage. Scale factors behind K are NaN where no product may read them."
    check(Plan(scaled=FORMATS[fmt]), 256, k, counts=(256,))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "nvfp4"])
def test_adversarial_order(fmt, seed):
    "One pair takes all tiles, so both accumulators are used in turns, and each ring goes round."
    check(Plan(scaled=FORMATS[fmt]), 544, 1056, sms=2, order="adversarial", seed=seed)


@pytest.mark.parametrize("seed", range(2))
def test_adversarial_multicast(seed):
    check(Plan(cluster=(2, 2), discrete=True, scaled=NVFP4), 544, 544, sms=4, order="adversarial", seed=seed)


@pytest.fixture
def compiled_anew():
    "Kernels of a changed source are not remembered."
    product.compiled_product.cache_clear()
    yield
    product.compiled_product.cache_clear()


def test_a_slot_filled_without_waiting_is_a_race(monkeypatch, compiled_anew):
    def fill(self, slot, stage):
        for copy, source, to in self.copies: cute.copy(copy, source[(None, None, None, None, stage)], to[(None, None, None, None, slot.index)])
    monkeypatch.setattr(ScaleSlots, "fill", fill)
    with pytest.raises(Fault, match=r"race: tcgen05\.cp.* and tcgen05\.mma"):
        check(Plan(scaled=MXFP8), 256, 1056, counts=(256,), order="adversarial")


def test_a_kernel_that_ends_before_its_last_commits_is_caught(monkeypatch, compiled_anew):
    monkeypatch.setattr(ScaleSlots, "drain", lambda self, slot: None)
    with pytest.raises(Fault, match=r"tcgen05\.commit.*signals mbarrier .* which has exited"):
        for seed in range(40): check(Plan(scaled=MXFP8), 256, 1056, counts=(256,), order="adversarial", seed=seed)


@pytest.mark.parametrize("name, wrong", [("step_at", lambda self, parity, steps, i: i), ("shared_steps", lambda self, parity, steps: 0)])
def test_shared_columns_read_late_are_a_race(name, wrong, monkeypatch, compiled_anew):
    monkeypatch.setattr(formats.TmemColumns, name, wrong)
    with pytest.raises(Fault, match=r"race: tcgen05\.mma.* and tcgen05\.ld.*columns from 160"):
        check(Plan(scaled=NVFP4), 544, 544, order="adversarial")


def test_formats_and_tiles_that_are_refused():
    with pytest.raises(ValueError, match=r"Float8E4M3FN, 16\) is no format of the tensor core. Allowed: \(Float8E4M3FN, Float8E8M0FNU, 32\)"):
        Scaled(Float8E4M3FN, Float8E4M3FN, 16)
    with pytest.raises(ValueError, match=r"tile = \(256, 96\): .* need 64, 128, 192 or 256"):
        Plan(tile=(256, 96), scaled=MXFP8)
    with pytest.raises(ValueError, match="FP4 only K-major"):
        Plan(b_major="n", scaled=NVFP4)
