"`dglu demo`: two runs from one start, that coincide, and that are seen to part when they do."
import copy
import math
from dataclasses import replace

import pytest
import torch

from dglu.demo import ROUNDING, DemoResult, Run, TinyLM, batches, corpus, draw, draw_gradients, exact_model, loss_of, relative, run_demo, truth

STEPS = 3


@pytest.fixture(scope="module")
def heard(): return []


@pytest.fixture(scope="module")
def result(heard):
    return run_demo(steps=STEPS, seed=4, batch=4, context=32, on_step=lambda how, loss: heard.append((how, loss)))


def test_both_runs_have_every_step_and_tell_of_it(result, heard):
    assert [how for how, _ in heard] == ["autograd"] * STEPS + ["dglu"] * STEPS
    assert [loss for _, loss in heard] == result.autograd.losses + result.dglu.losses
    assert result.autograd.seconds > 0 and result.dglu.seconds > 0


def test_the_runs_start_equal_and_coincide(result):
    assert result.autograd.losses[0] == result.dglu.losses[0]
    assert result.faults() == [] and result.backend == "reference"
    assert abs(result.dglu.losses[0] - math.log(256)) < 1.5  # an untrained model knows nothing of 256 bytes


def test_the_dglu_run_took_another_path(result):
    "Equal bits in an expert's first weights would mean that both runs used one backward."
    name = "blocks.0.moe.w1"
    assert not torch.equal(result.autograd.gradients[name], result.dglu.gradients[name])


def test_every_parameter_is_compared_with_the_exact_gradient(result):
    model = TinyLM(context=32)
    rows = result.gradient_rows()
    assert [row[0] for row in rows] == [name for name, _ in model.named_parameters()]
    assert all(p.dtype == torch.float64 for p in result.exact.values())
    assert all(math.isfinite(gap) and gap >= 0 for row in rows for gap in row[1:])
    for name, gap, autograd, dglu in rows:
        assert dglu <= 1.5 * autograd + ROUNDING / 4, name  # tighter than `faults`
        if name.endswith((".w1", ".w2")): assert gap <= 1.5 * ROUNDING and dglu <= 1.5 * ROUNDING, name  # a few independent roundings, of 0.4 u each


def test_the_same_seed_gives_the_same_numbers(result):
    again = run_demo(steps=1, seed=4, batch=4, context=32)
    assert again.dglu.losses[0] == pytest.approx(result.dglu.losses[0], rel=1e-5)
    assert run_demo(steps=1, seed=5, batch=4, context=32).dglu.losses[0] != again.dglu.losses[0]


@pytest.mark.parametrize("steps, last", [(STEPS, 1 + 2 * ROUNDING), (STEPS, 1 - 2 * ROUNDING), (STEPS, math.nan)])
def test_losses_that_part_are_a_fault(result, steps, last):
    losses = result.dglu.losses[:-1] + [result.autograd.losses[-1] * last]
    faults = DemoResult(result.autograd, replace(result.dglu, losses=losses), result.exact, "").faults()
    assert len(faults) == 1 and f"step {steps - 1}: losses differ" in faults[0]


@pytest.mark.parametrize("part", ["moe.w1", "moe.w2", "moe.b1", "moe.router.weight", "qkv.weight"])
@pytest.mark.parametrize("factor", [1.1, math.nan])
def test_a_wrong_gradient_is_a_fault(result, part, factor):
    name = f"blocks.1.{part}"
    gradients = result.dglu.gradients | {name: result.autograd.gradients[name] * factor}
    faults = DemoResult(result.autograd, replace(result.dglu, gradients=gradients), result.exact, "").faults()
    assert [f.split(":")[0] for f in faults] == [name]


def test_relative_is_a_ratio_of_norms():
    assert relative(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative(torch.zeros(2), torch.zeros(2)) == 0 and relative(torch.ones(1), torch.zeros(1)) > 1e9


def test_batches_are_text_shifted_by_one_and_follow_the_seed():
    text = corpus(20_000)
    data = batches(text, 5, 3, 16, seed=2)
    assert len(data) == 5 and all(x.shape == y.shape == (3, 16) and torch.equal(x[:, 1:], y[:, :-1]) for x, y in data)
    whole = bytes(text.tolist())
    assert all(bytes(row.tolist()) in whole for x, _ in data for row in x)
    assert not torch.equal(data[0][0], batches(text, 5, 3, 16, seed=3)[0][0])


def test_truth_is_of_the_same_function_and_leaves_the_model_alone():
    "The loss has the bits of both runs' first loss, so the gradients are of the function that they compute."
    torch.manual_seed(0)
    model = TinyLM(width=32, hidden=32, experts=2, layers=2, context=8)
    inputs, targets = batches(corpus(20_000), 1, 2, 8, seed=0)[0]
    before = copy.deepcopy(model.state_dict())
    exact = truth(model, inputs, targets)
    assert all(torch.equal(v, before[k]) and v.dtype == torch.float32 for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and exact.keys() == dict(model.named_parameters()).keys()
    loss = loss_of(model, inputs, targets)
    for how in ("dglu", "autograd"):
        for block in model.blocks: block.moe.backward_by = how
        assert torch.equal(loss_of(model, inputs, targets), loss)
    assert torch.equal(loss_of(exact_model(model), inputs, targets), loss)


def test_truth_agrees_with_float64_to_the_forward_rounding():
    torch.manual_seed(0)
    model = TinyLM(width=32, hidden=32, experts=2, layers=1, context=8)
    inputs, targets = batches(corpus(20_000), 1, 2, 8, seed=0)[0]
    wide = copy.deepcopy(model).double()
    for block in wide.blocks: block.moe.backward_by, block.moe.dtype = "autograd", torch.float64
    loss_of(wide, inputs, targets).backward()
    exact = truth(model, inputs, targets)
    for name, p in wide.named_parameters(): assert relative(exact[name], p.grad) < 4 * ROUNDING, name


def test_the_picture_shows_both_runs_and_their_distance(result):
    plt = pytest.importorskip("matplotlib.pyplot")
    figure = draw(result)
    top, low = figure.axes
    assert [list(line.get_ydata()) for line in top.lines] == [result.autograd.losses, result.dglu.losses]
    assert list(low.lines[0].get_ydata()) == pytest.approx([max(gap, 1e-7) for gap in result.loss_gaps()])
    plt.close(figure)


def test_the_gradients_picture_shows_every_parameter_that_is_off(result):
    plt = pytest.importorskip("matplotlib.pyplot")
    figure = draw_gradients(result)
    off = [row for row in result.gradient_rows() if max(row[2:]) > 0]
    assert list(figure.axes[0].lines[0].get_xdata()) == [row[2] for row in off] and len(off) > 20
    plt.close(figure)


def test_no_text_no_demo():
    from unittest.mock import patch
    with patch("sysconfig.get_path", return_value="/nowhere"), pytest.raises(RuntimeError, match="sources = 0 bytes"): corpus()


def test_a_run_starts_empty(): assert Run("dglu") == Run("dglu", [], {}, 0.0)
