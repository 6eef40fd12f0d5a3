"""Makes `engine_cases.py` importable by the tests and by the processes they start."""

import sys
from pathlib import Path

import cloudpickle
import torch

sys.path.insert(0, str(Path(__file__).parent))

import engine_cases
import layouts
import megatron_cases

torch.set_num_threads(1)  # the models are too small for more, and machines that run tests are often busy
cloudpickle.register_pickle_by_value(engine_cases)
cloudpickle.register_pickle_by_value(layouts)
cloudpickle.register_pickle_by_value(megatron_cases)
