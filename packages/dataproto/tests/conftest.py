"""Makes `batch_cases.py` importable by the tests."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)  # the batches are too small for more, and machines that run tests are often busy
settings.register_profile("tidemill", deadline=None, max_examples=60)
settings.load_profile("tidemill")
