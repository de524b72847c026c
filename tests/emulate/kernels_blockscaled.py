# ruff: noqa: E402
"""A block-scaled SM100 GEMM for the emulator's tests and for its notebook: MXFP8, MXFP4 and NVFP4, on one CTA or a pair."""
from dglu.emulate import setup

setup()

import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.tensor_utils import LayoutEnum

ATOM = 512              # bytes of a scale-factor atom: 128 rows x 4 blocks of K, as 32 lines of 16
LINE = 16               # of one lane: rows r, r + 32, r + 64, r + 96, four blocks each
LANE = 1 << 18          # from lane to lane of tensor memory: an address counts lanes from bit 16 and columns of four bytes
E4M3, E5M2, E2M1, E8M0 = cutlass.Float8E4M3FN, cutlass.Float8E5M2, cutlass.Float4E2M1FN, cutlass.Float8E8M0FNU


class BlockScaledGemm:
    """C = (A·SFA)·(B·SFB)ᵀ in float32. A, B: bytes (M, K, L), (N, K, L), FP4 in pairs along K; SFA, SFB: bytes (L, rest_m, rest_k, 512).

    One tile a CTA (or a pair): warps 0-3 store, warp 4 copies scales and multiplies, warp 5 loads. M and N are multiples of the tile.
    """

    def __init__(self, a_type=E4M3, b_type=E4M3, sf_type=E8M0, block=32, tile=(128, 128), cluster=(1, 1), pair=False, stages=3):
        self.types, self.sf_type, self.block = (a_type, b_type), sf_type, block
        self.tile, self.cluster, self.pair, self.stages = tile, cluster, pair, stages
        self.group, self.ctas = (tcgen05.CtaGroup.TWO, 2) if pair else (tcgen05.CtaGroup.ONE, 1)
        if tile[0] != 128 * self.ctas or tile[1] not in (64, 128, 192, 256):
            raise ValueError(f"tile = {tile}: M must be {128 * self.ctas} (128 a CTA), N one of 64, 128, 192, 256.")
        self.atoms_n = -(-tile[1] // 128)       # a tile of 64 or 192 columns begins at row 0 or 64 of an atom: no further one is touched

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, sfa: cute.Tensor, sfb: cute.Tensor, c: cute.Tensor):
        a, b = cute.recast_tensor(a, self.types[0]), cute.recast_tensor(b, self.types[1])
        mma = sm100.make_blockscaled_trivial_tiled_mma(
            *self.types, LayoutEnum.from_tensor(a).mma_major_mode(), LayoutEnum.from_tensor(b).mma_major_mode(), self.sf_type, self.block,
            self.group, self.tile)
        self.k = cute.size(mma.shape_mnk, mode=[2])
        self.tiler = (*self.tile, 4 * self.k)
        self.atoms_k = self.tiler[2] // self.block // 4
        self.vmnk = cute.tiled_divide(cute.make_layout((*self.cluster, 1)), (mma.thr_id.shape,))
        self.sa = sm100.make_smem_layout_a(mma, self.tiler, self.types[0], self.stages)
        self.sb = sm100.make_smem_layout_b(mma, self.tiler, self.types[1], self.stages)
        one_a, one_b = cute.slice_(self.sa, (None, None, None, 0)), cute.slice_(self.sb, (None, None, None, 0))
        load_a, load_b = sm100.cluster_shape_to_tma_atom_A(self.cluster, mma.thr_id), sm100.cluster_shape_to_tma_atom_B(self.cluster, mma.thr_id)
        ta, ga = make_tiled_tma_atom_A(load_a, a, one_a, self.tiler, mma, self.vmnk.shape)
        tb, gb = make_tiled_tma_atom_B(load_b, b, one_b, self.tiler, mma, self.vmnk.shape)
        tsa, gsa = self.scale_loads(load_a, sfa, self.cluster[1])
        tsb, gsb = self.scale_loads(sm100.cluster_shape_to_tma_atom_SFB(self.cluster, mma.thr_id), sfb, self.cluster[0])
        self.bytes = self.ctas * (cute.size_in_bytes(self.types[0], one_a) + cute.size_in_bytes(self.types[1], one_b)
                                  + ATOM * self.atoms_k * (1 + self.atoms_n))

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, self.stages * 2]
            done: cute.struct.MemRange[cutlass.Int64, 2]
            dealloc: cutlass.Int64
            tmem: cutlass.Int32
            sa: cute.struct.Align[cute.struct.MemRange[self.types[0], cute.cosize(self.sa.outer)], 1024]
            sb: cute.struct.Align[cute.struct.MemRange[self.types[1], cute.cosize(self.sb.outer)], 1024]
            sfa: cute.struct.Align[cute.struct.MemRange[cutlass.Int16, self.stages * self.atoms_k * ATOM // 2], 1024]
            sfb: cute.struct.Align[cute.struct.MemRange[cutlass.Int16, self.stages * self.atoms_k * self.atoms_n * ATOM // 2], 1024]

        self.storage = Storage
        tiles_m, tiles_n = cute.ceil_div(c.shape[0], self.tile[0] // self.ctas), cute.ceil_div(c.shape[1], self.tile[1])
        self.kernel(mma, ta, ga, tb, gb, tsa, gsa, tsb, gsb, c, self.sa, self.sb, self.vmnk).launch(
            grid=(cute.round_up(tiles_m, self.cluster[0]), cute.round_up(tiles_n, self.cluster[1]), c.shape[2]),
            block=(192, 1, 1), cluster=(*self.cluster, 1))

    def scale_loads(self, op, sf: cute.Tensor, copies: int):
        "TMA of one K step's atoms of 128 rows. To the TMA an atom is 256 numbers of 16 bits: a box has at most 256 of anything."
        L, rest_m, rest_k, _ = sf.shape
        atoms = cute.make_tensor(cute.recast_ptr(sf.iterator, dtype=cutlass.Int16), cute.make_layout(
            (256, rest_k, rest_m, L), stride=(1, 256, 256 * rest_k, 256 * rest_k * rest_m)))
        return cpasync.make_tiled_tma_atom(op, atoms, cute.make_layout((256, self.atoms_k)), (256, self.atoms_k), copies)

    def scale_parts(self, t, g, s, at, copies):
        "Source (…, K step, 128 rows, L) and destination (…, atom row, stage) of the loads."
        g = cute.local_tile(g, (256, self.atoms_k), (0, None, None, None))
        return cpasync.tma_partition(t, at, cute.make_layout(copies), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))

    def scale_copy(self, s, t, rows):
        "tcgen05.cp of a stage: an atom's 32 lines of 16 bytes go to 32 lanes x 4 columns, four times over. Atoms of one K stand side by side."
        n = (rows, self.atoms_k, self.stages)
        s = cute.make_tensor(cute.recast_ptr(s.iterator, dtype=self.sf_type), cute.make_layout(
            (((32, 4), LINE), *n), stride=(((LINE, 0), 1), self.atoms_k * ATOM, ATOM, rows * self.atoms_k * ATOM)))
        t = cute.make_tensor(t, cute.make_layout(
            (((32, 4), LINE), *n), stride=(((LANE, 32 * LANE), 1), LINE, rows * LINE, rows * self.atoms_k * LINE)))
        copy = tcgen05.make_s2t_copy(cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.group), self.sf_type), t[(None, None, None, 0)])
        part = copy.get_slice(0)
        return copy, tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(s)), part.partition_D(t)

    @cute.jit
    def load(self, mma, vmnk, loads, ops, sources, buffers):
        "Warp 5: A, B and their scales of each K step arrive on one barrier."
        bx, by, bz = cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place = vmnk.get_flat_coord(rank)
        (ta, tb, tsa, tsb), (ga, gb, gsa, gsb), (sa, sb, sfa, sfb) = ops, sources, buffers
        part = mma.get_slice(place[0])
        gA = part.partition_A(cute.local_tile(ga, cute.slice_(self.tiler, (None, 0, None)), (None, None, None)))
        gB = part.partition_B(cute.local_tile(gb, cute.slice_(self.tiler, (0, None, None)), (None, None, None)))
        over_n, over_m = cute.make_layout(cute.size(vmnk, mode=[2])), cute.make_layout(cute.size(vmnk, mode=[1]))
        tAs, tAg = cpasync.tma_partition(ta, place[2], over_n, cute.group_modes(sa, 0, 3), cute.group_modes(gA, 0, 3))
        tBs, tBg = cpasync.tma_partition(tb, place[1], over_m, cute.group_modes(sb, 0, 3), cute.group_modes(gB, 0, 3))
        # SFA goes where A goes. B's rows are halved between the CTAs of a pair, SFB goes to both whole.
        tSAs, tSAg = self.scale_parts(tsa, gsa, sfa, place[2], self.cluster[1])
        tSBs, tSBg = self.scale_parts(tsb, gsb, sfb, rank % self.cluster[0], self.cluster[0])
        a_mask, b_mask, sb_mask = None, None, None
        if cutlass.const_expr(cute.size(vmnk) > 1):
            a_mask = cpasync.create_tma_multicast_mask(vmnk, place, mcast_mode=2)
            b_mask = cpasync.create_tma_multicast_mask(vmnk, place, mcast_mode=1)
            sb_mask = cutlass.Int16((1 << self.cluster[0]) - 1) << cutlass.Int16(rank // self.cluster[0] * self.cluster[0])
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for i in cutlass.range(cute.size(gA, mode=[4]), unroll=1):
            loads.producer_acquire(state)
            bar, at = loads.producer_get_barrier(state), state.index
            cute.copy(ta, tAg[(None, bx // self.ctas, i, bz)], tAs[(None, at)], tma_bar_ptr=bar, mcast_mask=a_mask)
            cute.copy(tb, tBg[(None, by, i, bz)], tBs[(None, at)], tma_bar_ptr=bar, mcast_mask=b_mask)
            cute.copy(tsa, tSAg[(None, i, bx, bz)], tSAs[(None, 0, at)], tma_bar_ptr=bar, mcast_mask=a_mask)
            for n in cutlass.range_constexpr(self.atoms_n):
                first = by * self.tile[1] // 128
                cute.copy(tsb, tSBg[(None, i, first + n, bz)], tSBs[(None, n, at)], tma_bar_ptr=bar, mcast_mask=sb_mask)
            state.advance()
        loads.producer_tail(state)

    @cute.jit
    def multiply(self, mma, loads, done, acc, buffers, steps):
        "Warp 4 of the (even) CTA: scales to tensor memory, then four products, for each K step."
        _, by, _ = cute.arch.block_idx()
        sa, sb, sfa, sfb = buffers
        size_a, size_b = LINE * self.atoms_k, LINE * self.atoms_k * self.atoms_n         # bytes of a lane for a stage
        t_sfa = cute.recast_ptr(acc.iterator + self.tile[1], dtype=self.sf_type)        # the columns behind the accumulator's
        t_sfb = t_sfa + self.stages * size_a
        copy_a, from_a, to_a = self.scale_copy(sfa, t_sfa, 1)
        copy_b, from_b, to_b = self.scale_copy(sfb, t_sfb, self.atoms_n)
        row = by * self.tile[1] % 128                   # of the atom at which the tile begins, 0 or 64: two columns of four bytes further
        fA, fB = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        out = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        done.producer_acquire(out)
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for _ in cutlass.range(steps, unroll=1):
            loads.consumer_wait(state)
            # PTX orders a copy before later products, not products before a later copy. So a stage has columns of its own: whoever
            # waited for its bytes knows that the products which read the old scales are done.
            at = (None, None, None, None, state.index)
            cute.copy(copy_a, from_a[at], to_a[at])
            cute.copy(copy_b, from_b[at], to_b[at])
            for kb in cutlass.range_constexpr(4):
                sf = kb * self.k // self.block          # the product's first scale along K: atom sf // 4, byte sf % 4 of a column
                mma.set(tcgen05.Field.SFA, t_sfa + state.index * size_a + (sf // 4 * LINE + sf % 4))
                mma.set(tcgen05.Field.SFB, t_sfb + state.index * size_b + (sf // 4 * LINE * self.atoms_n + sf % 4) + row // 32 * 4)
                cute.gemm(mma, acc, fA[(None, None, kb, state.index)], fB[(None, None, kb, state.index)], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            loads.consumer_release(state)
            state.advance()
        done.producer_commit(out)
        out.advance()
        done.producer_tail(out)

    @cute.jit
    def store(self, mma, v, done, acc, c):
        "Warps 0 to 3: the accumulator to C, a lane a row."
        tid, _, _ = cute.arch.thread_idx()
        bx, by, bz = cute.arch.block_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        done.consumer_wait(state)
        shape = (128, self.tile[1], self.tiler[2])
        epi = sm100.compute_epilogue_tile_shape(shape, self.pair, LayoutEnum.ROW_MAJOR, c.element_type)
        read = sm100.get_tmem_load_op(shape, LayoutEnum.ROW_MAJOR, c.element_type, cutlass.Float32, epi, self.pair)
        acc_epi = cute.flat_divide(acc[((None, None), 0, 0)], epi)
        copy = tcgen05.make_tmem_copy(read, acc_epi[(None, None, 0, 0)])
        mine = copy.get_slice(tid)
        gC = mma.get_slice(v).partition_C(cute.local_tile(c, self.tile, (None, None, None)))
        src = mine.partition_S(acc_epi)
        dst = mine.partition_D(cute.flat_divide(gC[((None, None), 0, 0, bx // self.ctas, by, bz)], epi))
        src, dst = cute.group_modes(src, 3, cute.rank(src)), cute.group_modes(dst, 3, cute.rank(dst))
        reg = cute.make_rmem_tensor(dst[(None, None, None, 0)].shape, cutlass.Float32)
        for i in cutlass.range(cute.size(src, mode=[3])):
            cute.copy(copy, src[(None, None, None, i)], reg)
            cute.arch.fence_view_async_tmem_load()
            cute.autovec_copy(reg, dst[(None, None, None, i)])
        done.consumer_release(state)

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, ta: cute.CopyAtom, ga: cute.Tensor, tb: cute.CopyAtom, gb: cute.Tensor, tsa: cute.CopyAtom,
               gsa: cute.Tensor, tsb: cute.CopyAtom, gsb: cute.Tensor, c: cute.Tensor, sa_layout: cute.ComposedLayout,
               sb_layout: cute.ComposedLayout, vmnk: cute.Layout):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bx, _, _ = cute.arch.block_idx()
        v = bx % self.ctas
        smem = memory.SmemAllocator()
        st = smem.allocate(self.storage)
        one, peers = pipeline.CooperativeGroup(pipeline.Agent.Thread), cute.size(vmnk, mode=[1]) + cute.size(vmnk, mode=[2]) - 1
        loads = pipeline.PipelineTmaUmma.create(
            num_stages=self.stages, producer_group=one, consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, peers),
            tx_count=self.bytes, barrier_storage=st.full.data_ptr(), cta_layout_vmnk=vmnk)
        done = pipeline.PipelineUmmaAsync.create(
            num_stages=1, producer_group=one, consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 128 * self.ctas),
            barrier_storage=st.done.data_ptr(), cta_layout_vmnk=vmnk)
        tmem = memory.TmemAllocator(st.tmem.ptr, barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=160), allocator_warp_id=0,
                                   is_two_cta=self.pair, two_cta_tmem_dealloc_mbar_ptr=st.dealloc.ptr)
        if cute.size(vmnk) > 1:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        buffers = (st.sa.get_tensor(sa_layout.outer, swizzle=sa_layout.inner), st.sb.get_tensor(sb_layout.outer, swizzle=sb_layout.inner),
                   st.sfa.get_tensor(cute.make_layout((256, self.atoms_k, 1, self.stages))),
                   st.sfb.get_tensor(cute.make_layout((256, self.atoms_k, self.atoms_n, self.stages))))
        acc_layout = mma.make_fragment_C(mma.partition_shape_C(self.tile)).layout
        if warp == 5:
            self.load(mma, vmnk, loads, (ta, tb, tsa, tsb), (ga, gb, gsa, gsb), buffers)
        if warp < 4:
            tmem.allocate(512)
            tmem.wait_for_alloc()
            ptr = tmem.retrieve_ptr(cutlass.Float32)
            self.store(mma, v, done, cute.make_tensor(ptr, acc_layout), c)
            tmem.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=2, number_of_threads=128)      # all quarters are read before the columns go
            tmem.free(ptr)
        if warp == 4:                                                   # last: `multiply` sets fields of mma, and its changes end with the branch
            tmem.wait_for_alloc()
            acc = cute.make_tensor(tmem.retrieve_ptr(cutlass.Float32), acc_layout)
            if v == 0:
                self.multiply(mma, loads, done, acc, buffers, cute.ceil_div(cute.size(ga, mode=[1]), self.tiler[2]))
