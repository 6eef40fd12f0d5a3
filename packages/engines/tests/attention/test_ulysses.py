"""Ulysses sequence parallelism: the parts of the ranks, the all-to-all, the gathered outputs."""

from dataclasses import replace

import pytest
import torch
from engine_cases import (
    VOCAB,
    build_engine,
    check_training,
    engine_training,
    make_batch,
    plain_log_probs,
    plain_model,
    plain_training,
    policy_like_loss,
    shard,
)
from tidemill_dataproto import ragged
from tidemill_engines.attention.packed import check_attention, varlen_attention_forward
from tidemill_engines.attention.ulysses import gather_output
from tidemill_engines.batch.packing import pack_rows
from tidemill_engines.model_io import ModelOutput, PackedLayout
from tidemill_testing import run_ranks, tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_shares", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_parts_of_all_ranks_are_the_packed_rows(num_rows, num_shares):
    batch = make_batch(num_rows, seed=num_rows)
    whole = pack_rows(batch, CPU)
    runs = [pack_rows(batch, CPU, share=share, num_shares=num_shares) for share in range(num_shares)]
    (size,) = {run.input_ids.shape[1] for run in runs}
    num_tokens = len(ragged.values(batch["input_ids"]))
    assert 0 <= size * num_shares - num_tokens < max(num_shares, 1) + (num_rows == 0)
    together = {name: torch.cat([getattr(run, name) for run in runs], 1) for name in ("input_ids", "position_ids")}
    assert torch.equal(together["input_ids"][:, :num_tokens], whole.input_ids[:, :num_tokens])
    assert torch.equal(together["position_ids"][:, :num_tokens], whole.position_ids[:, :num_tokens])
    predictors = torch.cat([run.predictors + share * size for share, run in enumerate(runs)])
    assert torch.equal(predictors, whole.predictors)
    assert torch.equal(torch.cat([run.labels for run in runs]), whole.labels)
    firsts = torch.tensor([len(run.labels) for run in runs]).cumsum(0).tolist()
    assert [run.first_output for run in runs] == [0, *firsts[:-1]]
    for run in runs:
        assert run.num_outputs == len(whole.labels)
        assert all((run.predictors >= 0) & (run.predictors < size))
        assert run.layout.cu_seqlens[: num_rows + 1].tolist() == whole.layout.cu_seqlens[: num_rows + 1].tolist() or (
            num_rows == 0
        )
        assert run.layout.cu_seqlens[-1] == size * num_shares  # all tokens belong to a row, filling tokens to their own


LENGTHS = [5, 1, 9, 2, 7]


