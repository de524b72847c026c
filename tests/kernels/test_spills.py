"""The machine code of what ships: no spill, and no more issue slots an element than the kernels' page says."""
import pytest

pytest.importorskip("cutlass")
from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float8E5M2, Float8E8M0FNU, Float16, Float32

from dglu.kernels.epilogue import GeGLU, SiTU, SwiGLU
from dglu.kernels.formats import Scaled
from dglu.kernels.machine_code import Sass, cost, disassemble, inner_loop, nvdisasm, ordinary_way
from dglu.kernels.mainloop_sm100 import SMEM_BYTES, Plan
from dglu.kernels.steps import Outputs

needs_nvdisasm = pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is neither on the PATH nor installed: pip install nvidia-cuda-nvdisasm")
FULL = dict(out=BFloat16, dbias=True)     # the most registers
BARE = Plan((128, 256), (1, 1))
MX, NV = Scaled(Float8E4M3FN, Float8E8M0FNU, 32), Scaled(Float4E2M1FN, Float8E4M3FN, 16)


def mx(act=SwiGLU(), plan=Plan(scaled=MX), **more):
    "MXFP8: D in FP8 by row and column, with scale factors."
    return plan, Outputs(act, **{**dict(d=Float8E4M3FN, scaled=True, d_col=True, beta=not isinstance(act, GeGLU)), **more})


def nv(act=SwiGLU(), **more):
    "NVFP4: D in BF16, with amax."
    return Plan(scaled=NV), Outputs(act, amax=True, dbias=True, beta=not isinstance(act, GeGLU), **more)


def four(act=SwiGLU(), plan=Plan(scaled=NV), **more):
    "NVFP4 in and out: D in NVFP4 by row and column, with scale factors."
    return plan, Outputs(act, **{**dict(d=Float4E2M1FN, scaled=True, d_col=True, beta=not isinstance(act, GeGLU)), **more})


EVERYTHING = dict(dbias=True, deterministic=True, discrete_col=True, op="srelu")
STACK = {"mxfp8 swiglu, all quantised": 16}  # bytes, touched before and after the step and not in it; none without `deterministic`
EIGHT, FOUR = dict(out=Float8E4M3FN, out_scaled=True), dict(out=Float4E2M1FN, out_scaled=True)
# name: plan, outputs, slots an element of R that are allowed
PLAIN = {  # also in the table of the machine code's page
    "swiglu": (Plan(), Outputs(dbias=True), 18),
    "swiglu, no dbias": (Plan(), Outputs(), 15),
    "geglu, mask": (Plan(), Outputs(GeGLU(), dbias=True), 24),
    "situ": (Plan(), Outputs(SiTU(), dbias=True), 31),
    "mxfp8 swiglu": (*mx(), 28.5),
    "mxfp8 swiglu, dbias": (*mx(dbias=True), 31.5),
    "mxfp8 geglu": (*mx(GeGLU()), 34),
    "mxfp8 geglu, dbias": (*mx(GeGLU(), dbias=True), 36.5),
    "mxfp8 situ": (*mx(SiTU()), 41.5),
    "mxfp8 situ, dbias": (*mx(SiTU(), dbias=True), 44.5),
    "nvfp4 swiglu": (*nv(), 19.5),
    "nvfp4 swiglu, activation": (*nv(out=BFloat16), 21),
    "nvfp4 geglu": (*nv(GeGLU()), 25),
    "nvfp4 situ": (*nv(SiTU()), 32.5),
    "nvfp4 in and out": (*four(), 37.5),
}
SHIPPED = {
    "swiglu, everything": (Plan(discrete=True, dynamic=True, b_major="n"), Outputs(deterministic=True, **FULL), 20.5),
    "swiglu, one CTA, f16": (BARE, Outputs(c=Float16, d=Float16, dbias=True), 19),
    "swiglu, f32": (Plan(), Outputs(c=Float32, d=Float32, out=Float32, dbias=True, d_stages=1), 20),
    "geglu, value, everything": (Plan(), Outputs(GeGLU(filter="value"), **FULL), 27),
    "geglu, uneven bounds, f32": (BARE, Outputs(GeGLU(clamp_min=-1.5), c=Float32, d=Float32, dbias=True, d_stages=1), 25),
    "mxfp8 swiglu, c fp8": (*mx(c=Float8E5M2), 30),
    "mxfp8 swiglu, everything": (*mx(out=Float8E4M3FN, **EVERYTHING, plan=Plan(scaled=MX, discrete=True, dynamic=True)), 37),
    "mxfp8 swiglu, activation bf16": (*mx(out=BFloat16, dbias=True), 33.5),
    "mxfp8 situ, activation": (*mx(SiTU(), out=Float8E4M3FN, dbias=True), 48),
    "nvfp4 swiglu, c fp8": (*nv(c=Float8E4M3FN), 21),
    "mxfp8 swiglu, all quantised": (*mx(**EVERYTHING, **EIGHT, plan=Plan(scaled=MX, discrete=True, dynamic=True)), 46),
    "mxfp8 geglu, all quantised": (*mx(GeGLU(), dbias=True, **EIGHT), 48),
    "mxfp8 situ, all quantised": (*mx(SiTU(), c=Float8E5M2, dbias=True, **EIGHT), 56),
    "nvfp4 geglu, in and out": (*four(GeGLU(), c=Float8E4M3FN, dbias=True), 46),
    "nvfp4 swiglu, all quantised": (*four(**EVERYTHING, **FOUR, amax=True, plan=Plan(scaled=NV, discrete=True, dynamic=True)), 60),
    "nvfp4 situ, all quantised": (*four(SiTU(), dbias=True, amax=True, **FOUR), 70),
}


