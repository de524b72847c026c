"""The machine as a user meets it: launch, limits, faults, counters, orders."""
import pytest

pytest.importorskip("cutlass")
import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from dglu import emulate


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor):
    i = cute.arch.block_idx()[0] * 64 + cute.arch.thread_idx()[0]
    if i < cute.size(y):
        y[i] = x[i] * 2.0


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor):
    scale_kernel(x, y).launch(grid=(cute.ceil_div(cute.size(y), 64), 1, 1), block=(64, 1, 1))


@cute.kernel
def big_kernel(x: cute.Tensor):
    smem = cutlass.utils.SmemAllocator()
    smem.allocate_tensor(cutlass.Float32, cute.make_layout(60000), 16)
    x[0] = 1.0


def vector(t):
    return from_dlpack(t).mark_layout_dynamic()


@pytest.mark.parametrize("order", ["eager", "adversarial"])
def test_vector_kernel_runs_through_its_own_host_code(order):
    x, y = torch.randn(1000), torch.zeros(1000)
    with emulate.machine(order=order, seed=3) as m:
        scale(vector(x), vector(y))
    assert torch.equal(y, 2 * x)
    assert m.launches[0][1:4] == ((16, 1, 1), (64, 1, 1), (1, 1, 1))


def test_counters_are_exact():
    x, y = torch.randn(640), torch.zeros(640)
    with emulate.machine() as m:
        scale(vector(x), vector(y))
    assert m.stats["bytes"] == {"ld.global": 2560, "st.global": 2560}
    assert m.stats["instructions"]["ld.global.b32"] == 20 and m.stats["launches"] == 1
    assert sum(m.stats["instructions"].values()) == sum(m.stats["by_warp"].values())


def test_out_of_bounds_names_the_instruction_and_the_tensor():
    with emulate.machine():
        compiled = cute.compile(scale, vector(torch.zeros(64)), vector(torch.zeros(64)))
        with pytest.raises(emulate.Fault, match=r"out of bounds: ld\.global\.b32 at PTX line \d+ by warp \d of CTA \d"):
            compiled(vector(torch.zeros(100)), vector(torch.zeros(512)))


def test_a_function_compiled_once_serves_several_machines():
    x, y = torch.randn(64), torch.zeros(64)
    with emulate.machine():
        compiled = cute.compile(scale, vector(x), vector(y))
        compiled(vector(x), vector(y))
    y.zero_()
    with emulate.machine(order="adversarial"):
        compiled(vector(x), vector(y))
    assert torch.equal(y, 2 * x)


def test_outside_a_machine_it_says_so():
    x = torch.zeros(64)
    with emulate.machine():
        compiled = cute.compile(scale, vector(x), vector(x))
        args = vector(x), vector(x)
        compiled(*args)
    with pytest.raises(emulate.Fault, match="no machine is active"):
        compiled(*args)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="'eager' or 'adversarial'"):
        with emulate.machine(order="random"):
            pass


def test_the_hooks_are_put_back():
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction as Compiled
    before = Compiled.to
    with emulate.machine():
        assert Compiled.to is not before
    assert Compiled.to is before


def test_worst_approximations_differ_and_stay_in_bounds():
    import numpy as np

    from dglu.emulate.numbers import Approx, approx
    x = np.linspace(0.1, 1, 64, dtype=np.float32)
    best = approx("ex2", x)
    Approx.worst = True
    try:
        worst = approx("ex2", x)
    finally:
        Approx.worst = False
    error = abs(worst / np.exp2(x.astype(np.float64)) - 1).max()
    assert (best != worst).any() and error < 2.0**-21.6


def test_import_is_light():
    import subprocess
    import sys
    code = "import sys, dglu.emulate; assert not any(m in sys.modules for m in ('torch', 'cutlass', 'numpy'))"
    subprocess.run([sys.executable, "-c", code], check=True)
