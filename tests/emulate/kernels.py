# ruff: noqa: E402
"""SM100 kernels that the emulator's tests run: written for this purpose, small, and complete."""
from dglu.emulate import setup

setup()

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils as utils
import cutlass.utils.blackwell_helpers as sm100
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.tensor_utils import LayoutEnum


class Gemm:
    """C = A·Bᵀ with A (M, K, L), B (N, K, L), C (M, N, L): one tile a CTA (or pair), warps 0-3 epilogue, 4 MMA, 5 TMA."""

    def __init__(self, tile=(128, 128), cluster=(1, 1), pair=False, stages=3):
        self.tile, self.cluster, self.pair, self.stages = tile, cluster, pair, stages
        self.group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        mma = sm100.make_trivial_tiled_mma(a.element_type, LayoutEnum.from_tensor(a).mma_major_mode(),
                                           LayoutEnum.from_tensor(b).mma_major_mode(), cutlass.Float32, self.group, self.tile)
        self.type_a, self.type_b = a.element_type, b.element_type
        k = cute.size(mma.shape_mnk, mode=[2]) * 4
        self.tiler = (*self.tile, k)
        self.vmnk = cute.tiled_divide(cute.make_layout((*self.cluster, 1)), (mma.thr_id.shape,))
        self.sa = sm100.make_smem_layout_a(mma, self.tiler, a.element_type, self.stages)
        self.sb = sm100.make_smem_layout_b(mma, self.tiler, b.element_type, self.stages)
        ta, ga = make_tiled_tma_atom_A(sm100.cluster_shape_to_tma_atom_A(self.cluster, mma.thr_id), a, cute.slice_(self.sa, (None, None, None, 0)),
                                       self.tiler, mma, self.vmnk.shape)
        tb, gb = make_tiled_tma_atom_B(sm100.cluster_shape_to_tma_atom_B(self.cluster, mma.thr_id), b, cute.slice_(self.sb, (None, None, None, 0)),
                                       self.tiler, mma, self.vmnk.shape)
        atoms = cute.size(mma.thr_id.shape)
        self.bytes = atoms * (cute.size_in_bytes(a.element_type, cute.slice_(self.sa, (None, None, None, 0)))
                              + cute.size_in_bytes(b.element_type, cute.slice_(self.sb, (None, None, None, 0))))

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, self.stages * 2]
            done: cute.struct.MemRange[cutlass.Int64, 2]
            dealloc: cutlass.Int64
            tmem: cutlass.Int32
            sa: cute.struct.Align[cute.struct.MemRange[self.type_a, cute.cosize(self.sa.outer)], 1024]
            sb: cute.struct.Align[cute.struct.MemRange[self.type_b, cute.cosize(self.sb.outer)], 1024]

        self.storage = Storage
        tiles_m, tiles_n = cute.ceil_div(c.shape[0], self.tile[0] // atoms), cute.ceil_div(c.shape[1], self.tile[1])
        self.kernel(mma, ta, ga, tb, gb, c, self.sa, self.sb, self.vmnk).launch(
            grid=(cute.round_up(tiles_m, self.cluster[0]), cute.round_up(tiles_n, self.cluster[1]), c.shape[2]),
            block=(192, 1, 1), cluster=(*self.cluster, 1))

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, ta: cute.CopyAtom, ga: cute.Tensor, tb: cute.CopyAtom, gb: cute.Tensor, c: cute.Tensor,
               sa_layout: cute.ComposedLayout, sb_layout: cute.ComposedLayout, vmnk: cute.Layout):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bx, by, bz = cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place = vmnk.get_flat_coord(rank)
        v = bx % cute.size(mma.thr_id.shape)
        leader = v == 0
        tile = (bx // cute.size(mma.thr_id.shape), by, None, bz)

        smem = utils.SmemAllocator()
        st = smem.allocate(self.storage)
        peers = cute.size(vmnk, mode=[1]) + cute.size(vmnk, mode=[2]) - 1
        loads = pipeline.PipelineTmaUmma.create(
            num_stages=self.stages, producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, peers), tx_count=self.bytes, barrier_storage=st.full.data_ptr(),
            cta_layout_vmnk=vmnk)
        acc_pipe = pipeline.PipelineUmmaAsync.create(
            num_stages=1, producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 128 * cute.size(mma.thr_id.shape)),
            barrier_storage=st.done.data_ptr(), cta_layout_vmnk=vmnk)
        tmem = utils.TmemAllocator(st.tmem.ptr, barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=160), allocator_warp_id=0,
                                   is_two_cta=self.pair, two_cta_tmem_dealloc_mbar_ptr=st.dealloc.ptr)
        if cute.size(vmnk) > 1:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        sa = st.sa.get_tensor(sa_layout.outer, swizzle=sa_layout.inner)
        sb = st.sb.get_tensor(sb_layout.outer, swizzle=sb_layout.inner)
        gA = cute.local_tile(ga, cute.slice_(self.tiler, (None, 0, None)), (None, None, None))
        gB = cute.local_tile(gb, cute.slice_(self.tiler, (0, None, None)), (None, None, None))
        gC = cute.local_tile(c, cute.slice_(self.tiler, (None, None, 0)), (None, None, None))
        part = mma.get_slice(v)
        pA, pB, pC = part.partition_A(gA), part.partition_B(gB), part.partition_C(gC)
        tAs, tAg = cpasync.tma_partition(ta, place[2], cute.make_layout(cute.slice_(vmnk, (0, 0, None, 0)).shape), cute.group_modes(sa, 0, 3), cute.group_modes(pA, 0, 3))
        tBs, tBg = cpasync.tma_partition(tb, place[1], cute.make_layout(cute.slice_(vmnk, (0, None, 0, 0)).shape), cute.group_modes(sb, 0, 3), cute.group_modes(pB, 0, 3))
        a_mask, b_mask = None, None
        if cutlass.const_expr(cute.size(vmnk) > 1):
            a_mask = cpasync.create_tma_multicast_mask(vmnk, place, mcast_mode=2)
            b_mask = cpasync.create_tma_multicast_mask(vmnk, place, mcast_mode=1)
        fA, fB = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        acc_shape = mma.partition_shape_C(self.tile)
        acc_fake = mma.make_fragment_C(acc_shape)
        kt = cute.size(gA, mode=[3])

        if warp == 5:
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
            for i in cutlass.range(kt, unroll=1):
                loads.producer_acquire(state)
                bar = loads.producer_get_barrier(state)
                cute.copy(ta, tAg[(None, tile[0], i, tile[3])], tAs[(None, state.index)], tma_bar_ptr=bar, mcast_mask=a_mask)
                cute.copy(tb, tBg[(None, tile[1], i, tile[3])], tBs[(None, state.index)], tma_bar_ptr=bar, mcast_mask=b_mask)
                state.advance()
            loads.producer_tail(state)

        if warp == 4:
            tmem.wait_for_alloc()
            acc = cute.make_tensor(tmem.retrieve_ptr(cutlass.Float32), acc_fake.layout)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            out = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
            if leader:
                acc_pipe.producer_acquire(out)
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(kt, unroll=1):
                    loads.consumer_wait(state)
                    for kb in cutlass.range(cute.size(fA, mode=[2]), unroll_full=True):
                        at = (None, None, kb, state.index)
                        cute.gemm(mma, acc, fA[at], fB[at], acc)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    loads.consumer_release(state)
                    state.advance()
                acc_pipe.producer_commit(out)
                out.advance()
                acc_pipe.producer_tail(out)

        if warp < 4:
            tmem.allocate(512)
            tmem.wait_for_alloc()
            ptr = tmem.retrieve_ptr(cutlass.Float32)
            acc = cute.make_tensor(ptr, acc_fake.layout)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
            acc_pipe.consumer_wait(state)
            rows = self.tile[0] // cute.size(mma.thr_id.shape)
            epi = sm100.compute_epilogue_tile_shape((rows, self.tile[1], self.tiler[2]), self.pair, LayoutEnum.ROW_MAJOR, c.element_type)
            load = sm100.get_tmem_load_op((rows, self.tile[1], self.tiler[2]), LayoutEnum.ROW_MAJOR, c.element_type, cutlass.Float32, epi, self.pair)
            acc_epi = cute.flat_divide(acc[((None, None), 0, 0)], epi)
            copy = tcgen05.make_tmem_copy(load, acc_epi[(None, None, 0, 0)])
            mine = copy.get_slice(tid)
            src = mine.partition_S(acc_epi)
            tile_c = pC[((None, None), 0, 0, tile[0], tile[1], tile[3])]
            dst = mine.partition_D(cute.flat_divide(tile_c, epi))
            src = cute.group_modes(src, 3, cute.rank(src))
            dst = cute.group_modes(dst, 3, cute.rank(dst))
            reg = cute.make_rmem_tensor(dst[(None, None, None, 0)].shape, cutlass.Float32)
            for i in cutlass.range(cute.size(src, mode=[3])):
                cute.copy(copy, src[(None, None, None, i)], reg)
                cute.arch.fence_view_async_tmem_load()
                out = cute.make_rmem_tensor(reg.shape, c.element_type)
                out.store(reg.load().to(c.element_type))
                cute.autovec_copy(out, dst[(None, None, None, i)])
            acc_pipe.consumer_release(state)
            tmem.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=2, number_of_threads=128)      # all quarters are read before the columns go
            tmem.free(ptr)
