import re
from pathlib import Path

import pytest
import torch
from engine_cases import VOCAB
from tidemill_testing import tiny_model


def test_readme_examples_run(tmp_path, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    model = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    [block] = re.findall(r"<!-- a test runs this block -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert "path/to/hf_model" in block
    scope: dict = {}
    exec(block.replace("path/to/hf_model", str(model)), scope)
    assert "'grad_nonfinite': 0.0, 'lr': 0.0001" in capsys.readouterr().out
    assert (tmp_path / "trained" / "model.safetensors").is_file()

    [loss] = re.findall(r"```python\n(from tidemill_engines import Metric.*?)```", readme, re.DOTALL)
    exec(loss, scope)
    batch = scope["batch"]
    batch.batch["advantages"] = batch["response_mask"]
    scope["engine"].initialize()
    metrics = scope["engine"].train_batch(batch, scope["pg_loss"])
    scope["engine"].close()
    assert metrics["pg_loss"] == pytest.approx(metrics["loss"])
    assert not torch.distributed.is_initialized()
