"""Examples, run as a user does, against an SGLang server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from reference_answers import most_likely
from sglang_server import PROMPT, Server, serving
from tidemill_testing.sglang_server import API_KEY

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with serving(checkpoint) as server:
        yield server


def run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def serves(server: Server, path: Path) -> bool:
    """Whether the server answers as the model in `path`, with the greedy token at each position."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    answer = server.generate()["output_ids"]
    return answer == most_likely(model, PROMPT, answer)


def test_fsdp2_script_updates_server_after_each_step(server, checkpoint):
    output = run(*TORCHRUN, str(EXAMPLES / "fsdp2_torchrun.py"), str(checkpoint), server.url, API_KEY)
    assert output.count("verified: True") == 3
    assert server.generate()["meta_info"]["weight_version"] == "3"


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["one rank", "two ranks"])
def test_server_has_weights_of_transformers_trainer(server, checkpoint, tmp_path, launcher):
    script = str(EXAMPLES / "transformers_callback.py")
    output = run(*launcher, script, str(checkpoint), server.url, API_KEY, str(tmp_path / "trained"))
    assert "version 2" in output
    assert "version 4" in output
    assert output.count("verified: True") == 2  # two ranks without a process group would each send
    assert not serves(server, checkpoint)
    assert serves(server, tmp_path / "trained")
    assert server.generate()["meta_info"]["weight_version"] == "4"
