"""The public names, and the example that the README shows."""

import re
from pathlib import Path

import tidemill_dataproto


def test_public_names() -> None:
    assert tidemill_dataproto.__all__ == [
        "DataProto",
        "balance",
        "balance_rows",
        "get_seqlen_balanced_partitions",
        "karmarkar_karp",
        "ragged",
        "rearrange_micro_batches",
        "restore_dynamic_batch",
    ]
    assert all(getattr(tidemill_dataproto, name) is not None for name in tidemill_dataproto.__all__)


def test_the_readme_example_runs() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
