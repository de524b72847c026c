"""The SM100 BF16 kernel under the emulator, through the contract's API: every form of it, a random sample, adversarial orders, and the edges."""
import random
from dataclasses import replace

import pytest

pytest.importorskip("cutlass")
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dglu import host
from dglu.check import execute, random_case, run_case
from dglu.contract import OUTPUTS, Config
from dglu.emulate import machine
from dglu.truth import Case, make_tensors, memory

ACTS = {"dswiglu": dict(act_func="dswiglu"), "mask": dict(act_func="dgeglu", geglu_filter="mask"), "value": dict(act_func="dgeglu", geglu_filter="value")}
SMALL = dict(counts=(100, 0, 30), n=64, k=72)  # 512 rows; a tail in every dimension
FORMS = [pytest.param(act, weights, major, dbias, dynamic, id=f"{act}-{weights}-{major}-{'dbias' if dbias else 'plain'}-{'dynamic' if dynamic else 'static'}")
         for act in ACTS for weights in ("dense", "discrete") for major in "kn" for dbias in (False, True) for dynamic in (False, True)]


def passes(case, seed=0):
    "A case against float64: every output, poisoned before, within its tolerance; no stray byte."
    result = run_case(case, "emulate", seed)
    assert result.ok, f"{case.name}: {result.message}"
    return result


@pytest.mark.parametrize("act, weights, major, dbias, dynamic", FORMS)
def test_forms(act, weights, major, dbias, dynamic):
    config = Config(b_major=major, use_dynamic_sched=dynamic, **ACTS[act])
    passes(Case(config, weights=weights, outputs=("dbias",) if dbias else (), **SMALL), seed=1)


@settings(max_examples=8, phases=(Phase.explicit, Phase.generate))  # a case is its seed: nothing to shrink
@given(st.integers(0, 2**32 - 1))
def test_random(seed):
    rng = random.Random(seed)
    case = random_case(rng)
    while case.family != "bf16": case = random_case(rng)
    passes(case, seed % 1000)


@pytest.mark.parametrize("outputs", [("dbias",), ()], ids=["dbias", "plain"])
def test_no_rows(outputs):
    passes(Case(counts=(0, 0), outputs=outputs))


PAIR = Case(Config(mma_tiler_mn=(256, 32)), counts=(200,), n=96, k=136, outputs=("dbias",))
MULTICAST = Case(Config(mma_tiler_mn=(128, 32), cluster_shape_mn=(1, 2), b_major="n", use_dynamic_sched=True, **ACTS["mask"]),
                 counts=(200,), n=64, k=136, weights="discrete", outputs=("dbias",), activation=torch.bfloat16)


@pytest.fixture
def fresh_grid():
    "The number of resident clusters is remembered; a machine with few SMs needs its own."
    host.resident_clusters.cache_clear()
    yield
    host.resident_clusters.cache_clear()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("case", [PAIR, MULTICAST], ids=["pair", "multicast"])
def test_adversarial_order(case, seed, fresh_grid):
    with machine(order="adversarial", seed=seed, sms=2) as m:  # one cluster at a time: work goes round every ring
        passes(case, seed)
    assert any(name for name, grid, *_ in m.launches if "GroupedGemm" in name)


def test_few_clusters_take_many_tiles(fresh_grid):
    "A persistent cluster that goes through several experts."
    with machine(sms=4) as m:
        passes(replace(PAIR, counts=(256, 0, 300, 1, 0), n=160))
    grid = next(grid for name, grid, *_ in m.launches if "GroupedGemm" in name)
    assert grid[0] == 4                                       # CTAs; 20 tiles for 2 pairs of them


@pytest.mark.parametrize("act", ACTS)
def test_worst_approximations(act):
    "ex2 and rcp at the edge of what the PTX ISA promises."
    for data in ("normal", "large"):
        case = Case(Config(mma_tiler_mn=(128, 64), **ACTS[act]), outputs=("dbias",), activation=torch.float32, c=torch.float32, d=torch.float32, data=data)
        with machine(approx="worst"):
            passes(case)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_many_experts_mostly_empty(dynamic):
    counts = [0] * 1024
    for expert, rows in ((0, 1), (31, 256), (32, 3), (700, 300), (1023, 17)): counts[expert] = rows
    passes(Case(Config(mma_tiler_mn=(256, 64), use_dynamic_sched=dynamic), counts=tuple(counts), n=64, k=16, outputs=("dbias",)))


def test_many_discrete_experts():
    passes(Case(Config(mma_tiler_mn=(256, 64)), counts=(*[0] * 62, 20, 0, 5), n=64, k=16, weights="discrete", outputs=("dbias",)))


def outputs_of(case, seed):
    "Every output of a case's problem 0, bytes and all, with an order of its own."
    t = make_tensors(case, 0, "cpu")
    with machine(order="adversarial", seed=seed):
        execute(case, t, "emulate")
    return {key: memory(t[key]).clone() for key in OUTPUTS if key in t}


def test_deterministic():
    "The same bits in any order, which the order does change without it."
    case = Case(Config(mma_tiler_mn=(128, 32), deterministic=True), counts=(256,), n=96, outputs=("dbias",))
    first, *more = [outputs_of(case, seed) for seed in range(3)]
    assert all(torch.equal(first[key], other[key]) for other in more for key in first)
    loose = replace(case, config=replace(case.config, deterministic=False))
    assert len({tuple(outputs_of(loose, seed)["dprob"].tolist()) for seed in range(3)}) > 1
