"""MoE models with Megatron: balance loss, router replay and expert load, compared with transformers row by row."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import VOCAB
from moe_cases import EXPERTS, LAYERS, NUM_ROWS, TOP_K, batches, build, errors_of, plain_training, train
from tidemill_dataproto import ragged
from tidemill_engines import sft_loss
from tidemill_testing import run_ranks, tiny_model

pytestmark = pytest.mark.timeout(280)

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP, ETP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
SP, ALL = {"sequence_parallel": True}, {"moe_token_dispatcher_type": "allgather"}
RECOMPUTED = {"gradient_checkpointing": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("normalized", {"micro_batch_size_per_gpu": 1}),
    ("normalized", {EP: 2, **ALL, "max_token_len_per_gpu": 30}),
    ("normalized", {EP: 4, "micro_batch_size_per_gpu": 3}),
    ("normalized", {TP: 2, EP: 2, ETP: 1, **SP}),
    ("normalized", {TP: 2, EP: 2, **SP, **ALL}),
    ("not normalized", {PP: 2, EP: 2, "max_token_len_per_gpu": 30}),
    ("not normalized", {PP: 2, "model": RECOMPUTED, "max_token_len_per_gpu": 30}),
    ("not normalized", {PP: 2, VPP: 2, "micro_batch_size_per_gpu": 1}),
    ("not normalized", {CP: 2, EP: 2, "max_token_len_per_gpu": 30}),
]
QUICK = 1
EACH = [
    pytest.param(index, id=f"{model} {settings}", marks=[] if index == QUICK else pytest.mark.slow)
    for index, (model, settings) in enumerate(CASES)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    fields = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "vocab_size": VOCAB}
    names = {"normalized": True, "not normalized": False}
    return {name: str(tiny_model(folder / name, "qwen3_moe", **fields, norm_topk_prob=n)) for name, n in names.items()}


@pytest.fixture(scope="module")
def results(folders) -> Callable[[int], list[dict[str, Any]]]:
    """Function that returns each rank's result of a case. All cases but the quick one share one set of processes."""

    @cache
    def run(indices: tuple[int, ...]) -> list[list[dict[str, Any]]]:
        cases = [(folders[model], settings) for model, settings in (CASES[index] for index in indices)]
        return run_ranks(train, 2 if indices == (QUICK,) else 4, cases, timeout_s=250)

    def of_case(index: int) -> list[dict[str, Any]]:
        together = (QUICK,) if index == QUICK else tuple(other for other in range(len(CASES)) if other != QUICK)
        return [of_rank[together.index(index)] for of_rank in run(together)]

    return of_case


@pytest.fixture(scope="module")
def references(folders) -> Callable[[str], dict[str, Any]]:
    return cache(lambda name: plain_training(Path(folders[name])))


@pytest.mark.parametrize("index", EACH)
def test_training_with_balance_loss_and_replay_equals_a_plain_loop(results, references, index):
    reference = references(CASES[index][0])
    for rank in results(index):
        for step, expected in zip(rank["metrics"], reference["metrics"], strict=True):
            assert {name: step[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert set(rank["weights"]) == set(reference["weights"])
        for name, weight in reference["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("index", EACH)
def test_experts_of_each_token_are_recorded(results, references, index):
    rows = references(CASES[index][0])["recorded"]
    ranks = results(index)
    size = len({rank["rank"] for rank in ranks})
    for rank in ranks:
        chunks = torch.arange(NUM_ROWS).tensor_split(size)
        own = [rows[row] for row in chunks[rank["rank"]].tolist()]
        assert torch.equal(*rank["lengths"])
        expected = torch.cat(own) if own else rank["recorded"][:0]
        assert torch.equal(rank["recorded"].sort(-1).values, expected.sort(-1).values.int())


def test_moe_settings_are_refused_for_a_dense_model(tmp_path):
    dense = tiny_model(tmp_path, "qwen3", vocab_size=VOCAB)
    for messages in run_ranks(errors_of, 1, str(dense), [{"model": {}}, {"model": {"router_aux_loss_coef": 0.0}}], {}):
        assert messages == [
            f"{name} requires a MoE model, but qwen3 is dense; leave it at its default"
            for name in ("ModelConfig.router_aux_loss_coef", "MegatronConfig.router_replay")
        ]


def test_given_experts_without_router_replay_are_refused(folders):
    engine = build(folders["normalized"], {"router_replay": False})
    given, free = batches()
    log_probs = engine.infer_batch(free)["log_probs"]
    with pytest.raises(ValueError, match="routed_experts, which requires MegatronConfig"):
        engine.infer_batch(given)
    with pytest.raises(ValueError, match="set it, or drop the column"):
        engine.train_batch(given, sft_loss)
    assert torch.equal(ragged.values(engine.infer_batch(free)["log_probs"]), ragged.values(log_probs))
    engine.close()


def test_invalid_routing_is_refused_on_all_ranks(folders):
    num_tokens = len(ragged.values(batches()[1]["input_ids"]))
    experts = torch.zeros(num_tokens, LAYERS, TOP_K, dtype=torch.int64)
    configs = [{TP: 2}, {TP: 2, **SP}, {PP: 2, **ALL}, {EP: 2, **ALL, TP: 2}]
    wrong = {"layers": experts[:, 1:], "experts": experts + EXPERTS, "lengths": experts, "twice": experts}
    for messages in run_ranks(errors_of, 2, folders["normalized"], configs, wrong):
        starts = [
            "Megatron requires sequence_parallel=True to train a MoE model with tensor_model_parallel_size = 2",
            "expert_tensor_parallel_size = 2 with moe_token_dispatcher_type='alltoall' gathers unequal ",
            "MegatronConfig.moe_token_dispatcher_type='allgather' does not support pipeline parallelism",
            "Megatron requires sequence_parallel=True to train a MoE model with tensor_model_parallel_size = 2",
            "routed_experts must be ragged [B, j, 4, 2] (layers, experts per token); got (3, 2) per token",
            "routed_experts must be between 0 and 3, or -1 where the router chooses; got values from 4 to 4",
            "routed_experts must have one entry per token of input_ids; got rows of other lengths",
            "routed_experts must have 2 different experts per token and layer, or only -1; got a token with repeated",
        ]
        for message, start in zip(messages, starts, strict=True):
            assert message.removeprefix("rank 0: ").startswith(start)


def _step_and_inference(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    engine = build(folder, {EP: 2})
    assert engine.engine_config.token_dispatcher(engine.architecture) == "allgather"
    batch = batches()[1][: 1 + torch.distributed.get_rank()]  # ranks have different numbers of tokens
    inferred = ragged.values(engine.infer_batch(batch)["log_probs"])
    with engine.eval_mode():
        step = engine.forward_step(batch, None, forward_only=True, calculate_entropy=False)
    engine.close()
    return step.model_output.log_probs, inferred


def test_single_step_of_ranks_with_different_numbers_of_tokens_gathers_them(tmp_path):
    folder = tiny_model(tmp_path, "qwen3_moe", vocab_size=VOCAB, num_experts=8, num_experts_per_tok=4)
    for stepped, inferred in run_ranks(_step_and_inference, 2, str(folder), timeout_s=120):
        assert torch.equal(stepped, inferred)
