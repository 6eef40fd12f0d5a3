"""Checkpoints of the Megatron engine, loaded in the layout that saved them and in others."""

import pytest
from engine_cases import VOCAB
from megatron_cases import check_resumed, save_and_load
from tidemill_testing import run_ranks, tiny_model

pytestmark = pytest.mark.timeout(280)

NOT_DISTRIBUTED = {"use_distributed_optimizer": False}
OVERLAPPED = {"overlap_grad_reduce": True}
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP, ETP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
WHOLE_EXPERTS = {TP: 2, ETP: 1, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("family", "layouts", "others"),
    [
        ("qwen3", [{TP: 2}, {}], {}),
        ("qwen2", [{PP: 2}, {}], {}),
        pytest.param("qwen3", [{}, {PP: 2}, {CP: 2}, {TP: 2}], {}, marks=pytest.mark.slow),
        pytest.param("qwen3", [{PP: 2, VPP: 2}, {PP: 2}, {CP: 2}], {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", [{}, {EP: 2}, WHOLE_EXPERTS, {PP: 2}, {CP: 2}], {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", [WHOLE_EXPERTS, {EP: 2}, {}], OVERLAPPED, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", [{PP: 2}, WHOLE_EXPERTS, {EP: 2}], NOT_DISTRIBUTED, marks=pytest.mark.slow),
        pytest.param("qwen2", [{PP: 2}, {TP: 2}, {}], NOT_DISTRIBUTED, marks=pytest.mark.slow),
        pytest.param("qwen2", [{TP: 2}, {PP: 2}, {}], {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_resumes_in_the_same_and_in_other_layouts(tmp_path, family, layouts, others):
    num_layers = 4 if VPP in layouts[0] else 2
    model = tiny_model(
        tmp_path / "model",
        family,
        vocab_size=VOCAB,
        num_hidden_layers=num_layers,
        tie_word_embeddings=family == "qwen2",
    )
    args = str(model), str(tmp_path), layouts, others
    check_resumed(run_ranks(save_and_load, 2, *args, timeout_s=250), tmp_path / "hf")


@pytest.mark.parametrize(
    ("family", "layouts", "num_ranks"),
    [
        ("qwen3_moe", [{EP: 2}, {}], 2),
        pytest.param("qwen3", [{}, {TP: 2}, {PP: 2}], 2, marks=pytest.mark.slow),
        pytest.param("qwen3", [{}], 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_resumes_with_many_gradient_buckets(tmp_path, family, layouts, num_ranks):
    """Buckets are padded to multiples of 128 elements; a parameter has 61 x 64."""
    model = tiny_model(tmp_path / "model", family, vocab_size=VOCAB)
    args = str(model), str(tmp_path), layouts, OVERLAPPED, 5_000
    check_resumed(run_ranks(save_and_load, num_ranks, *args, timeout_s=250), tmp_path / "hf")
