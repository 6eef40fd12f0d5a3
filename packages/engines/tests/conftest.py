"""Make the helper modules of this folder importable by all tests and by the processes that they start."""

import sys
from pathlib import Path

import cloudpickle
import torch

sys.path.insert(0, str(Path(__file__).parent))

import engine_cases
import layouts
import megatron_cases
import value_cases

torch.set_num_threads(1)  # the models are too small for more
cloudpickle.register_pickle_by_value(engine_cases)
cloudpickle.register_pickle_by_value(layouts)
cloudpickle.register_pickle_by_value(megatron_cases)
cloudpickle.register_pickle_by_value(value_cases)