def heads(num_heads, kv_heads, group, rank, size):
    """Attention and its gradients for this rank's part, computed alone over all tokens and with the group."""
    generator = torch.Generator().manual_seed(num_heads * 100 + kv_heads)

    def draw(num: int, dim: int) -> torch.Tensor:
        return torch.randn(1, num, sum(LENGTHS), dim, generator=generator, dtype=torch.float64)

    inputs = [draw(num_heads, 8), draw(kv_heads, 8), draw(kv_heads, 6)]
    direction = torch.randn(1, sum(LENGTHS), num_heads, 6, generator=generator, dtype=torch.float64)
    layout = PackedLayout.from_lengths(torch.tensor(LENGTHS), CPU)
    run = slice(rank * sum(LENGTHS) // size, (rank + 1) * sum(LENGTHS) // size)
    out = []
    for shared in (False, True):
        own = [(x[:, :, run] if shared else x).clone().requires_grad_() for x in inputs]
        attended, _ = varlen_attention_forward(
            torch.nn.Identity(),
            *own,
            None,
            tidemill_layout=layout,
            tidemill_group=group if shared else None,
            sliding_window=4,
        )
        grads = torch.autograd.grad((attended * (direction[:, run] if shared else direction)).sum(), own)
        out.append([attended if shared else attended[:, run], *(x if shared else x[:, :, run] for x in grads)])
    return [[tensor.detach() for tensor in part] for part in out]


def run_heads(cases):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return [heads(*case, torch.distributed.group.WORLD, rank, size) for case in cases]


@pytest.mark.parametrize(("size", "cases"), [(3, [(6, 2), (6, 1), (3, 3)]), (4, [(4, 2), (8, 1), (8, 8), (12, 6)])])
def test_attention_with_divided_heads_equals_full_attention(size, cases):
    for of_rank in run_ranks(run_heads, size, cases):
        for case, (alone, shared) in zip(cases, of_rank, strict=True):
            for name, expected, actual in zip(("out", "dq", "dk", "dv"), alone, shared, strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=lambda m: f"{case} {name} {m}")  # noqa: B023


def run_gather(counts):
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    whole = torch.arange(float(sum(counts)), dtype=torch.float64)
    first = sum(counts[:rank])
    own = whole[first : first + counts[rank]].clone().requires_grad_()
    inputs = replace(pack_rows(make_batch(0), CPU), first_output=first, num_outputs=len(whole))
    output = gather_output(ModelOutput(log_probs=own, entropy=own * 2), inputs, group)
    assert output.entropy is not None
    (grad,) = torch.autograd.grad((output.log_probs.square() + output.entropy).sum(), own)
    return output.log_probs.detach(), output.entropy.detach(), grad


def test_gather_output_counts_gradients_once():
    counts = [2, 0, 3]
    whole = torch.arange(5.0, dtype=torch.float64)
    grads = []
    for log_probs, entropy, grad in run_ranks(run_gather, 3, counts):
        assert torch.equal(log_probs, whole)
        assert torch.equal(entropy, 2 * whole)
        grads.append(grad)
    assert torch.equal(torch.cat(grads), 2 * whole + 2)


def run_engines(path, batch):
    engine = build_engine(path, ulysses_sequence_parallel_size=2, max_token_len_per_gpu=20)
    place = (
        engine.get_data_parallel_rank(),
        engine.get_data_parallel_size(),
        torch.distributed.get_world_size(engine.get_data_parallel_group()),
        engine.is_mp_src_rank_with_outputs(),
    )
    out = engine.infer_batch(shard(engine, batch), entropy=True)
    rank = torch.distributed.get_rank()
    caught = []
    masked = make_batch(4)
    assert masked.batch is not None
    if rank % 2:
        masked.batch["response_mask"] = ragged.like(~ragged.values(masked["response_mask"]), masked["response_mask"])
    warmer = make_batch(4, temperature=1.0 + rank % 2)
    for bad in (
        shard(engine, batch)[: 5 - rank % 2],
        make_batch(4, seed=rank),
        masked,
        warmer,
        make_batch(3, longest=60),
    ):
        try:
            engine.train_batch(bad, policy_like_loss, calculate_entropy=True)
        except ValueError as error:
            caught.append(str(error))
    engine.close()
    return place, [*out["log_probs"].unbind()], [*out["entropy"].unbind()], caught


def test_ranks_sharing_rows_have_equal_outputs_and_require_equal_rows(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(12, seed=3, temperature=0.7)
    with torch.no_grad():
        expected = plain_log_probs(plain_model(path), batch)
    results = run_ranks(run_engines, 4, path, batch)
    assert [place for place, *_ in results] == [(0, 2, 2, True), (0, 2, 2, False), (1, 2, 2, True), (1, 2, 2, False)]
    for (part, *_), log_probs, entropy, caught in results:
        rows = expected[:6] if part == 0 else expected[6:]
        for row, wanted, wanted_entropy in zip(
            zip(log_probs, entropy, strict=True), *zip(*rows, strict=True), strict=True
        ):
            torch.testing.assert_close(row[0], wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(row[1], wanted_entropy, rtol=1e-5, atol=1e-5)
        assert [message for message in caught if "ranks 0 and 1 share the rows of data-parallel rank 0" in message] == (
            caught[:4]
        )
        assert "above max_token_len_per_gpu=20 on 2 ranks" in caught[4]


def run_training(path, batches, layouts):
    return [engine_training(path, batches, ulysses_sequence_parallel_size=2, **layout) for layout in layouts]


def check_layouts(path, layouts):
    batches = [make_batch(9, seed=4), make_batch(5, seed=5)]
    expected = plain_training(path, batches)
    results = run_ranks(run_training, 2, path, batches, layouts, timeout_s=300.0)
    for number, layout in enumerate(layouts):
        check_training([of_rank[number] for of_rank in results], expected, layout)


def test_recomputed_layers_repeat_all_to_all(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    models = [{"gradient_checkpointing": True, "recompute": how} for how in ("full", "selective")]
    check_layouts(path, [{"model": model, "max_token_len_per_gpu": 20} for model in models])


@pytest.mark.slow
def test_compiled_layers_have_equal_gradients(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    check_layouts(path, [{"model": {"compile_layers": True}}])


def run_bad_sizes(path):
    caught = []
    for settings in (
        {"ulysses_sequence_parallel_size": 2},
        {"ulysses_sequence_parallel_size": 3},
        {"ulysses_sequence_parallel_size": 3, "model": {"attn_implementation": "sdpa"}},
    ):
        try:
            build_engine(path, **settings)
        except ValueError as error:
            caught.append(str(error))
    return caught


def test_invalid_sequence_parallel_sizes_are_rejected(tmp_path):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    for caught in run_ranks(run_bad_sizes, 3, path):
        assert caught == [
            "FSDP2Config.ulysses_sequence_parallel_size must divide the world size 3; got 2",
            "FSDP2Config.ulysses_sequence_parallel_size must divide the 4 attention heads of the model; got 3",
            "FSDP2Config.ulysses_sequence_parallel_size > 1 requires ModelConfig.attn_implementation='varlen'; "
            "got 'sdpa'",
        ]


def test_unsupported_layer_types_are_rejected():
    from transformers import MambaConfig, Qwen3Config, RecurrentGemmaConfig

    check_attention(Qwen3Config(layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2))
    with pytest.raises(ValueError, match="layers of type linear_attention, which would mix the tokens of packed rows"):
        check_attention(Qwen3Config(layer_types=["full_attention", "linear_attention"], num_hidden_layers=2))
    with pytest.raises(ValueError, match="layers of type attention, recurrent, which would mix the tokens of packed"):
        check_attention(RecurrentGemmaConfig())
    with pytest.raises(ValueError, match="layers of type recurrent, which would mix the tokens of packed rows"):
        check_attention(MambaConfig(), is_stateful=True)
