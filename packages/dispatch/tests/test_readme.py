import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.ray
def test_readme_example_runs_beside_another_cluster(ray_cluster):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    example = re.findall(r"```python\n(.*?)```", readme, flags=re.S)[0]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[1, 4, 9, 16, 25]", "2"]
