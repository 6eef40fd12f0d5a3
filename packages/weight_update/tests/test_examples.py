"""Examples, run as a user does, against an SGLang server."""

import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from reference_answers import most_likely
from sglang_server import PROMPT, Server, serving
from tidemill_testing.sglang_server import API_KEY
from tokenizers import Tokenizer, models, pre_tokenizers

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


@pytest.fixture(scope="module")
def checkpoint_with_words(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`checkpoint` with a tokenizer in which every other token is a number."""
    path = tmp_path_factory.mktemp("words") / "model"
    shutil.copytree(checkpoint, path)
    words = [str(i) if i % 2 else chr(ord("一") + i) for i in range(128)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[4]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    special = {"pad_token": words[0], "eos_token": words[2], "unk_token": words[4]}  # as in the model's config
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    return path


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["one rank", "two ranks"])
def test_reward_of_trl_grpo_increases(server, checkpoint_with_words, tmp_path, launcher):
    """Completions are sampled by the server alone, so the reward increases only if the server gets the new weights."""
    script = str(EXAMPLES / "trl_grpo.py")
    output = run(*launcher, script, str(checkpoint_with_words), server.url, API_KEY, str(tmp_path))
    assert output.count("verified: True") == 20
    rewards = [float(reward) for reward in re.findall(r"'reward': '([\d.]+)'", output)]
    assert len(rewards) == 20
    assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:3]) + 0.1, rewards
    assert server.generate()["meta_info"]["weight_version"] == "19"
