"""Math problems with numbers as answers: preparation of the files, and the reward.

    hf download openai/gsm8k --repo-type dataset --local-dir downloads/gsm8k
    python recipes/math_problems.py gsm8k downloads/gsm8k data/gsm8k

    hf download BytedTsinghua-SIA/DAPO-Math-17k --repo-type dataset --local-dir downloads/dapo-math
    python recipes/math_problems.py dapo-math downloads/dapo-math data/dapo-math

Each writes train.jsonl and val.jsonl. Only the package pyarrow is required.
"""

import json
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

_STEPS = 'Let\'s think step by step and output the final answer after "####".'
_MARK = re.compile(r"####|Answer:|\\boxed\{")
# Not the first number of a longer expression, such as 2\sqrt{3}, 1/2, 10^5, 3x or 12:30.
# The possessive "++" never tries a part of the number: that takes minutes for thousands of digits before a letter.
_NUMBER = re.compile(
    r"(?:[\s$*]|\\[($])*+(-?(?:\d++(?:,\d++)*+(?:\.\d++)?+|\.\d++))"
    r"(?![\d.,]*\d)(?!\s*(?:\\(?![%)\]\\$\s])|[\^/]))(?![(:A-Za-z])"
)
_NUM_VALIDATION = 512


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return 1.0 if the ground truth, a number, is after the last "####", "Answer:" or \\boxed{, else 0.0."""
    _, *answers = _MARK.split(solution_str)
    found = _NUMBER.match(answers[-1]) if answers else None
    return float(found is not None and _number(found[1]) == _number(str(ground_truth)))


def gsm8k(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the problems of the files `train-*.parquet` and `test-*.parquet` of the configuration "main"."""

    def problems(split: str) -> list[dict[str, Any]]:
        return [
            _problem("gsm8k", f"{row['question']} {_STEPS}", row["answer"].rpartition("####")[2])
            for row in _rows(folder / "main", f"{split}-*.parquet")
        ]

    return problems("train"), problems("test")


def dapo_math(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return each problem once, of which the file has many copies; the last 512 ones are for validation."""
    problems = {
        (text := row["prompt"][-1]["content"]): _problem("dapo-math", text, row["reward_model"]["ground_truth"])
        for row in _rows(folder, "**/*.parquet")
    }
    rows = list(problems.values())
    return rows[:-_NUM_VALIDATION], rows[-_NUM_VALIDATION:]


def main(name: str, source: str, target: str) -> None:
    """Write the problems `name` in the folder `source` to the folder `target`."""
    train, val = {"gsm8k": gsm8k, "dapo-math": dapo_math}[name](Path(source))
    Path(target).mkdir(parents=True, exist_ok=True)
    for file, rows in (("train.jsonl", train), ("val.jsonl", val)):
        Path(target, file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{len(rows)} problems in {Path(target, file)}")


def _problem(source: str, text: str, answer: str) -> dict[str, Any]:
    prompt = [{"role": "user", "content": text}]
    return {"data_source": source, "prompt": prompt, "ground_truth": answer.strip().replace(",", "")}


def _number(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))  # two integers above 2**53 may be equal as floats


def _rows(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet

    files = sorted(folder.glob(pattern))
    if not files:
        sys.exit(f"expected files {pattern} in {folder}, found none; download them as described in {__file__}")
    for file in files:
        for batch in parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("gsm8k", "dapo-math"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
