"""Training with a reward model: Ray actors, an FSDP2 rank, and a stock SGLang engine."""

from dataclasses import replace

import pytest
import torch
from tidemill_testing import tiny_reward_model
from tidemill_trainer.cluster import Cluster
from tidemill_trainer.config import RewardConfig
from tidemill_trainer.inputs import load_inputs
from tidemill_trainer.run_dir import RunDir
from tidemill_trainer.trainer import Trainer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

pytestmark = [pytest.mark.ray, pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.xdist_group("cluster")]


@pytest.fixture(scope="module")
def config(make_config, tmp_path_factory):
    tokenizer = AutoTokenizer.from_pretrained(make_config().model.path)
    folder = tiny_reward_model(tmp_path_factory.mktemp("reward"), "qwen2", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return make_config(
        f"reward_model.path={folder}",
        "reward_model.coef=0.5",
        "actor.num_workers=1",
        "warmup.max_steps=1",
        "trainer.total_steps=2",
        "trainer.save_samples=16",
    )


@pytest.fixture(scope="module")
def unforked():
    """Start the processes of the run as users do: Ray its workers, and these the processes of SGLang by spawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_RUNTIME_ENV_HOOK", raising=False)
        yield


@pytest.fixture(scope="module")
def train(config, quiet, tmp_path_factory, unforked):
    with Cluster(config, RunDir(tmp_path_factory.mktemp("cluster")), quiet) as cluster:
        cluster.wait_ready()

        def train(path, own):
            inputs = load_inputs(own, quiet)
            assert inputs.val is not None
            run = RunDir(path)
            Trainer(own, cluster, replace(inputs, val=inputs.val[:8]), run, quiet).fit()
            return [row for row in run.read_metrics() if row["phase"] == "rl"], list(run.read_rollouts())

        yield train


def plain_scores(config, lines):
    """Scores of the episodes in plain transformers, by the tokens of their records."""
    model = AutoModelForSequenceClassification.from_pretrained(config.reward_model.path).eval()
    with torch.no_grad():
        return [model(torch.tensor([line["rows"][-1]["token_ids"]])).logits[0, 0].item() for line in lines]


def test_score_is_added_to_the_reward_of_the_function(train, config, tmp_path):
    steps, lines = train(tmp_path, config)
    scores = plain_scores(config, lines)
    assert len({*scores}) > 8
    for line, score in zip(lines, scores, strict=True):
        right = sum(a == b for a, b in zip(line["response"], line["ground_truth"], strict=False))
        of_function = right / max(len(line["response"]), len(line["ground_truth"]))
        assert line["metrics"]["rm_score"] == pytest.approx(score, abs=1e-5)
        assert line["score"] == pytest.approx(of_function + 0.5 * score, abs=1e-5)
        assert line["acc"] == (line["response"] == line["ground_truth"])
    for row in steps[-2:]:
        assert row["critic/rewards/min"] < row["critic/rewards/max"]
        assert row["actor/grad_norm"] > 0
        assert row["episode/addition/rm_score/mean"] != row["critic/score/mean"]
    assert 0 <= steps[-1]["val/accuracy"] <= 1
    assert "val/rm_score/mean" in steps[-1]


def test_score_is_the_whole_reward_without_a_function(train, config, tmp_path):
    steps, lines = train(tmp_path, replace(config, reward=RewardConfig()))
    for line, score in zip(lines, plain_scores(config, lines), strict=True):
        assert line["score"] == line["acc"] == pytest.approx(0.5 * score, abs=1e-5)
    assert steps[-1]["val/accuracy"] == pytest.approx(0.5 * steps[-1]["val/rm_score/mean"], abs=1e-5)
