"""The host side of the kernels: what compiles anew and what does not, the cache on disk, scratch memory."""
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")
import torch

from dglu import host
from dglu.check import execute, run_case
from dglu.contract import Config
from dglu.kernels.epilogue import GeGLU
from dglu.kernels.mainloop_sm100 import Plan
from dglu.kernels.steps import Outputs
from dglu.truth import Case, make_tensors

ARCH, PLAN, OUTPUTS = "sm_100a", Plan((128, 32), (1, 1)), Outputs()
CPU = torch.device("cpu")


@pytest.fixture
def disk(tmp_path, monkeypatch):
    "An empty cache on disk, and none in memory."
    monkeypatch.setenv("DGLU_CACHE", str(tmp_path / "cache"))
    host.kernel.cache_clear()
    yield tmp_path / "cache"
    host.kernel.cache_clear()


@pytest.fixture(scope="module")
def compiled():
    return host.build(ARCH, PLAN, OUTPUTS)


def test_sizes_do_not_recompile(disk):
    case = Case(Config(mma_tiler_mn=(128, 32), use_dynamic_sched=True), k=16)
    for change in ({}, dict(counts=(1,)), dict(counts=(0, 700, 3, 0)), dict(n=32), dict(k=72), dict(spare=256)):
        assert run_case(replace(case, **change), "emulate").ok
    assert host.kernel.cache_info().misses == 1 and host.kernel.cache_info().hits > 0


PLANS = [Plan(), Plan((128, 256), (1, 1)), Plan((256, 128)), Plan(cluster=(4, 1)), Plan(b_major="n"), Plan(discrete=True), Plan(dynamic=True)]
EPILOGUES = [Outputs(), Outputs(GeGLU()), Outputs(GeGLU(filter="value")), Outputs(GeGLU(alpha=1.0)), Outputs(GeGLU(clamp_min=-1.0)),
             Outputs(c=torch.float16), Outputs(d=torch.float16), Outputs(out=torch.bfloat16), Outputs(dbias=True), Outputs(deterministic=True), Outputs(d_stages=1)]


def test_each_code_has_its_file(disk, monkeypatch):
    names = [host.object_file(arch, plan, outputs).name for plan in PLANS for outputs in EPILOGUES for arch in ("sm_100a", "sm_103a")]
    assert len(set(names)) == len(names) == 2 * len(PLANS) * len(EPILOGUES)
    assert names[0] == host.object_file("sm_100a", Plan(), Outputs()).name  # equal plans, one name
    with monkeypatch.context() as patch:  # another DSL, another name
        patch.setattr(host, "version", lambda name: "0.0.1-other")
        assert host.object_file("sm_100a", Plan(), Outputs()).name != names[0]
    monkeypatch.setattr(host, "SOURCE", "an edited kernel")
    assert host.object_file("sm_100a", Plan(), Outputs()).name != names[0]


def test_the_source_is_every_file_of_the_package(tmp_path):
    "A byte more in a kernel's module, another hash."
    shutil.copytree(Path(host.__file__).parent, tmp_path / "dglu", ignore=shutil.ignore_patterns("__pycache__"))
    def source():
        show = "from dglu import host; print(host.SOURCE)"
        return subprocess.run([sys.executable, "-c", show], cwd=tmp_path, capture_output=True, text=True, check=True,
                              env=os.environ | {"PYTHONPATH": str(tmp_path)}).stdout.strip()
    first = source()
    assert first == source() == host.SOURCE
    with open(tmp_path / "dglu" / "kernels" / "quantise.py", "a") as f: f.write("\n")
    assert source() != first


def test_plan_follows_the_problem():
    "Every field of a problem that changes the code changes the plan."
    seen = set()
    base = Case(counts=(1,))
    for case in (base, *(replace(base, **x) for x in (dict(c=torch.float16), dict(d=torch.float32), dict(activation=torch.bfloat16), dict(outputs=("dbias",)),
                                                      dict(weights="discrete"))),
                 *(replace(base, config=Config(**x)) for x in (dict(b_major="n"), dict(use_dynamic_sched=True), dict(deterministic=True), dict(mma_tiler_mn=(128, 64)),
                                                               dict(act_func="dgeglu", geglu_filter="mask"), dict(act_func="dgeglu", geglu_filter="value")))):
        t = make_tensors(case, 0, "cpu")
        seen.add(host.plan_of(problem_of(case, t), ARCH))
    assert len(seen) == 12


