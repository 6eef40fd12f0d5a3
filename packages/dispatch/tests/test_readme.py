import re
from pathlib import Path

import pytest


@pytest.mark.ray
def test_the_example_of_the_readme_runs(cluster, capsys):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.S)
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == ["[1, 4, 9, 16, 25]", "2"]
