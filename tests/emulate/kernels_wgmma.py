# ruff: noqa: E402
"""A Hopper GEMM for tests: TMA into a ring, one warpgroup with wgmma, the accumulator straight to global memory. Run it as a script."""
from dglu.emulate import machine, setup

setup("sm_90a")

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
import torch
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from dglu.emulate import Fault

M, K_TILE, STAGES = 64, 64, 3


class Gemm:
    "D (64·m, N) = A Bᵀ, float32; a warp loads, a warpgroup multiplies tiles of 64 rows and n columns."

    def __init__(self, n: int, b_major: str = "k", wait: int = 0, fenced: bool = True):
        self.n, self.b_major, self.wait, self.fenced = n, b_major, wait, fenced

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        kind = a.element_type
        majors = OperandMajorMode.K, OperandMajorMode.K if self.b_major == "k" else OperandMajorMode.MN
        mma = sm90.make_trivial_tiled_mma(kind, kind, *majors, Float32, (1, 1, 1), (M, self.n))
        tiler = (M, self.n, K_TILE)
        la = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, kind, STAGES)
        lb = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR if self.b_major == "n" else LayoutEnum.ROW_MAJOR, tiler, kind, STAGES)
        load = cpasync.CopyBulkTensorTileG2SOp()
        ta = cpasync.make_tiled_tma_atom(load, a, cute.slice_(la, (None, None, 0)), (M, K_TILE))
        tb = cpasync.make_tiled_tma_atom(load, b, cute.slice_(lb, (None, None, 0)), (self.n, K_TILE))

        @cute.struct
        class Storage:
            loads: cute.struct.MemRange[cutlass.Int64, 2 * STAGES]
            a: cute.struct.Align[cute.struct.MemRange[kind, cute.cosize(la.outer)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[kind, cute.cosize(lb.outer)], 1024]
        self.storage = Storage
        grid = (cute.ceil_div(d.shape[0], M), cute.ceil_div(d.shape[1], self.n), 1)
        self.kernel(mma, *ta, *tb, d, la, lb).launch(grid=grid, block=(256, 1, 1))

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, ta: cute.CopyAtom, a: cute.Tensor, tb: cute.CopyAtom, b: cute.Tensor, d: cute.Tensor,
               la: cute.ComposedLayout, lb: cute.ComposedLayout):
        warp, (im, jn, _) = arch.make_warp_uniform(arch.warp_idx()), arch.block_idx()
        st = SmemAllocator().allocate(self.storage)
        def group(n): return pipeline.CooperativeGroup(pipeline.Agent.Thread, n)
        loads = pipeline.PipelineTmaAsync.create(num_stages=STAGES, producer_group=group(1), consumer_group=group(4), barrier_storage=st.loads.data_ptr(),
                                                 tx_count=(M + self.n) * K_TILE * 2, cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)))
        sa, sb = st.a.get_tensor(la.outer, swizzle=la.inner), st.b.get_tensor(lb.outer, swizzle=lb.inner)
        steps = cute.ceil_div(a.shape[1], K_TILE)
        if warp == 4:
            stage = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            tiles = [cute.group_modes(cute.local_tile(x, (rows, K_TILE), (i, None)), 0, 2) for x, rows, i in ((a, M, im), (b, self.n, jn))]
            to_a, from_a = cpasync.tma_partition(ta, 0, cute.make_layout(1), cute.group_modes(sa, 0, 2), tiles[0])
            to_b, from_b = cpasync.tma_partition(tb, 0, cute.make_layout(1), cute.group_modes(sb, 0, 2), tiles[1])
            for step in cutlass.range(steps, unroll=1):
                loads.producer_acquire(stage)
                cute.copy(ta, from_a[(None, step)], to_a[(None, stage.index)], tma_bar_ptr=loads.producer_get_barrier(stage))
                cute.copy(tb, from_b[(None, step)], to_b[(None, stage.index)], tma_bar_ptr=loads.producer_get_barrier(stage))
                stage.advance()
            loads.producer_tail(stage)
        if warp < 4:
            self.multiply(loads, mma, sa, sb, cute.local_tile(d, (M, self.n), (im, jn)), steps)

    @cute.jit
    def multiply(self, loads: pipeline.PipelineTmaAsync, mma: cute.TiledMma, sa: cute.Tensor, sb: cute.Tensor, d: cute.Tensor, steps):
        "`wait`: groups that may be in flight when a stage is given back; 1 is too many, and a race."
        thr = mma.get_slice(arch.thread_idx()[0])
        fa, fb = mma.make_fragment_A(thr.partition_A(sa)), mma.make_fragment_B(thr.partition_B(sb))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((M, self.n)), Float32)
        stage = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for _ in cutlass.range(steps, unroll=1):
            loads.consumer_wait(stage)
            if const_expr(self.fenced):
                warpgroup.fence()
            for k in range_constexpr(K_TILE // 16):
                cute.gemm(mma, acc, fa[(None, None, k, stage.index)], fb[(None, None, k, stage.index)], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(self.wait)
            loads.consumer_release(stage)
            stage.advance()
        warpgroup.wait_group(0)
        cute.autovec_copy(acc, thr.partition_C(d))


def product(plan: Gemm, kind: torch.dtype, m: int, n: int, k: int, order: str, seed: int):
    "Largest error over its bound: products are exact, K of them are summed in float32, rounded once each 16."
    gen = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(r, k, generator=gen).to(kind) for r in (m, n))
    d = torch.full((m, n), float("nan"))
    inner = b if plan.b_major == "k" else b.t().contiguous().t()
    with machine("sm_90a", order=order, seed=seed) as e:
        args = [from_dlpack(x, assumed_align=16) for x in (a, inner, d)]
        cute.compile(plan, *args)(*args)
    exact, size = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    assert e.stats["tensor"]["flops"] == 2 * m * n * k
    return float(((d - exact).abs() / (k / 16 * 2.0**-24 * size)).nan_to_num(torch.inf).max())


if __name__ == "__main__":
    for kind in (torch.bfloat16, torch.float16):
        for n, b_major in ((64, "k"), (128, "n")):
            for order, seed in (("eager", 0), ("adversarial", 1), ("adversarial", 2)):
                worst = product(Gemm(n, b_major), kind, 128, 128, 320, order, seed)
                assert worst <= 1, (kind, n, b_major, order, worst)
                print(kind, n, b_major, order, f"{worst:.3g}")
    for plan, want in ((Gemm(64, wait=1), "race"), (Gemm(64, fenced=False), "missing fence")):
        try:
            product(plan, torch.bfloat16, 64, 64, 640, "adversarial", 3)
        except Fault as x:
            assert x.kind == want, x
            print(want)
        else:
            raise AssertionError(want)
