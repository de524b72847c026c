"""What the kernel writes beyond the contract, under the emulator: D in NVFP4, and the activation quantised as D is."""
from dataclasses import replace

import pytest

pytest.importorskip("cutlass")
import cutlass.cute as cute
import torch
from cutlass import Float4E2M1FN, Float8E4M3FN, Float32, Int32
from cutlass.cute import arch
from cutlass.cute.runtime import from_dlpack
from test_scaled_kernel import changed, exact_bytes, holds, outputs_in_order, passes, put, ran
from test_scaled_kernel_sm90 import alone

from dglu import host
from dglu.check import E2, MXFP8, NVFP4, col_codes
from dglu.emulate import machine
from dglu.kernels import epilogue
from dglu.kernels.fp4 import e2m1_code
from dglu.kernels.quantise import SecondLevel, bytes_of, scale_code, scale_codes, sf_place
from dglu.quant import E2M1, E4M3, E8M0, encode
from dglu.truth import raw, scale_bytes

ALL = ("d_col", "sfd", "activation_sf", "dbias")
CASES = {"nvfp4 d": replace(NVFP4[0], d=E2, outputs=("d_col", "sfd", "amax", "dbias")),
         "nvfp4 all": replace(NVFP4[0], d=E2, activation=E2, outputs=("d_col", "sfd", "activation_sf", "amax", "dbias")),
         "mxfp8 all": replace(MXFP8[0], activation=MXFP8[0].d, outputs=ALL)}
SMALL = {name: replace(case, counts=(200,)) for name, case in CASES.items()}
FOUR = SMALL["nvfp4 all"]


