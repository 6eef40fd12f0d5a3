"""Public names, and the examples of the README."""

import re
from pathlib import Path

import pytest
import tidemill_dataproto


def test_public_names() -> None:
    assert tidemill_dataproto.__all__ == [
        "DataProto",
        "DataProtoItem",
        "all_gather",
        "balance",
        "balance_rows",
        "count_micro_batches",
        "get_group_balanced_partitions",
        "karmarkar_karp",
        "pad_dataproto_to_divisor",
        "prepare_dynamic_batch",
        "ragged",
        "rearrange_micro_batches",
        "restore_dynamic_batch",
        "unpad_dataproto",
    ]
    assert all(getattr(tidemill_dataproto, name) is not None for name in tidemill_dataproto.__all__)


README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
def test_readme_examples_run(example: str) -> None:
    exec(compile(example, "README.md", "exec"), {})
