"""Block-scaled GEMMs: each format, on one CTA and a pair, each tile width, in order and adversarially, against float64.

Most inputs are chosen so that every partial sum is a float32: values are multiples of 1/2 up to 6, or integers up to 8; scales are multiples of 1/2
up to 4, or 1/4 to 4. A sum of 1024 products is then at most 2^24 of its smallest steps, in any order, and the result must be equal to the bit.
"""
import pytest

pytest.importorskip("cutlass")
import torch
from cutlass.cute.runtime import from_dlpack
from kernels_blockscaled import E2M1, E4M3, E5M2, E8M0, BlockScaledGemm, cute

from dglu import emulate, quant

FORMATS = {
    "mxfp8 e4m3": (E4M3, E4M3, E8M0, 32), "mxfp8 e5m2": (E5M2, E5M2, E8M0, 32), "mxfp8 mixed": (E5M2, E4M3, E8M0, 32),
    "mxfp4": (E2M1, E2M1, E8M0, 32), "nvfp4": (E2M1, E2M1, E4M3, 16), "fp4 e8m0 16": (E2M1, E2M1, E8M0, 16),
}
WIDE = ["mxfp8 e4m3", "mxfp8 e5m2", "mxfp4", "nvfp4"]
NUMBERS = {E2M1: quant.E2M1, E4M3: quant.E4M3, E5M2: quant.E5M2, E8M0: quant.E8M0}