def scales(case, t, key):
    "Scale bytes of D or of the activation: (rows, blocks), or (blocks, columns) for those by columns."
    columns = case.columns if key.startswith("sfd") else case.n
    if key.endswith("row"): return scale_bytes(t[key], case.ends[-1], -(-columns // case.config.sf_vec_size))
    return col_codes(case, t[key], columns)


CHOICES = {
    "geglu, discrete, columns by experts": ("nvfp4 all", dict(act_func="dgeglu", weights="discrete", discrete_col_sfd=True, counts=(100, 0, 300), n=96)),
    "situ, dynamic, one CTA": ("nvfp4 d", dict(act_func="dsituglu", use_dynamic_sched=True, mma_tiler_mn=(128, 256), counts=(30, 300), n=160)),
    "FP8 C, no prob, clusters": ("nvfp4 all", dict(c=torch.float8_e4m3fn, prob=False, cluster_shape_mn=(2, 2), n=288)),
    "FP32 C, op": ("nvfp4 all", dict(c=torch.float32, epilogue_op="srelu", n=32)),
    "E5M2, N-major, columns by experts": ("mxfp8 all", dict(d=torch.float8_e5m2, activation=torch.float8_e5m2, b_major="n", discrete_col_sfd=True,
                                                           counts=(0, 257, 0, 1), n=96)),
    "single group": ("mxfp8 all", dict(act_func="dsituglu", use_single_group_runtime_offsets=True, counts=(512,), n=32)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name):
    base, change = CHOICES[name]
    passes(changed(CASES[base], **change), seed=1)


@pytest.mark.parametrize("name", ["nvfp4 all", pytest.param("mxfp8 all", marks=pytest.mark.slow)])
def test_adversarial_order(name, monkeypatch):
    "Few clusters take many tiles, asynchronous work as late or as early as may be."
    monkeypatch.setattr(host, "resident_clusters", lambda device, ctas: 1)
    with machine(order="adversarial", seed=3): passes(replace(CASES[name], counts=(300, 0, 200), n=288))


@pytest.mark.parametrize("name, act", [("nvfp4 all", "dswiglu"), ("nvfp4 all", "dsituglu"), ("mxfp8 all", "dgeglu")])
def test_exact_arithmetic_gives_the_references_bytes(name, act):
    "Where float32 rounds nothing before the outputs' own rounding, every byte is the reference's."
    for norm in (1.0, 3.0, 3.7): exact_bytes(replace(SMALL[name], activation_norm_const=norm), act, norm)


def test_norm_const():
    "E4M3 scales at their ends: all 0, all 448, and a norm_const whose quotients float32 does not hold."
    for norm in (2.0**-8, 0.3, 256.0, 2.0**-40, 2.0**40, 2.0**-70, 2.0**70, 1e-40, 3e38):
        case = replace(FOUR, norm_const=norm, activation_norm_const=1 / norm if 2.0**-60 < norm < 2.0**60 else 1.0)
        t = ran(case)
        rows = torch.arange(256) % 17 != 3
        code = scales(case, t, "sfd_row")[rows]
        if norm <= 2.0**-40: assert not code.any() and not raw(t["d_row"][:256]).bitwise_and(0x77).any()
        if norm >= 2.0**40: assert (code == 0x7E).all() and (raw(t["d_row"])[:256][rows] & 0x77 == 0x77).double().mean() > 0.99  # 6, or minus 6
        passes(case)


def test_zero_blocks():
    "Blocks of rows and of columns without a number: scale 0 and zeros."
    def change(t):
        raw(t["a"])[32:64].zero_()      # rows of R
        raw(t["b"])[5].zero_()          # a column of R
        t["c"][:, 96:128] = 0           # up: with it, dgate of the second block of gate, and the activation's
    t = holds(FOUR, change)
    row, col = scales(FOUR, t, "sfd_row"), scales(FOUR, t, "sfd_col")
    assert not row[32:64].any() and not row[:, 4:6].any() and not col[2:4].any() and not col[:, (5, 37)].any() and not col[:, 64:96].any()
    row, col = scales(FOUR, t, "activation_sf_row"), scales(FOUR, t, "activation_sf_col")
    assert row[32:64, :2].any() and not row[:, 2:].any() and not col[:, 32:].any()    # the activation does not depend on R


@pytest.mark.parametrize("name", ["nvfp4 all", "mxfp8 all"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_special_element(name, value):
    "A NaN or an infinity of up: in the blocks of dgate and of the activation that hold it, as in the reference, and nowhere else."
    case, row, column = SMALL[name], 70, 37
    vec = case.config.sf_vec_size
    one, two, plain = ran(case, put("c", (row, column, 0), value)), ran(case, put("c", (row, column, 0), value), backend="reference"), ran(case)
    for key, at in (("sfd_row", (row, 5 // vec)), ("sfd_col", (row // vec, 5)), ("activation_sf_row", (row, 5 // vec)),
                    ("activation_sf_col", (row // vec, 5))):
        ours, theirs, before = (scales(case, t, key) for t in (one, two, plain))
        top, nan = (254, 255) if vec == 32 else (0x7E, 0x7F)
        assert ours[at] == theirs[at] == (top if value == torch.inf else nan), key
        changed_ = (ours != before).nonzero().tolist()
        assert changed_ == [list(at)], (key, changed_)


def test_deterministic():
    case = changed(FOUR, n=288, deterministic=True)
    first, second = (outputs_in_order(case, seed) for seed in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first) and set(first) >= {"activation_sf_col", "d_col", "amax"}


def test_only_the_experts_rows_are_written():
    "Rows past the last expert keep their bytes, by rows and by columns."
    case = replace(CASES["nvfp4 all"], counts=(100,), spare=256)
    t = ran(case)
    assert all((raw(t[key])[256:] == 255).all() for key in ("d_row", "activation_out"))
    assert all((raw(t[key])[:, 128:] == 255).all() for key in ("d_col", "activation_col_out"))


@pytest.mark.parametrize("name", ["nvfp4 all", "mxfp8 all"])
def test_nan_in_the_inputs(name):
    "A NaN's block: its scale factor, and every element of it. norm_const is such that E8M0's blocks of zeros take the rare way."
    passes(replace(SMALL[name], data="nan", norm_const=256.0, activation_norm_const=256.0))


@pytest.mark.parametrize("power", [70, -70])
def test_norm_const_far_from_1_with_ordinary_scales(power):
    "norm_const and the numbers are far from 1 in opposite directions: elements take the rare way, and few are 0 or saturate."
    case = replace(FOUR, norm_const=2.0**power, activation_norm_const=2.0**power)
    t = holds(case, lambda t: t["prob"].mul_(2.0**-power))
    for key in ("d_row", "activation_out"): assert len(raw(t[key])[:256].unique()) > 200


@pytest.mark.parametrize("name", ["nvfp4 all", "mxfp8 all"])
def test_the_sign_of_a_peak_counts_for_nothing(name, monkeypatch):
    "`max.xorsign.abs` leaves the sign of a product, `max.abs` of three plus (PTX ISA): scale factors and amax look at neither."
    def negative(x, *others):
        for y in others: x = arch.fmax(x, y, abs=True, nan=True)
        return arch.fmin(x, -x, nan=True)
    monkeypatch.setattr(epilogue.largest, "__code__", negative.__code__)
    monkeypatch.setattr(host, "kernel", host.kernel.__wrapped__)  # neither a kernel made before, nor this one afterwards
    passes(SMALL[name])


# Pieces, by themselves ---------------------------------------------------------------------------------------------------------

def run_kernel(kernel, *args, **options):
    with machine(**options): cute.compile(kernel, *args)(*args)


class Codes:
    "Of each number its E8M0 and E2M1 codes made without an instruction, and the codes of two blocks whose peaks are it and minus it."
    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor): self.kernel(x, out).launch(grid=(cute.size(x) // 128, 1, 1), block=(128, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        at = 128 * arch.block_idx()[0] + arch.thread_idx()[0]
        two = [code for dtype in (Float8E4M3FN, Float4E2M1FN) for code in bytes_of(scale_codes([x[at], -x[at]], Float32(1.0), dtype), 2)]
        for i, code in enumerate((scale_code(x[at]), e2m1_code(x[at]), *two)): out[i, at] = code


def test_codes_of_every_kind_of_number():
    "Every exponent with both signs: powers of two, quarters of the way to the next, and the numbers beside them; infinities, and NaN of both signs."
    fields = [quarter + beside & 0x7FFFFF for quarter in range(0, 0x800000, 0x200000) for beside in (-1, 0, 1)]
    bits = [sign << 31 | e << 23 | m for sign in (0, 1) for e in range(256) for m in fields]
    x = torch.tensor(bits).to(torch.int32).view(torch.float32)
    out, size = torch.full((6, len(x)), -1, dtype=torch.int32), x.abs()
    run_kernel(Codes(), from_dlpack(x), from_dlpack(out))
    eight, four = (encode(size * torch.tensor(fmt.rcp_max), sf) for fmt, sf in ((E4M3, E8M0), (E2M1, E4M3)))
    for i, want in enumerate((encode(size, E8M0), encode(x, E2M1), eight, eight, four, four)):
        differ = (out[i] != want.int()).nonzero().flatten()[:5]
        assert not len(differ), (i, x[differ], out[i, differ], want[differ])


class Quotients:
    "norm_const/S for every E4M3 code S and a number of constants."
    @cute.jit
    def __call__(self, norms: cute.Tensor, out: cute.Tensor): self.kernel(norms, out).launch(grid=(cute.size(norms), 1, 1), block=(128, 1, 1))

    @cute.kernel
    def kernel(self, norms: cute.Tensor, out: cute.Tensor):
        t, b = arch.thread_idx()[0], arch.block_idx()[0]
        out[b, t] = SecondLevel.of(norms[b]).own(t, 1)[0]


def test_quotients_are_the_nearest_float32():
    "Also where `rcp` is at the edge of what the PTX ISA promises."
    norms, out = 1 + torch.rand(512, generator=torch.Generator().manual_seed(0)), torch.full((512, 128), -1.0)
    run_kernel(Quotients(), from_dlpack(norms), from_dlpack(out), approx="worst")
    s = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    want = (norms.double()[:, None] / s).masked_fill(s == 0, 0).float()
    assert torch.equal(out[:, :127], want[:, :127]) and out[:, 127].isnan().all()


class Bytes:
    "sf_place of rows and blocks."
    @cute.jit
    def __call__(self, at: cute.Tensor, rest: Int32, first: Int32, out: cute.Tensor):
        self.kernel(at, rest, first, out).launch(grid=(1, 1, 1), block=(128, 1, 1))

    @cute.kernel
    def kernel(self, at: cute.Tensor, rest: Int32, first: Int32, out: cute.Tensor):
        t = arch.thread_idx()[0]
        out[t] = sf_place(at[0, t], at[1, t], rest, first)


def test_places_of_scale_factors_beyond_2_to_the_31():
    "NVFP4 of 2^20 rows and 2^16 columns has 2^32 scale factors."
    at = torch.stack([torch.randint(size, (128,), generator=torch.Generator().manual_seed(size)) for size in (2**20, 2**12)]).int()
    out, rest, first = torch.full((128,), -1), 2**10, 2**22
    run_kernel(Bytes(), from_dlpack(at), Int32(rest), Int32(first), from_dlpack(out))
    row, block = at.long()
    atom = first + row // 128 * rest + block // 4
    assert torch.equal(out, 512 * atom + row % 32 * 16 + row // 32 % 4 * 4 + block % 4) and out.min() >= 2**31


HOPPER = """
from dataclasses import replace
from dglu.check import E2, MXFP8, NVFP4, run_case, variants
from dglu.emulate import machine
both, change = ("d_col", "sfd", "activation_sf", "dbias"), dict(discrete_col_sfd=True, counts=(100, 0, 300), n=96, norm_const=256.0, activation_norm_const=0.3)
for case in variants(replace(NVFP4[0], d=E2, activation=E2, outputs=both), change) + variants(replace(MXFP8[0], activation=MXFP8[0].d, outputs=both, data="nan"), change):
    with machine("sm_90a"): result = run_case(case, "emulate")
    assert result.ok, f"{case.name}: {result.message}"
print("ok")
"""


def test_hopper():
    "Two groups of 64 rows, a block of 32 across two warps, E2M1 without an instruction; in a process of its own."
    alone(HOPPER)
