"""Addition of two numbers, with the digits of the sum from right to left."""

import random
from typing import Any

CHARACTERS = "0123456789+="


def addition_row(a: int, b: int, num_digits: int) -> dict[str, Any]:
    """Create one problem, such as 47+85= with the answer 231, which is 132 from right to left."""
    answer = str(a + b).zfill(num_digits + 1)[::-1]
    return {
        "data_source": "addition",
        "prompt": f"{a:0{num_digits}d}+{b:0{num_digits}d}=",
        "ground_truth": answer,
        "response": answer,
    }


def addition_rows(num_digits: int, num_train: int, num_val: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Draw disjoint training and validation problems from all pairs of numbers with `num_digits` digits."""
    limit = 10**num_digits
    pairs = random.Random(seed).sample(range(limit**2), num_train + num_val)
    rows = [addition_row(*divmod(pair, limit), num_digits) for pair in pairs]
    return rows[:num_train], rows[num_train:]