@needs_nvdisasm
@pytest.mark.parametrize("name", [*SHIPPED, *(pytest.param(name, marks=pytest.mark.slow) for name in PLAIN)])
def test_no_spills(name):
    plan, outputs, most = (SHIPPED | PLAIN)[name]
    c = cost(plan, outputs)
    print(f"{name}: {c.registers} registers, {c.slots:.2f} slots, {c.mufu} MUFU, {c.ptx:.1f} PTX instructions an element")
    assert c.frame == STACK.get(name, 0) and (c.spills == 0 or c.frame), f"{name}: {c.spills} spill instructions, {c.frame} bytes of stack"
    assert not c.spills_in_step, f"{name}: {c.spills_in_step} spill instructions in the step"
    assert c.registers <= 255 and c.shared <= SMEM_BYTES and c.stages >= 2
    divisions = (outputs.scaled / 4 + outputs.out_scaled / 8) * (outputs.d is Float4E2M1FN)  # by E4M3 scale factors
    assert c.slots <= most and c.mufu == 2 + divisions
    assert c.rare == 2 * (outputs.scaled + outputs.out_scaled), "a rare way of quantising is not jumped over"
    assert abs(sum(c.parts.values()) - c.slots) < 1e-9


def test_without_nvdisasm(monkeypatch):
    monkeypatch.setattr("dglu.kernels.machine_code.nvdisasm", lambda: None)
    with pytest.raises(FileNotFoundError, match="nvdisasm: .*not installed.*pip install"):
        disassemble(b"")


SPILLING = """\t.section\t.text.k,"ax",@progbits
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_x_0:
        /*0010*/              @!P0 LDTM.x32 R4, tmem[UR4] ;
        /*0020*/                   STL [R1+0x4], R5 ;
.L_x_1:
        /*0030*/                   FMUL2 R2, R2.F32x2.HI_LO, R4.F32x2.HI_LO ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/               @P0 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
"""


def test_reader():
    "A loop without a load from tensor memory is not the step's; a spill is seen."
    from dglu.kernels.machine_code import instructions, step_loop
    code, labels = instructions(SPILLING)
    assert [x.name for x in step_loop(code, labels)[0]] == ["LDTM", "STL", "FMUL2", "BRA", "BRA"]
    assert code[1] == Sass("LDTM", ".x32", "R4, tmem[UR4] ") and labels == {".L_x_0": 1, ".L_x_1": 3}
    assert inner_loop([5], [(9, 1), (7, 4), (8, 6), (3, 2)]) == (4, 7)
    jumps = [(20, 2), (5, 9), (11, 14), (3, 30)]      # the loop, over a conversion at 7, over none, and out of the loop
    assert ordinary_way([4], jumps, [7, 25]) == ([*range(2, 6), *range(9, 21)], 1)
