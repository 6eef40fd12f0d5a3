"""Checkpoints of the Megatron engine: loaded in the layout that saved them, and in others."""

import pytest
import torch
from engine_cases import VOCAB
from megatron_cases import refusals, save_and_load
from safetensors.torch import load_file
from tidemill_testing import run_ranks, tiny_model

pytestmark = pytest.mark.timeout(280)

NOT_DISTRIBUTED = {"use_distributed_optimizer": False}
TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layouts", "others"),
    [
        ("qwen3", [{TP: 2}, {TP: 2}, {PP: 2}, {}], {}),
        pytest.param("qwen3", [{PP: 2}, {}], {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", [{EP: 2}, {EP: 2}], {}, marks=pytest.mark.slow),
        pytest.param("qwen2", [{PP: 2}, {PP: 2}, {TP: 2}], NOT_DISTRIBUTED, marks=pytest.mark.slow),
        pytest.param("qwen2", [{TP: 2}, {TP: 2}, {}], {}, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_where_it_was_saved(tmp_path, family, layouts, others):
    tied = family == "qwen2"
    model = tiny_model(tmp_path / "model", family, vocab_size=VOCAB, tie_word_embeddings=tied)
    for seen in run_ranks(save_and_load, 2, str(model), str(tmp_path), layouts, others, timeout_s=250):
        expected, same, *elsewhere = zip(seen["metrics"], seen["weights"], strict=True)
        if layouts[1] == layouts[0]:  # bit for bit
            assert same[0] == expected[0]
            assert all(torch.equal(same[1][name], weight) for name, weight in expected[1].items())
        for metrics, weights in [same, *elsewhere]:
            for step, wanted in zip(metrics, expected[0], strict=True):
                assert step == pytest.approx(wanted, rel=1e-4, abs=1e-5)
            for name, weight in expected[1].items():
                torch.testing.assert_close(weights[name], weight, atol=2e-5, rtol=1e-4, msg=name)
        exported = load_file(tmp_path / "hf" / "model.safetensors")
        assert set(exported) == set(expected[1])
        assert all(torch.equal(exported[name], weight) for name, weight in expected[1].items())


def test_what_cannot_be_divided_or_saved_is_refused_on_all_ranks(tmp_path):
    model = tiny_model(tmp_path, "qwen2", tie_word_embeddings=True)
    configs = [({TP: 4}, {}), ({PP: 2}, {})]
    for said in run_ranks(refusals, 2, str(model), configs):
        assert [message.removeprefix("rank 0: ") for message in said] == [
            "tp x pp x cp = 4 does not divide the 2 ranks",
            "megatron-core 0.16 mixes up the distributed optimizer's state of tied embeddings in checkpoints of "
            "pipelines; set MegatronConfig.use_distributed_optimizer=False for this model",
        ]


@pytest.mark.slow
def test_experts_that_were_divided_otherwise_are_refused(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3_moe", vocab_size=VOCAB)
    with pytest.raises(RuntimeError, match=r"ValueError: could not load the checkpoint .* divided otherwise"):
        run_ranks(save_and_load, 2, str(model), str(tmp_path), [{EP: 2}, {PP: 2}], {}, timeout_s=250)
