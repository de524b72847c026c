"Shared by all tests: one reproducible hypothesis profile, one torch thread a worker."
import os

import hypothesis
import torch

hypothesis.settings.register_profile("dglu", derandomize=True, deadline=None, max_examples=100, print_blob=False)
hypothesis.settings.load_profile("dglu")

if "PYTEST_XDIST_WORKER" in os.environ: torch.set_num_threads(1)
