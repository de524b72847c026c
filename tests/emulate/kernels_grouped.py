# ruff: noqa: E402
"""Persistent SM100 GEMMs: one walks its tiles in a fixed order over experts, one asks the chip for the next tile."""
from dglu.emulate import setup

setup()

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils as utils
import cutlass.utils.blackwell_helpers as sm100
from cutlass import AddressSpace, Int32, Int64
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.tensor_utils import LayoutEnum, TensorMapManager, TensorMapUpdateMode

EPILOGUE, MMA, TMA, SCHEDULER = range(4), 4, 5, 6        # warps
Thread, Group = pipeline.Agent.Thread, pipeline.CooperativeGroup


def producer(stages):
    "State of a pipeline's producer before its first stage."
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer(stages):
    "State of a pipeline's consumer before its first stage."
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


class Persistent:
    """C = A·Bᵀ in float32, K-major BF16 or FP16 operands: the parts that do not depend on how tiles are handed out."""

    def __init__(self, tile=(128, 128), pair=False, stages=3):
        self.tile, self.pair, self.stages, self.atoms = tile, pair, stages, 2 if pair else 1
        self.cluster, self.acc_stages = (self.atoms, 1), 2          # two accumulators: one is stored while the next is computed
        self.rows = tile[0] // self.atoms                           # of a tile, in one CTA

    def configure(self, a, b):
        "MMA, shared-memory layouts and TMA atoms of A (M, K) and B (N, K)."
        group = tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE
        major = LayoutEnum.ROW_MAJOR.mma_major_mode()
        mma = sm100.make_trivial_tiled_mma(a.element_type, b.element_type, major, major, cutlass.Float32, group, self.tile)
        self.tiler = (*self.tile, 4 * cute.size(mma.shape_mnk, mode=[2]))
        self.vmnk = cute.tiled_divide(cute.make_layout((*self.cluster, 1)), (mma.thr_id.shape,))
        self.sa = sm100.make_smem_layout_a(mma, self.tiler, a.element_type, self.stages)
        self.sb = sm100.make_smem_layout_b(mma, self.tiler, b.element_type, self.stages)
        one_a, one_b = (cute.slice_(s, (None, None, None, 0)) for s in (self.sa, self.sb))
        op = cpasync.CopyBulkTensorTileG2SOp(group)
        tma_a = make_tiled_tma_atom_A(op, a, one_a, self.tiler, mma, self.vmnk.shape)
        tma_b = make_tiled_tma_atom_B(op, b, one_b, self.tiler, mma, self.vmnk.shape)
        self.bytes = self.atoms * (cute.size_in_bytes(a.element_type, one_a) + cute.size_in_bytes(b.element_type, one_b))
        self.storage = self.make_storage(a.element_type)
        return mma, tma_a, tma_b

    def make_storage(self, dtype):
        "Shared memory."
        @cute.struct
        class Storage:
            loaded: cute.struct.MemRange[Int64, self.stages * 2]
            multiplied: cute.struct.MemRange[Int64, self.acc_stages * 2]
            scheduled: cute.struct.MemRange[Int64, 2]
            dealloc: Int64
            tmem: Int32
            response: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
            tensormap: cute.struct.Align[cute.struct.MemRange[Int64, 16], 128]
            sa: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(self.sa.outer)], 1024]
            sb: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(self.sb.outer)], 1024]
        return Storage

    def make_pipelines(self, st, vmnk):
        "Operands: TMA to MMA; accumulators: MMA to epilogue; tensor memory."
        loads = pipeline.PipelineTmaUmma.create(num_stages=self.stages, producer_group=Group(Thread), consumer_group=Group(Thread),
                                                tx_count=self.bytes, barrier_storage=st.loaded.data_ptr(), cta_layout_vmnk=vmnk)
        accs = pipeline.PipelineUmmaAsync.create(num_stages=self.acc_stages, producer_group=Group(Thread),
                                                 consumer_group=Group(Thread, 128 * self.atoms),
                                                 barrier_storage=st.multiplied.data_ptr(), cta_layout_vmnk=vmnk)
        tmem = TmemAllocator(st.tmem.ptr, barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=160), allocator_warp_id=0,
                                   is_two_cta=self.pair, two_cta_tmem_dealloc_mbar_ptr=st.dealloc.ptr)
        return loads, accs, tmem

    def meet(self):
        "All CTAs of the cluster have initialised their barriers."
        if self.pair:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def operands(self, st, sa_layout, sb_layout):
        "The stages of A and of B in shared memory."
        return st.sa.get_tensor(sa_layout.outer, swizzle=sa_layout.inner), st.sb.get_tensor(sb_layout.outer, swizzle=sb_layout.inner)

    def slices(self, atom, smem, parts):
        "(source in global, target in shared memory) of a TMA atom, one slice for each step along K."
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(parts, 0, 3))

    def accumulators(self, mma, tmem):
        "The accumulators in tensor memory: (…, stage)."
        shape = cute.append(mma.partition_shape_C(self.tile), self.acc_stages)
        return cute.make_tensor(tmem.retrieve_ptr(cutlass.Float32), mma.make_fragment_C(shape).layout)

    def give_back(self, tmem):
        "The epilogue warps have read everything: tensor memory may go."
        tmem.relinquish_alloc_permit()
        cute.arch.barrier(barrier_id=2, number_of_threads=128)      # all quarters are read before the columns go
        tmem.free(tmem.retrieve_ptr(cutlass.Float32))

    @cute.jit
    def multiply_tile(self, mma: cute.TiledMma, loads, accs, state, out, fA: cute.Tensor, fB: cute.Tensor, acc: cute.Tensor, steps: Int32):
        "One tile's products: wait for each stage of operands, give it back, then hand over the accumulator."
        accs.producer_acquire(out)
        mine = acc[(None, None, None, out.index)]
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for _ in cutlass.range(steps, unroll=1):
            loads.consumer_wait(state)
            for kb in cutlass.range(cute.size(fA, mode=[2]), unroll_full=True):
                at = (None, None, kb, state.index)
                cute.gemm(mma, mine, fA[at], fB[at], mine)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            loads.consumer_release(state)
            state.advance()
        accs.producer_commit(out)
        out.advance()
        return mma, state, out

    @cute.jit
    def store_tile(self, accs, state, acc: cute.Tensor, c: cute.Tensor, row: Int32, col: Int32, last: Int32):
        "One CTA's share of an accumulator goes to C from (row, col) on; rows from `last` on belong to somebody else."
        tid, _, _ = cute.arch.thread_idx()
        shape = (self.rows, self.tile[1], self.tiler[2])
        epi = sm100.compute_epilogue_tile_shape(shape, self.pair, LayoutEnum.ROW_MAJOR, c.element_type)
        load = sm100.get_tmem_load_op(shape, LayoutEnum.ROW_MAJOR, c.element_type, cutlass.Float32, epi, self.pair)
        accs.consumer_wait(state)
        acc_epi = cute.flat_divide(acc[((None, None), 0, 0, state.index)], epi)
        copy = tcgen05.make_tmem_copy(load, acc_epi[(None, None, 0, 0)])
        mine = copy.get_slice(tid)
        src = mine.partition_S(acc_epi)
        where = mine.partition_D(cute.flat_divide(cute.make_identity_tensor((self.rows, self.tile[1])), epi))
        src, where = cute.group_modes(src, 3, cute.rank(src)), cute.group_modes(where, 3, cute.rank(where))
        for i in cutlass.range(cute.size(src, mode=[3])):
            reg = cute.make_rmem_tensor(where[(None, None, None, 0)].shape, cutlass.Float32)
            cute.copy(copy, src[(None, None, None, i)], reg)
            cute.arch.fence_view_async_tmem_load()
            self.store_row(reg, where[(None, None, None, i)], c, row, col, last)
        accs.consumer_release(state)
        state.advance()
        return state

    @cute.jit
    def store_row(self, reg: cute.Tensor, where: cute.Tensor, c: cute.Tensor, row: Int32, col: Int32, last: Int32):
        "A thread's part of one row, four columns at a time (N is a multiple of 4)."
        m, n = row + where[0][0], col + where[0][1]
        if m < last:
            for j in cutlass.range_constexpr(0, cute.size(reg), 4):
                if n + j < c.shape[1]:
                    at = (c.iterator + c.layout((m, n + j))).toint()
                    out = cute.make_tensor(cute.make_ptr(c.element_type, at, AddressSpace.gmem, assumed_align=16), cute.make_layout(4))
                    four = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Float32)
                    for k in cutlass.range_constexpr(4):
                        four[k] = reg[j + k]
                    cute.autovec_copy(four, out)