def problem_of(case, t):
    "The checked problem behind a case."
    problems = []
    execute(case, t, lambda problem, tensors: problems.append(problem))
    return problems[0]


def test_kept_on_disk(disk, compiled, monkeypatch):
    file = host.object_file(ARCH, PLAN, OUTPUTS)
    host.store(compiled, file)
    assert [x.name for x in disk.iterdir()] == [file.name]  # and nothing half-written beside it
    monkeypatch.setattr(host, "build", lambda *_: pytest.fail("compiled again"))
    loaded = host.kernel(ARCH, PLAN, OUTPUTS, False)
    assert callable(loaded) and loaded is host.kernel(ARCH, PLAN, OUTPUTS, False)


@pytest.mark.parametrize("content", [b"", b"no object file", None], ids=["empty", "text", "half"])
def test_corrupt_file_is_compiled_again(disk, compiled, monkeypatch, content):
    file = host.object_file(ARCH, PLAN, OUTPUTS)
    host.store(compiled, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:len(whole) // 2] if content is None else content)
    monkeypatch.setattr(host, "build", lambda *_: compiled)
    with pytest.warns(UserWarning, match="(?s)could not be read.*compiling it again"):
        assert host.kernel(ARCH, PLAN, OUTPUTS, False) is compiled
    assert len(file.read_bytes()) == len(whole)
    host.kernel.cache_clear()
    monkeypatch.setattr(host, "build", lambda *_: pytest.fail("compiled again"))
    host.kernel(ARCH, PLAN, OUTPUTS, False)  # the new file is whole


def test_folder_that_cannot_be_written(disk, compiled, monkeypatch):
    disk.parent.mkdir(exist_ok=True)
    disk.write_text("a file where the folder should be")
    monkeypatch.setattr(host, "build", lambda *_: compiled)
    with pytest.warns(UserWarning, match="could not be kept in .* Set DGLU_CACHE"):
        assert host.kernel(ARCH, PLAN, OUTPUTS, False) is compiled


def test_an_emulated_kernel_stays_off_the_disk(disk, compiled, monkeypatch):
    monkeypatch.setattr(host, "build", lambda *_: compiled)
    assert host.kernel(ARCH, PLAN, OUTPUTS, True) is compiled and not disk.exists()


def test_scratch_grows_and_is_each_streams_own():
    memory = host.Scratch(CPU)
    def at(stream, size, name="x"): return memory.address(name, stream, size)
    first = at(0, 400)
    assert first % 128 == 0 and at(0, 240) == first  # smaller: the same memory
    large = at(0, 20000)
    assert large % 128 == 0 and at(0, 400) == large
    starts = sorted((large, at(1, 20000), at(0, 20000, "y")))
    assert all(b - a >= 20000 for a, b in zip(starts, starts[1:]))


def test_scratch_of_a_problem():
    "As much as the kernels write: 128 rows of D in one of dbias, a row of dprob for each tile of N, 128 bytes for each expert's map."
    case = Case(Config(mma_tiler_mn=(128, 32), deterministic=True), weights="discrete", outputs=("dbias",), n=96)
    problem = problem_of(case, make_tensors(case, 0, "cpu"))
    op = host.KernelOp(problem)
    places = op.areas(problem, 0)
    least = 4 * case.rows // 128 * 192, 4 * 3 * case.rows, 128 * 3
    held = [have for have, _ in op.scratch.kept.values()]
    assert all(x % 128 == 0 and h.data_ptr() <= x and x + n <= h.data_ptr() + h.nbytes for x, n, h in zip(places, least, held))
    assert host.KernelOp(problem_of(Case(), make_tensors(Case(), 0, "cpu"))).areas(problem, 0) == (0,) * len(host.SCRATCH)
