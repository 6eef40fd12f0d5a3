"""A reward for random weights."""

import zlib
from typing import Any


async def coin(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return 1.0 for half of all responses, as their checksum decides, so that groups have advantages."""
    return float(zlib.crc32(solution_str.encode(errors="replace")) & 1)
