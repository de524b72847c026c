"`dglu demo`: two runs from one start, that coincide, and that are seen to part when they do."
import copy
import math
from dataclasses import replace

import pytest
import torch

from dglu.demo import ROUNDING, DemoResult, Run, TinyLM, batches, corpus, draw, loss_of, relative, run_demo, truth

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


def test_every_parameter_is_compared_with_float64(result):
    model = TinyLM(context=32)
    rows = result.gradient_rows()
    assert [row[0] for row in rows] == [name for name, _ in model.named_parameters()]
    assert all(p.dtype == torch.float64 for p in result.exact.values())
    assert all(math.isfinite(gap) and gap >= 0 for row in rows for gap in row[1:])
    for name, gap, autograd, dglu in rows:
        if name.endswith((".w1", ".w2", ".b1")): assert gap <= 7 * ROUNDING and dglu <= 1.5 * autograd + ROUNDING / 4, name


def test_the_same_seed_gives_the_same_numbers(result):
    again = run_demo(steps=1, seed=4, batch=4, context=32)
    assert again.dglu.losses[0] == pytest.approx(result.dglu.losses[0], rel=1e-5)
    assert run_demo(steps=1, seed=5, batch=4, context=32).dglu.losses[0] != again.dglu.losses[0]


@pytest.mark.parametrize("steps, last", [(STEPS, 1 + 2 * ROUNDING), (STEPS, 1 - 2 * ROUNDING), (STEPS, math.nan)])
def test_losses_that_part_are_a_fault(result, steps, last):
    losses = result.dglu.losses[:-1] + [result.autograd.losses[-1] * last]
    faults = DemoResult(result.autograd, replace(result.dglu, losses=losses), result.exact, "").faults()
    assert len(faults) == 1 and f"step {steps - 1}: losses differ" in faults[0]


@pytest.mark.parametrize("part, seen", [("w1", True), ("w2", True), ("b1", True), ("router.weight", False)])
@pytest.mark.parametrize("factor", [1.1, math.nan])
def test_a_wrong_gradient_of_an_expert_is_a_fault(result, part, seen, factor):
    name = f"blocks.1.moe.{part}"
    gradients = result.dglu.gradients | {name: result.autograd.gradients[name] * factor}
    faults = DemoResult(result.autograd, replace(result.dglu, gradients=gradients), result.exact, "").faults()
    assert [f.split(":")[0] for f in faults] == [name] * seen


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


def test_truth_leaves_the_model_alone_and_agrees_with_a_finite_difference():
    torch.manual_seed(0)
    model = TinyLM(width=32, hidden=32, experts=2, layers=1, context=8)
    inputs, targets = batches(corpus(20_000), 1, 2, 8, seed=0)[0]
    before = copy.deepcopy(model.state_dict())
    exact = truth(model, inputs, targets)
    assert all(torch.equal(v, before[k]) and v.dtype == torch.float32 for k, v in model.state_dict().items())
    wide = copy.deepcopy(model).double()
    for block in wide.blocks: block.moe.backward_by, block.moe.dtype = "autograd", torch.float64
    bias, step, sides = wide.blocks[0].moe.b1.data, 1e-5, []
    for sign in (1, -1):
        bias[0, 3] += sign * step
        sides.append(loss_of(wide, inputs, targets).item())
        bias[0, 3] -= sign * step
    assert exact["blocks.0.moe.b1"][0, 3].item() == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-4, abs=1e-9)


def test_the_picture_shows_both_runs_and_every_gradient(result):
    plt = pytest.importorskip("matplotlib.pyplot")
    figure = draw(result)
    left, right = figure.axes
    assert [list(line.get_ydata()) for line in left.lines] == [result.autograd.losses, result.dglu.losses]
    assert len(right.lines[0].get_xdata()) == len(result.exact)
    plt.close(figure)


def test_no_text_no_demo():
    from unittest.mock import patch
    with patch("sysconfig.get_path", return_value="/nowhere"), pytest.raises(RuntimeError, match="sources = 0 bytes"): corpus()


def test_a_run_starts_empty(): assert Run("dglu") == Run("dglu", [], {}, 0.0)