class GroupedGemm(Persistent):
    """C[rows of e] = A[rows of e]·B[e]ᵀ. `b_ptrs` holds the address of each expert's (N, K) matrix, `ends` where each expert's rows end.
    Rows from ends[-1] on are left alone. `maps`: int64 (CTAs, slots, 16), 128-byte aligned, is scratch for tensor maps. With update="before", a small kernel writes one map for each expert
    in advance and `maps` is (experts, 1, 16)."""

    def __init__(self, tile=(128, 128), pair=False, stages=3, update="smem", slots=None):
        super().__init__(tile, pair, stages)
        self.before = update == "before"
        self.mode = TensorMapUpdateMode["SMEM" if self.before else update.upper()]
        self.slots = slots or stages + 1        # when a slot comes round again, the ring of operands has: no load still uses its map

    @cute.jit
    def __call__(self, a: cute.Tensor, b_ptrs: cute.Tensor, ends: cute.Tensor, c: cute.Tensor, maps: cute.Tensor, max_clusters: cutlass.Constexpr):
        self.dtype = a.element_type
        b = self.expert_matrix(a, c, Int64(0))                      # a stand-in: its shape is right, its address is not used
        mma, (ta, ga), (tb, gb) = self.configure(a, b)
        experts = cute.size(ends)
        tiles_m = c.shape[0] // self.tile[0] + experts              # each expert may end with a partial tile
        tiles_n = cute.ceil_div(c.shape[1], self.tile[1])
        # N runs fastest, so that the rows of a CTA's tiles never go back and experts come in order
        params = utils.PersistentTileSchedulerParams((tiles_m * self.atoms, tiles_n, 1), (*self.cluster, 1), raster_along_m=False)
        grid = utils.StaticPersistentTileScheduler.get_grid_shape(params, max_clusters)
        if cutlass.const_expr(self.before):
            self.write_maps(tb, ga, b_ptrs, c, maps).launch(grid=(experts, 1, 1), block=(32, 1, 1))
        self.kernel(mma, ta, ga, tb, gb, b_ptrs, ends, c, maps, self.sa, self.sb, self.vmnk, params).launch(grid=grid, block=(192, 1, 1), cluster=(*self.cluster, 1))

    def expert_matrix(self, a, c, address):
        "B of one expert: (N, K) at an address."
        ptr = cute.make_ptr(self.dtype, address, AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(ptr, cute.make_layout((c.shape[1], a.shape[1]), stride=(a.shape[1], 1)))

    @cute.kernel
    def write_maps(self, tb: cute.CopyAtom, ga: cute.Tensor, b_ptrs: cute.Tensor, c: cute.Tensor, maps: cute.Tensor):
        "One warp an expert: its map, for the kernel that comes next."
        e, _, _ = cute.arch.block_idx()
        draft = SmemAllocator().allocate_array(Int64, 16, byte_alignment=128)
        manager, at = TensorMapManager(self.mode, 128), maps[(e, 0, None)].iterator
        manager.init_tensormap_from_atom(tb, draft, 0)
        manager.update_tensormap((self.expert_matrix(ga, c, b_ptrs[e]),), (tb,), (manager.get_tensormap_ptr(at),), 0, (draft,))

    @cute.jit
    def find_expert(self, ends: cute.Tensor, tile_m: Int32, e: Int32, first: Int32, begin: Int32, end: Int32):
        "Go on from expert e, whose rows are begin to end and whose first tile is `first`, to the one that owns tile_m."
        experts = cute.size(ends)
        while e < experts and tile_m >= first + cute.ceil_div(end - begin, self.tile[0]):
            first, begin, e = first + cute.ceil_div(end - begin, self.tile[0]), end, e + 1
            if e < experts:
                end = ends[e]
        return e, first, begin, end

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, ta: cute.CopyAtom, ga: cute.Tensor, tb: cute.CopyAtom, gb: cute.Tensor, b_ptrs: cute.Tensor,
               ends: cute.Tensor, c: cute.Tensor, maps: cute.Tensor, sa_layout: cute.ComposedLayout, sb_layout: cute.ComposedLayout, vmnk: cute.Layout,
               params: utils.PersistentTileSchedulerParams):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        v = cute.arch.block_idx()[0] % self.atoms                   # place in the pair
        st = SmemAllocator().allocate(self.storage)
        loads, accs, tmem = self.make_pipelines(st, vmnk)
        self.meet()
        sa, sb = self.operands(st, sa_layout, sb_layout)
        steps = cute.ceil_div(ga.shape[1], self.tiler[2])
        if warp == TMA:
            self.load_operands(loads, mma.get_slice(v), ta, ga, tb, gb, sa, sb, b_ptrs, ends, c, maps, st.tensormap.data_ptr(), params, steps)
        if warp == MMA:
            self.issue_mma(loads, accs, tmem, mma, sa, sb, ends, params, steps, v)
        if warp < 4:
            self.epilogue(accs, tmem, mma, ends, c, params, v)

    @cute.jit
    def load_operands(self, loads, part, ta, ga, tb, gb, sa, sb, b_ptrs, ends, c, maps, draft, params, steps):
        "TMA warp: for each tile, the map of its expert, then its steps along K."
        manager = TensorMapManager(self.mode, 128)
        x, _, z = cute.arch.block_idx()
        mine = maps[(None, 0, None)] if self.before else maps[(x + self.atoms * z, None, None)]       # one map an expert, or this CTA's slots
        if cutlass.const_expr(not self.before):
            self.copy_template(manager, tb, mine, draft)
        tBs, tBg = self.slices(tb, sb, part.partition_B(cute.local_tile(gb, (self.tile[1], self.tiler[2]), (None, None))))
        state, bound, slot = producer(self.stages), Int32(-1), Int32(0)
        e, first, begin, end = Int32(0), Int32(0), Int32(0), ends[0]
        sched = utils.StaticPersistentTileScheduler.create(params, cute.arch.block_idx(), cute.arch.grid_dim())
        work = sched.initial_work_tile_info()
        while work.is_valid_tile:
            tile_m = work.tile_idx[0] // self.atoms
            e, first, begin, end = self.find_expert(ends, tile_m, e, first, begin, end)
            if e < cute.size(ends):
                if e != bound and self.before:
                    bound, slot = e, e
                    manager.fence_tensormap_update(manager.get_tensormap_ptr(mine[(e, None)].iterator))
                elif e != bound:
                    bound, slot = e, (slot + 1) % self.slots
                    self.write_map(manager, tb, self.expert_matrix(ga, c, b_ptrs[e]), mine[(slot, None)], draft)
                rows = cute.domain_offset((begin + (tile_m - first) * self.tile[0], 0), ga)
                tAs, tAg = self.slices(ta, sa, part.partition_A(cute.local_tile(rows, (self.tile[0], self.tiler[2]), (0, None))))
                desc = manager.get_tensormap_ptr(mine[(slot, None)].iterator, AddressSpace.generic)
                for k in cutlass.range(steps, unroll=1):
                    loads.producer_acquire(state)
                    bar = loads.producer_get_barrier(state)
                    cute.copy(ta, tAg[(None, k)], tAs[(None, state.index)], tma_bar_ptr=bar)
                    cute.copy(tb, tBg[(None, work.tile_idx[1], k)], tBs[(None, state.index)], tma_bar_ptr=bar, tma_desc_ptr=desc)
                    state.advance()
            sched.advance_to_next_work()
            work = sched.get_current_work()
        loads.producer_tail(state)

    def copy_template(self, manager, atom, slots, draft):
        "The map that the host made goes where it will be edited: to shared memory, or into every slot."
        if self.mode == TensorMapUpdateMode.SMEM:
            manager.init_tensormap_from_atom(atom, draft, TMA)
        else:
            for i in range(self.slots):
                manager.init_tensormap_from_atom(atom, manager.get_tensormap_ptr(slots[(i, None)].iterator), TMA)
        manager.fence_tensormap_initialization()

    def write_map(self, manager, atom, tensor, slot, draft):
        "Address, sizes and strides of a tensor go into a slot; this CTA's TMA will see them."
        at = manager.get_tensormap_ptr(slot.iterator)
        manager.update_tensormap((tensor,), (atom,), (at,), TMA, (draft,))
        manager.fence_tensormap_update(at)

    @cute.jit
    def issue_mma(self, loads, accs, tmem, mma, sa, sb, ends, params, steps, v):
        "MMA warp of the first CTA: for each tile, all products."
        tmem.wait_for_alloc()
        acc = self.accumulators(mma, tmem)
        fA, fB = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        state, out = consumer(self.stages), producer(self.acc_stages)
        e, first, begin, end = Int32(0), Int32(0), Int32(0), ends[0]
        sched = utils.StaticPersistentTileScheduler.create(params, cute.arch.block_idx(), cute.arch.grid_dim())
        work = sched.initial_work_tile_info()
        if v == 0:
            while work.is_valid_tile:
                e, first, begin, end = self.find_expert(ends, work.tile_idx[0] // self.atoms, e, first, begin, end)
                if e < cute.size(ends):
                    mma, state, out = self.multiply_tile(mma, loads, accs, state, out, fA, fB, acc, steps)
                sched.advance_to_next_work()
                work = sched.get_current_work()
            accs.producer_tail(out)

    @cute.jit
    def epilogue(self, accs, tmem, mma, ends, c, params, v):
        "Warps 0 to 3: for each tile, this CTA's rows of the accumulator go to C."
        tmem.allocate(512)
        tmem.wait_for_alloc()
        acc = self.accumulators(mma, tmem)
        state = consumer(self.acc_stages)
        e, first, begin, end = Int32(0), Int32(0), Int32(0), ends[0]
        sched = utils.StaticPersistentTileScheduler.create(params, cute.arch.block_idx(), cute.arch.grid_dim())
        work = sched.initial_work_tile_info()
        while work.is_valid_tile:
            tile_m = work.tile_idx[0] // self.atoms
            e, first, begin, end = self.find_expert(ends, tile_m, e, first, begin, end)
            if e < cute.size(ends):
                row = begin + (tile_m - first) * self.tile[0] + v * self.rows
                state = self.store_tile(accs, state, acc, c, row, work.tile_idx[1] * self.tile[1], end)
            sched.advance_to_next_work()
            work = sched.get_current_work()
        self.give_back(tmem)


class DynamicGemm(Persistent):
    """C = A·Bᵀ, dense. The grid has a CTA (or pair) for each tile, but a running one takes over tiles whose CTAs have not started: the
    scheduler warp asks with clusterlaunchcontrol.try_cancel, everybody reads the answer. `owner` (tiles of M, tiles of N) tells who computed a tile."""

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, owner: cute.Tensor):
        mma, (ta, ga), (tb, gb) = self.configure(a, b)
        tiles_m, tiles_n = cute.ceil_div(c.shape[0], self.tile[0]), cute.ceil_div(c.shape[1], self.tile[1])
        params = utils.ClcDynamicPersistentTileSchedulerParams((tiles_m * self.atoms, tiles_n, 1), (*self.cluster, 1))
        grid = params.get_grid_shape()
        self.kernel(mma, ta, ga, tb, gb, c, owner, self.sa, self.sb, self.vmnk, params).launch(grid=grid, block=(224, 1, 1), cluster=(*self.cluster, 1))

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, ta: cute.CopyAtom, ga: cute.Tensor, tb: cute.CopyAtom, gb: cute.Tensor, c: cute.Tensor, owner: cute.Tensor,
               sa_layout: cute.ComposedLayout, sb_layout: cute.ComposedLayout, vmnk: cute.Layout,
               params: utils.ClcDynamicPersistentTileSchedulerParams):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        v = cute.arch.block_idx()[0] % self.atoms
        st = SmemAllocator().allocate(self.storage)
        loads, accs, tmem = self.make_pipelines(st, vmnk)
        readers = 32 * (6 * self.atoms + 1)                         # epilogue, MMA and TMA warps of each CTA, and the scheduler itself
        answers = pipeline.PipelineClcFetchAsync.create(num_stages=1, producer_group=Group(Thread), consumer_group=Group(Thread, readers),
                                                        tx_count=16, barrier_storage=st.scheduled.data_ptr(), cta_layout_vmnk=vmnk)
        self.meet()
        sa, sb = self.operands(st, sa_layout, sb_layout)
        steps = cute.ceil_div(ga.shape[1], self.tiler[2])
        sched = utils.ClcDynamicPersistentTileScheduler.create(params, cute.arch.block_idx(), cute.arch.grid_dim(), st.response.data_ptr())
        if warp == SCHEDULER and v == 0:
            self.ask(sched, answers)
        if warp == TMA:
            self.load_operands(sched, answers, loads, mma.get_slice(v), ta, ga, tb, gb, sa, sb, steps)
        if warp == MMA:
            self.issue_mma(sched, answers, loads, accs, tmem, mma, sa, sb, steps, v)
        if warp < 4:
            self.epilogue(sched, answers, accs, tmem, mma, c, owner)

    @cute.jit
    def ask(self, sched, answers):
        "Scheduler warp of the first CTA: one question for each tile, until the first refusal."
        state, read = producer(1), consumer(1)
        work = sched.initial_work_tile_info()                       # the first tile is the CTA's own
        while work.is_valid_tile:
            answers.producer_acquire(state)                         # everybody has read the last answer
            sched.advance_to_next_work(answers.producer_get_barrier(state))
            state.advance()
            work, read = self.next_tile(sched, answers, read)
        answers.producer_tail(state)

    @cute.jit
    def next_tile(self, sched, answers, read):
        "Read the answer about the next tile and give its place back."
        answers.consumer_wait(read)
        work = sched.get_current_work()                             # with the proxy fence that the next answer needs
        answers.consumer_release(read)
        read.advance()
        return work, read

    @cute.jit
    def load_operands(self, sched, answers, loads, part, ta, ga, tb, gb, sa, sb, steps):
        "TMA warp."
        tAs, tAg = self.slices(ta, sa, part.partition_A(cute.local_tile(ga, (self.tile[0], self.tiler[2]), (None, None))))
        tBs, tBg = self.slices(tb, sb, part.partition_B(cute.local_tile(gb, (self.tile[1], self.tiler[2]), (None, None))))
        state, read = producer(self.stages), consumer(1)
        work = sched.initial_work_tile_info()
        while work.is_valid_tile:
            for k in cutlass.range(steps, unroll=1):
                loads.producer_acquire(state)
                bar = loads.producer_get_barrier(state)
                cute.copy(ta, tAg[(None, work.tile_idx[0] // self.atoms, k)], tAs[(None, state.index)], tma_bar_ptr=bar)
                cute.copy(tb, tBg[(None, work.tile_idx[1], k)], tBs[(None, state.index)], tma_bar_ptr=bar)
                state.advance()
            work, read = self.next_tile(sched, answers, read)
        loads.producer_tail(state)

    @cute.jit
    def issue_mma(self, sched, answers, loads, accs, tmem, mma, sa, sb, steps, v):
        "MMA warp; in the second CTA of a pair it only reads the answers."
        tmem.wait_for_alloc()
        acc = self.accumulators(mma, tmem)
        fA, fB = mma.make_fragment_A(sa), mma.make_fragment_B(sb)
        state, out, read = consumer(self.stages), producer(self.acc_stages), consumer(1)
        work = sched.initial_work_tile_info()
        while work.is_valid_tile:
            if v == 0:
                mma, state, out = self.multiply_tile(mma, loads, accs, state, out, fA, fB, acc, steps)
            work, read = self.next_tile(sched, answers, read)
        accs.producer_tail(out)

    @cute.jit
    def epilogue(self, sched, answers, accs, tmem, mma, c, owner):
        "Warps 0 to 3."
        tmem.allocate(512)
        tmem.wait_for_alloc()
        acc = self.accumulators(mma, tmem)
        state, read = consumer(self.acc_stages), consumer(1)
        work = sched.initial_work_tile_info()
        tid, _, _ = cute.arch.thread_idx()
        x, y, _ = cute.arch.block_idx()
        while work.is_valid_tile:
            if tid == 0 and work.tile_idx[0] % self.atoms == 0:
                owner[work.tile_idx[0] // self.atoms, work.tile_idx[1]] = x // self.atoms + owner.shape[0] * y
            state = self.store_tile(accs, state, acc, c, work.tile_idx[0] * self.rows, work.tile_idx[1] * self.tile[1], c.shape[0])
            work, read = self.next_tile(sched, answers, read)
        self.give_back(tmem)
