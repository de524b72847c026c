"Shared by all tests: one reproducible hypothesis profile, one torch thread a worker."
import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("dglu", derandomize=True, deadline=None, max_examples=100, print_blob=False)
hypothesis.settings.load_profile("dglu")

if "PYTEST_XDIST_WORKER" in os.environ: torch.set_num_threads(1)


def pytest_configure(config):
    if getattr(config.option, "dist", "no") == "load": config.option.dist = "worksteal"  # notebooks come last and are long
    config.addinivalue_line("markers", "slow: a further sample of what other tests hold already; DGLU_SLOW=1 runs it")


def pytest_collection_modifyitems(items):
    "Minutes of emulation that repeat, with other choices, what the default run holds."
    if os.environ.get("DGLU_SLOW"): return
    for item in items:
        if item.get_closest_marker("slow"): item.add_marker(pytest.mark.skip(reason="slow: DGLU_SLOW=1 runs it"))
