import re
from pathlib import Path


def test_readme_example_learns(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    exec(readme.split("```python\n")[1].split("```")[0], {})
    first, last = map(float, re.findall(r"\d\.\d\d", capsys.readouterr().out))
    assert first < 0.2
    assert last > 0.8
