"""Every broken kernel is caught, and its repaired twin passes a hundred seeds."""
import numpy as np
import pytest

from dglu.emulate.mistakes import MISTAKES, caught, run_mistake

BY_NAME = pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name.replace(" ", "-"))


def test_there_are_many():
    assert len(MISTAKES) >= 10 and len({m.name for m in MISTAKES}) == len(MISTAKES)


@BY_NAME
def test_broken_is_caught(mistake):
    found = caught(mistake)
    assert found and set(found) <= set(mistake.kinds), found


@BY_NAME
def test_repaired_passes_a_hundred_seeds(mistake):
    want = run_mistake(mistake, True, "eager")
    assert want.any()
    for seed in range(100):
        assert np.array_equal(run_mistake(mistake, True, seed=seed), want), seed


def test_a_race_names_both_instructions():
    message = caught(next(m for m in MISTAKES if m.name == "stage freed too early"))["race"]
    assert "cp.async.bulk" in message and "ld.shared.u32 at PTX line" in message and "SMEM of CTA 0 0x8" in message
