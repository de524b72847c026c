"The performance model: its tiles are the kernel's, its sums those of an independent count, its limits right."
import ast
import math
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from dglu.model import (
    B200,
    CTA_ROWS,
    OURS,
    PEER,
    SHAPES,
    TILE,
    EpilogueCost,
    Shape,
    epilogue_cycles,
    operand_bytes,
    overlapped,
    predict,
    shared_cycles,
    tensor_cycles,
    tile_order,
)


def some_shape(rng: random.Random) -> Shape:
    groups = tuple(256 * rng.choice((0, 1, 2, 5, 9)) for _ in range(rng.randint(1, 12))) + (256,)
    return Shape(sum(groups), 64 * rng.randint(1, 64), 64 * rng.randint(1, 40), len(groups), groups=groups)


def test_importing_the_model_loads_nothing_heavy():
    code = "import dglu.model, sys; print(sorted({'torch', 'cutlass', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_tiles_come_in_the_order_of_the_kernel():
    schedule = pytest.importorskip("dglu.kernels.schedule")
    tree = ast.parse(Path(schedule.__file__).read_text())  # the kernel's own lines, on Python's numbers; a traced function has others
    found = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "raster")
    found.decorator_list, names = [], {"cutlass": SimpleNamespace(min=min, max=max)}
    exec(compile(ast.Module([found], []), "raster", "exec"), names)
    raster = names["raster"]
    for seed in range(20):
        shape = some_shape(random.Random(seed))
        tiles_n = math.ceil(shape.n / TILE)
        expected = [(e, *raster(t, rows // TILE, tiles_n)) for e, rows in enumerate(shape.rows) for t in range(rows // TILE * tiles_n)]
        assert [t[:3] for t in tile_order(shape)] == expected


def test_tile_and_shared_memory_are_those_of_the_kernels_plan():
    mainloop = pytest.importorskip("dglu.kernels.mainloop_sm100")
    plan, shape = mainloop.Plan(), Shape(256, 10 * mainloop.K_TILE, 256, 1)
    assert (CTA_ROWS, (TILE, TILE)) == (mainloop.CTA_ROWS, plan.tile)
    assert shared_cycles(B200, replace(shape, c=0, d=0)) == 10 * plan.stage_bytes / 128  # what TMA fills is what the tensor core reads


@pytest.mark.parametrize("seed", range(8))
def test_bytes_of_a_and_b_are_those_of_a_plain_cache(seed):
    rng = random.Random(seed)
    shape, chip = some_shape(rng), replace(B200, l2=rng.choice((0, 2e6, 2e7, 1e12)), sms=2 * rng.choice((3, 8, 74)))
    used, read, tiles = {}, {"a": 0, "b": 0}, list(tile_order(shape))  # used: when a panel in the cache was used last, and its bytes
    for now, t in enumerate(tiles):
        for key, size in (("a", t.expert, t.im), 512 * shape.k), (("b", t.expert, t.jn), 2 * t.columns * shape.k):
            read[key[0]] += 0 if key in used else size
            used[key] = (2 * now + (key[0] == "b"), size)
        if (now + 1) % chip.pairs == 0:
            while sum(size for _, size in used.values()) > chip.l2 / 2:
                del used[min(used, key=lambda k: used[k][0])]
    assert operand_bytes(shape, chip) == (read["a"], read["b"])


@pytest.mark.parametrize("seed", range(8))
def test_overlap_is_the_longest_path(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 9)
    products, epilogues = ([rng.randint(0, 9) for _ in range(n)] for _ in range(2))

    @cache
    def end(kind, i):  # a product after the one before and the epilogue two before, an epilogue after its product and the one before
        if i < 0: return 0
        before = (("p", i - 1), ("e", i - 2)) if kind == "p" else (("p", i), ("e", i - 1))
        return max(end(*b) for b in before) + (products if kind == "p" else epilogues)[i]
    assert overlapped(products, epilogues) == end("e", n - 1)


@pytest.mark.parametrize("seed", range(8))
def test_walls_are_sums_over_tiles_of_the_slowest_pair(seed):
    shape = some_shape(random.Random(seed))
    spent = [dict(tensor=0, issue=0, MUFU=0, shared=0) for _ in range(74)]
    for i, t in enumerate(tile_order(shape)):
        issue, mufu = epilogue_cycles(B200, OURS, t.columns)
        for unit, clocks in dict(tensor=tensor_cycles(B200, shape.k), issue=issue, MUFU=mufu, shared=shared_cycles(B200, shape, t.columns)).items():
            spent[i % 74][unit] += clocks
    walls = predict(shape).walls
    for unit in spent[0]:
        assert walls[unit] == pytest.approx(1e3 * max(s[unit] for s in spent) / B200.clock)
    assert walls["HBM"] == pytest.approx((sum(operand_bytes(shape)) + 8 * shape.m * shape.n) / 8e9)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.m}-{s.k}-{s.n}-{s.experts}")
def test_no_prediction_beats_the_data_sheet_and_no_slower_part_helps(shape):
    base = predict(shape)
    compulsory = 2 * (shape.m * shape.k + shape.experts * shape.n * shape.k) + 8 * shape.m * shape.n
    assert base.ms >= max(shape.flops / 2.25e12, compulsory / 8e9) * (1 - 1e-12)
    worse = [predict(shape, replace(B200, **slow)) for slow in (dict(hbm=4e12), dict(busy=0.02), dict(mufu=0.5), dict(shared=16), dict(l2=0))]
    assert all(p.ms >= base.ms for p in [*worse, predict(shape, cost=PEER), predict(shape, tma=True)])
    assert [p.bound for p in worse[1:4]] == ["issue", "MUFU", "shared"] and worse[0].walls["HBM"] == 2 * base.walls["HBM"]


def test_the_limits_of_k():
    assert predict(Shape(74 * 256, 64, 1024, 1)).bound == "HBM"
    assert predict(Shape(74 * 256, 2**20, 1024, 1)).tflops == pytest.approx(2250, rel=1e-3)
    assert predict(Shape(256, 64, 256, 1), cost=EpilogueCost("endless", 1e6, 0)).bound == "issue"
