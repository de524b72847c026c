"Promise: a pointer table keeps its experts alive and resolves to their memory; a stale address is an error, no crash."
import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dglu.layout import expert_pointers, resolve_pointers

STALE = ["no living expert", "Keep the tensor", "Make it anew"]


def refused(call) -> str:
    with pytest.raises(ValueError) as error: call()
    return str(error.value)


def same_memory(found: list[torch.Tensor], experts: list[torch.Tensor]) -> bool:
    return [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in found] == \
           [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in experts]


def test_the_table_is_int64_addresses_in_order():
    experts = [torch.zeros(32, 16) for _ in range(3)]
    ptrs = expert_pointers(experts)
    assert ptrs.dtype == torch.int64 and ptrs.shape == (3,) and ptrs.device == experts[0].device
    assert ptrs.tolist() == [t.data_ptr() for t in experts]
    assert all(a is b for a, b in zip(ptrs.experts, experts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.uint8])
def test_experts_of_every_dtype_resolve(dtype):
    experts = [torch.randint(0, 256, (32, 32), dtype=torch.uint8).view(dtype) for _ in range(2)]
    assert same_memory(resolve_pointers(expert_pointers(experts), experts[0].shape, dtype), experts)


@given(st.permutations(range(4)), st.integers(1, 4), st.booleans())
def test_any_order_of_views_into_one_storage(order, count, n_major):
    storage = torch.arange(6 * 8 * 4, dtype=torch.float32)
    views = [storage[32 * i + 32:32 * i + 64].view(8, 4) for i in order[:count]]       # between other data
    if n_major: views = [v.view(4, 8).T for v in views]
    ptrs = expert_pointers(views)
    assert [(p - storage.data_ptr()) // 4 for p in ptrs.tolist()] == [32 * i + 32 for i in order[:count]]
    found = resolve_pointers(ptrs, (8, 4), torch.float32, major="n" if n_major else "k")
    assert same_memory(found, views) and all(torch.equal(f, v) for f, v in zip(found, views))


def test_a_stacked_weight_and_a_repeated_expert():
    weight = torch.randn(3, 8, 4)
    assert all(map(torch.equal, resolve_pointers(expert_pointers(weight), (8, 4), torch.float32), weight))
    ptrs = expert_pointers([weight[1], weight[1]])
    assert ptrs[0] == ptrs[1] and torch.equal(resolve_pointers(ptrs, (8, 4), torch.float32)[1], weight[1])


def test_a_resolved_expert_is_memory_and_not_a_copy():
    expert = torch.zeros(8, 4, requires_grad=True)
    found, = resolve_pointers(expert_pointers([expert]), (8, 4), torch.float32)
    found[0, 0] = 7
    assert expert[0, 0] == 7 and not found.requires_grad


def test_scale_factor_tensors_have_pointers_too():
    physical = [torch.arange(2 * 512, dtype=torch.int32).to(torch.uint8).view(1, 1, 2, 32, 4, 4) + i for i in range(2)]
    views = [p.permute(3, 4, 1, 5, 2, 0) for p in physical]                # (32, 4, rest_m, 4, rest_k, 1)
    ptrs = expert_pointers(views)
    assert same_memory(resolve_pointers(ptrs, (1, 1, 2, 32, 4, 4), torch.uint8), physical)
    message = refused(lambda: resolve_pointers(ptrs, views[0].shape, torch.uint8))
    assert "strides" in message and "reads it with strides" in message


def test_the_table_keeps_its_experts_alive_and_nothing_else_does():
    ptrs = expert_pointers([torch.full((8, 4), 5.0)])
    alive = weakref.ref(ptrs.experts[0])
    gc.collect()
    assert alive() is not None and resolve_pointers(ptrs, (8, 4), torch.float32)[0][0, 0] == 5
    del ptrs; gc.collect()
    assert alive() is None


def test_a_copy_of_the_table_works_as_long_as_somebody_keeps_the_experts():
    experts = [torch.randn(8, 4) for _ in range(2)]
    table = expert_pointers(experts)
    copies = [table.clone(), table[1:].clone(), torch.tensor(table.tolist())]
    del table; gc.collect()
    for ptrs in copies:
        wanted = experts[-len(ptrs):]
        assert same_memory(resolve_pointers(ptrs, (8, 4), torch.float32), wanted)
    del experts, wanted; gc.collect()
    for ptrs in copies:
        message = refused(lambda p=ptrs: resolve_pointers(p, (8, 4), torch.float32))
        assert all(part in message for part in ["ptrs[0] = 0x", *STALE]), message


def test_a_tensor_that_only_autograd_keeps_still_counts_as_alive():
    factor, x = torch.ones(8, 4), torch.ones(8, 4, requires_grad=True)
    ptrs = expert_pointers([factor]).clone()
    loss = (x * factor).sum()                                              # saves factor for the backward pass
    del factor; gc.collect()
    assert resolve_pointers(ptrs, (8, 4), torch.float32)[0].sum() == 32
    loss.backward(); del loss; gc.collect()
    assert "no living expert" in refused(lambda: resolve_pointers(ptrs, (8, 4), torch.float32))


def test_one_dead_expert_is_named_by_its_index():
    kept, dying = torch.zeros(8, 4), torch.zeros(8, 4)
    ptrs = expert_pointers([kept, dying]).clone()
    address = dying.data_ptr()
    del dying; gc.collect()
    assert f"ptrs[1] = {address:#x}" in refused(lambda: resolve_pointers(ptrs, (8, 4), torch.float32))


@pytest.mark.parametrize("move", [
    lambda t: setattr(t, "data", torch.ones(8, 4)),
    lambda t: t.untyped_storage().resize_(0),                              # what sharding does to a weight at rest
], ids=["new data", "no storage"])
def test_a_table_goes_stale_when_an_expert_moves(move):
    expert = torch.zeros(8, 4)
    ptrs = expert_pointers([expert])
    move(expert)
    message = refused(lambda: resolve_pointers(ptrs, (8, 4), torch.float32))
    assert all(part in message for part in STALE), message


@pytest.mark.parametrize("addresses", [[0], [16], [-1], [2**62]])
def test_a_made_up_address_is_never_read(addresses):
    assert "no living expert" in refused(lambda: resolve_pointers(torch.tensor(addresses), (8, 4), torch.float32))


def test_an_address_inside_an_expert_is_not_an_expert():
    ptrs = expert_pointers([torch.zeros(8, 4)])
    assert "no living expert" in refused(lambda: resolve_pointers(ptrs + 16, (4, 4), torch.float32))


def test_a_deep_copied_table_does_not_pretend():
    ptrs = expert_pointers([torch.zeros(8, 4)])
    twin = copy.deepcopy(ptrs)
    del ptrs; gc.collect()
    assert "no living expert" in refused(lambda: resolve_pointers(twin, (8, 4), torch.float32))


def test_of_two_tensors_at_one_address_the_larger_one_counts():
    whole = torch.zeros(16, 4)
    tables = expert_pointers([whole]), expert_pointers([whole[:8]])
    for ptrs in tables: assert resolve_pointers(ptrs, (16, 4), torch.float32)[0].shape == (16, 4)
    del tables; gc.collect()
    assert resolve_pointers(torch.tensor([whole.data_ptr()]), (16, 4), torch.float32)[0].shape == (16, 4)


def test_reading_past_a_view_is_refused_even_inside_its_storage():
    storage = torch.zeros(64, 4)
    ptrs = expert_pointers([storage[:8]])
    message = refused(lambda: resolve_pointers(ptrs, (16, 4), torch.float32))
    assert all(part in message for part in ["ptrs[0] = 0x", "begins 128 bytes", "(16, 4)", "needs 256", "Check N, K"])


def test_packed_fp4_read_with_unpacked_k_is_too_large():
    ptrs = expert_pointers([torch.zeros(32, 16, dtype=torch.uint8)])
    assert "packed FP4 has K/2 columns" in refused(lambda: resolve_pointers(ptrs, (32, 32), torch.uint8))
    assert resolve_pointers(ptrs, (32, 16), torch.float4_e2m1fn_x2)[0].dtype == torch.float4_e2m1fn_x2


@pytest.mark.parametrize("expert, wrong", [(torch.zeros(8, 4), "n"), (torch.zeros(4, 8).T, "k")], ids=["k", "n"])
def test_the_wrong_major_is_refused(expert, wrong):
    message = refused(lambda: resolve_pointers(expert_pointers([expert]), (8, 4), torch.float32, major=wrong))
    assert all(part in message for part in ["ptrs[0] = 0x", f"major = {wrong!r}", "Pass the other major"]), message


def test_a_transposed_weight_may_be_registered_as_it_is_stored():
    stored = torch.randn(4, 8)                                             # (K, N)
    found, = resolve_pointers(expert_pointers([stored]), (8, 4), torch.float32, major="n")
    assert torch.equal(found, stored.T) and found.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize("major", ["k", "n"])
def test_a_square_weight_may_be_read_either_way(major):
    stored = torch.randn(8, 8)                                             # (N, K), or (K, N): nobody can tell
    found, = resolve_pointers(expert_pointers([stored]), (8, 8), torch.float32, major=major)
    assert torch.equal(found, stored if major == "k" else stored.T)


@pytest.mark.parametrize("experts, parts", [
    ([], ["experts is empty", "at least one"]),
    ([torch.zeros(8)], ["experts[0] is torch.float32 of shape (8,)", "(N, K)", "matrices"]),
    ([[1, 2]], ["experts[0] is [1, 2]", "tensor"]),
    ([torch.zeros(8, 4), torch.zeros(8, 8)], ["experts[1] has shape (8, 8)", "[0] has (8, 4)", "copy experts[1]"]),
    ([torch.zeros(8, 4), torch.zeros(8, 4).bfloat16()], ["experts[1]", "dtype torch.bfloat16", "torch.float32"]),
    ([torch.zeros(8, 4), torch.zeros(4, 8).T], ["experts[1]", "strides (1, 8)", "(4, 1)"]),
    ([torch.zeros(8, 8)[:, :4]], ["experts[0]", "strides (8, 1)", "gaps", ".contiguous()", "keep the copy"]),
    ([torch.zeros(8, 1).expand(8, 4)], ["experts[0]", "strides (1, 0)", "overlaps"]),
    ([torch.zeros(33)[1:].view(8, 4)], ["experts[0]", "multiple of 16", "Clone"]),
    ([torch.zeros(0, 4)], ["experts[0]", "address 0x0", "memory first"]),
    ([torch.empty(8, 4, device="meta")], ["experts[0]", "address 0x0", "meta"]),
    ([torch.zeros(8, 4), torch.empty(8, 4, device="meta")], ["experts[1]", "address 0x0"]),
])
def test_experts_that_no_table_can_hold(experts, parts):
    message = refused(lambda: expert_pointers(experts))
    assert all(part in message for part in parts), message


def test_the_stride_of_a_size_1_dimension_never_matters():
    experts = [torch.zeros(1, 16), torch.empty_strided((1, 16), (99, 1)).zero_()]
    assert len(resolve_pointers(expert_pointers(experts), (1, 16), torch.float32)) == 2


@pytest.mark.parametrize("ptrs, shape, major, parts", [
    ([1], (8, 4), "k", ["ptrs is [1]", "torch.int64", "expert_pointers"]),
    (torch.zeros(2, dtype=torch.int32), (8, 4), "k", ["torch.int32 of shape (2,)", "torch.int64"]),
    (torch.zeros(2, 1, dtype=torch.int64), (8, 4), "k", ["of shape (2, 1)", "(L,)"]),
    (torch.zeros(2, dtype=torch.int64), (8, 4), "m", ["major = 'm'", "'k'", "'n'"]),
    (torch.zeros(2, dtype=torch.int64), (8, 4, 2), "n", ["major = 'n'", "(8, 4, 2)", "(N, K)"]),
    (torch.zeros(2, dtype=torch.int64), (8,), "k", ["major = 'k'", "(8,)"]),
])
def test_a_bad_argument_of_resolve_is_named(ptrs, shape, major, parts):
    message = refused(lambda: resolve_pointers(ptrs, shape, torch.float32, major=major))
    assert all(part in message for part in parts), message
