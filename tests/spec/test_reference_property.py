"The reference equals an independent float64 oracle on two thousand random configurations of the whole legal space."
import random

import pytest

from dglu.check import random_case, run_case

CHUNK = 40  # cases a test, so that workers share them


@pytest.mark.parametrize("first", range(0, 2000, CHUNK))
def test_reference_equals_the_oracle(first):
    for seed in range(first, first + CHUNK):
        case = random_case(random.Random(seed))
        result = run_case(case, "reference", seed)
        assert result.ok, f"random_case(random.Random({seed})), seed {seed}: {case.name}\n{result.message}"
