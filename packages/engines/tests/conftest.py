"""Makes `engine_cases.py` importable by the tests and by the processes they start."""

import sys
from pathlib import Path

import cloudpickle

sys.path.insert(0, str(Path(__file__).parent))

import engine_cases

cloudpickle.register_pickle_by_value(engine_cases)