def operand(rows, k, fmt, sf_fmt, block, codes=None, scales=None, major="k"):
    "Codes in the kernel's form, scales as atoms, and the numbers in float64. Exact in float32 unless codes and scales are given."
    fmt, sf_fmt = NUMBERS[fmt], NUMBERS[sf_fmt]
    if codes is None:
        small = [0, 0.5, 1, 1.5, 2, 3, 4, 6] if fmt is quant.E2M1 else [0.0, 1, 2, 3, 4, 5, 6, 7, 8]
        codes = quant.encode(torch.tensor(small)[torch.randint(len(small), (rows, k))] * (1 - 2 * torch.randint(2, (rows, k))), fmt)
    if scales is None:
        small = torch.tensor([0.25, 0.5, 1, 2, 4] if sf_fmt is quant.E8M0 else [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4])
        scales = quant.encode(small[torch.randint(len(small), (rows, k // block))], sf_fmt)
    numbers = quant.decode(codes, fmt).double() * quant.decode(scales, sf_fmt).double().repeat_interleave(block, 1)
    packed = quant.pack_fp4(codes).view(torch.uint8) if fmt is quant.E2M1 else codes
    packed = packed if major == "k" else packed.t().contiguous().t()
    return packed.unsqueeze(-1), quant.sf_physical(quant.pack_sf(scales)).flatten(3), numbers


def wrap(t):
    return from_dlpack(t).mark_layout_dynamic(leading_dim=[i for i, s in enumerate(t.stride()) if s == 1 and t.shape[i] > 1][0])


def product(a, b, name, orders=(("eager", 0), ("adversarial", 1)), **kw):
    "C of each order, from poisoned memory, and the last machine."
    out, compiled = [], None
    for order, seed in orders:
        c = torch.full((a[2].shape[0], b[2].shape[0], 1), float("nan"))
        args = [wrap(t) for t in (a[0], b[0], a[1], b[1], c)]
        with emulate.machine(order=order, seed=seed) as machine:
            compiled = compiled or cute.compile(BlockScaledGemm(*FORMATS[name], **kw), *args)
            compiled(*args)
        out.append(c[..., 0])
    return out, machine


def operands(m, n, k, name, majors="kk", **kw):
    torch.manual_seed(m + n + k)
    ta, tb, sf, block = FORMATS[name]
    return operand(m, k, ta, sf, block, major=majors[0], **kw), operand(n, k, tb, sf, block, major=majors[1], **kw)


def check(m, n, k, name, majors="kk", **kw):
    a, b = operands(m, n, k, name, majors)
    want = a[2] @ b[2].t()
    assert torch.equal(want, want.float().double())      # no reference that float32 can't reach
    out, machine = product(a, b, name, **kw)
    for c in out:
        assert torch.equal(c.double(), want), f"{(c != want).sum()} of {c.numel()} elements differ"
    return machine


@pytest.mark.parametrize("n", [64, 128, 192, 256])
@pytest.mark.parametrize("pair", [False, True], ids=["one CTA", "pair"])
@pytest.mark.parametrize("name", WIDE)
def test_formats_and_tiles(name, pair, n):
    "Two tiles in N: the second of 64 and of 192 columns begins in the middle of an atom."
    m, k = (256, 256) if pair else (128, 256)
    machine = check(m, 2 * n, k, name, tile=(m, n), cluster=(m // 128, 1), pair=pair)
    assert machine.stats["tensor"]["flops"] == 2 * m * 2 * n * k


@pytest.mark.parametrize("name", ["mxfp8 mixed", "fp4 e8m0 16"])
def test_less_usual_formats(name):
    check(256, 192, 512, name, tile=(256, 192), cluster=(2, 1), pair=True)


@pytest.mark.parametrize("name, tile, cluster, pair", [
    ("mxfp8 e4m3", (128, 128), (2, 2), False), ("mxfp4", (128, 192), (1, 2), False), ("mxfp8 e4m3", (256, 128), (2, 2), True),
    ("nvfp4", (256, 64), (4, 1), True), ("mxfp8 mixed", (256, 192), (4, 2), True), ("nvfp4", (256, 192), (2, 2), True)])
def test_multicast(name, tile, cluster, pair):
    machine = check(512, 2 * tile[1], 256, name, tile=tile, cluster=cluster, pair=pair)
    assert machine.stats["bytes"]["tma.multicast"]


@pytest.mark.parametrize("pair", [False, True], ids=["one CTA", "pair"])
@pytest.mark.parametrize("majors", ["mk", "km", "mm"])
def test_mn_major(majors, pair):
    check(256, 128, 256, "mxfp8 mixed", majors, tile=(256 if pair else 128, 128), cluster=(2 if pair else 1, 1), pair=pair)


@pytest.mark.parametrize("name, k", [("mxfp8 e4m3", 1024), ("mxfp4", 1024), ("nvfp4", 1024), ("mxfp8 e4m3", 160), ("mxfp4", 320), ("nvfp4", 320)])
def test_stages_are_used_again_and_the_last_step_may_be_short(name, k):
    check(256, 128, k, name, tile=(256, 128), cluster=(2, 1), pair=True, orders=[("eager", 0), *(("adversarial", s) for s in range(3))])


def test_batches():
    torch.manual_seed(2)
    ta, tb, sf, block = FORMATS["nvfp4"]
    many = [[operand(rows, 256, t, sf, block) for _ in range(3)] for rows, t in ((256, ta), (128, tb))]
    a, b = ((torch.stack([x[0][..., 0] for x in xs]).permute(1, 2, 0), torch.cat([x[1] for x in xs])) for xs in many)
    c = torch.full((3, 256, 128), float("nan")).permute(1, 2, 0)
    args = [wrap(t) for t in (a[0], b[0], a[1], b[1], c)]
    with emulate.machine(order="adversarial", seed=3):
        cute.compile(BlockScaledGemm(*FORMATS["nvfp4"], tile=(256, 128), cluster=(2, 1), pair=True), *args)(*args)
    for i, (x, y) in enumerate(zip(*many)):
        assert torch.equal(c[..., i].double(), x[2] @ y[2].t())


@pytest.mark.parametrize("name", FORMATS)
def test_any_codes_and_scales(name):
    """All finite codes, scales over 2^±30 (E4M3: all finite ones).

    A scaled value has at most 6 significant bits and a product 12, so products are exact; each of K terms then passes at most K - 1 roundings to
    nearest of float32, in whatever order they are added: |error| <= (K - 1)u/(1 - (K - 1)u) · Σ|a||b| < K · 2^-24 · Σ|a||b|, u = 2^-24.
    """
    torch.manual_seed(1)
    m, n, k = 256, 256, 512
    ta, tb, sf, block = FORMATS[name]
    pair = []
    for rows, t in ((m, ta), (n, tb)):
        codes = torch.randint(0, 1 << NUMBERS[t].bits, (rows, k), dtype=torch.uint8)
        codes[~quant.decode(codes, NUMBERS[t]).isfinite()] = 0
        low, high = (97, 158) if sf is E8M0 else (0, 127)
        pair.append(operand(rows, k, t, sf, block, codes, torch.randint(low, high, (rows, k // block), dtype=torch.uint8)))
    (a, b), bound = pair, k * 2.0**-24 * (pair[0][2].abs() @ pair[1][2].abs().t())
    for c in product(a, b, name, tile=(256, 128), cluster=(2, 1), pair=True)[0]:
        assert ((c - a[2] @ b[2].t()).abs() <= bound).all()


def test_extreme_exponents_cancel():
    "0xFE is 2^127 and 0x00 is 2^-127, not zero: against one another they are 1."
    a, b = operands(128, 128, 256, "mxfp8 e4m3")
    plain = [quant.decode(x[0][..., 0], quant.E4M3).double() for x in (a, b)]
    up = torch.tensor([0xFE, 0x00], dtype=torch.uint8).repeat(128, 4)
    a, b = (operand(128, 256, E4M3, E8M0, 32, x[0][..., 0], s) for x, s in ((a, up), (b, up.flip(1))))
    for c in product(a, b, "mxfp8 e4m3")[0]:
        assert torch.equal(c.double(), plain[0] @ plain[1].t())


@pytest.mark.parametrize("name, code", [("mxfp8 e4m3", 0xFF), ("mxfp4", 0xFF), ("nvfp4", 0x7F)])
def test_a_scale_that_is_no_number_spoils_its_row_alone(name, code):
    a, b = operands(128, 128, 256, name)
    a[1].view(-1)[quant.sf_offset(37, 5, a[1].shape[2])] = code
    b[1].view(-1)[quant.sf_offset(101, 2, b[1].shape[2])] = code
    want = a[2] @ b[2].t()
    want[37], want[:, 101] = float("nan"), float("nan")
    for c in product(a, b, name)[0]:
        assert torch.equal(c.double().nan_to_num(1e9), want.nan_to_num(1e9))


@pytest.mark.parametrize("code, value", [(0x00, 0.0), (0x01, 2.0**-9), (0x7E, 448.0)])
def test_ends_of_the_e4m3_scale(code, value):
    a, b = operands(128, 128, 256, "nvfp4")
    plain = quant.decode(quant.unpack_fp4(a[0][..., 0]), quant.E2M1).double()
    a[1].fill_(code)
    for c in product(a, b, "nvfp4", orders=[("eager", 0)])[0]:
        assert torch.equal(c.double(), value * plain @ b[2].t())


def test_scales_in_a_plain_layout_give_another_product():
    "Rows of scales one after the other, in place of atoms: right sizes, wrong numbers, exactly those of the permuted scales."
    a, b = operands(128, 128, 256, "mxfp8 e4m3")
    codes, scales = a[0][..., 0], quant.unpack_sf(quant.sf_view(a[1].unflatten(3, (32, 4, 4))), 128, 8)[0]
    plain = scales.reshape(a[1].shape).contiguous()                                     # as if (128, 8) were the kernel's layout
    seen = quant.unpack_sf(quant.sf_view(plain.unflatten(3, (32, 4, 4))), 128, 8)[0]    # what it makes of those bytes
    numbers = quant.decode(codes, quant.E4M3).double() * quant.decode(seen, quant.E8M0).double().repeat_interleave(32, 1)
    for c in product((a[0], plain, a[2]), b, "mxfp8 e4m3")[0]:
        assert torch.equal(c.double(), numbers @ b[2].t()) and (c - a[2] @ b[2].t()).norm() > 0.1 * c.norm()


@pytest.mark.parametrize("tile, pair", [((64, 128), False), ((128, 128), True), ((128, 96), False)])
def test_tiles_that_the_kernel_refuses(tile, pair):
    with pytest.raises(ValueError, match=r"tile = .* N one of 64, 128, 192, 256"):
        BlockScaledGemm(tile=tile, pair=pair)
