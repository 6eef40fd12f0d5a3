"""Packing and micro-batches, and packed attention and sft_loss, without a process group."""

import pytest
import torch
from engine_cases import make_batch
from tidemill_dataproto import DataProto, ragged
from tidemill_engines.attention.packed import varlen_attention_forward
from tidemill_engines.batch.micro_batches import count_trained, prepare_micro_batches, restore_order
from tidemill_engines.batch.packing import pack_rows
from tidemill_engines.loss.contract import Normalizer
from tidemill_engines.loss.sft import sft_loss
from tidemill_engines.model_io import ModelOutput, PackedLayout, ValueOutput

CPU = torch.device("cpu")


def per_row_attention(q, k, v, lengths, window, scaling):
    """Compute softmax attention row by row and head by head; q [N, H, D], k and v [N, H_kv, D]."""
    out, start = [], 0
    group = q.shape[1] // k.shape[1]
    for length in lengths:
        rows = slice(start, start + length)
        i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
        seen = (j <= i) & (i - j < (length if window is None else window))
        heads = []
        for head in range(q.shape[1]):
            scores = q[rows, head] @ k[rows, head // group].T * scaling
            heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[rows, head // group])
        out.append(torch.stack(heads, 1))
        start += length
    return torch.cat(out)


@pytest.mark.parametrize("lengths", [[1], [5, 1, 9, 2], [4, 4, 4]])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_packed_attention_equals_attention_of_each_row(lengths, window, kv_heads):
    torch.manual_seed(0)
    total = sum(lengths)
    q = torch.randn(total, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(total, kv_heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    layout = PackedLayout.from_lengths(torch.tensor(lengths), CPU)
    assert layout.cu_seqlens.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out, weights = varlen_attention_forward(
        torch.nn.Identity(), *heads_first, None, scaling=0.3, sliding_window=window, tidemill_layout=layout
    )
    assert weights is None
    expected = per_row_attention(q, k, v, lengths, window, 0.3)
    torch.testing.assert_close(out[0], expected, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(expected)
    actual_grads = torch.autograd.grad((out[0] * direction).sum(), (q, k, v))
    for actual, plain in zip(actual_grads, torch.autograd.grad((expected * direction).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-8, atol=1e-9)


def test_packed_attention_rejects_mask():
    x = torch.randn(1, 2, 3, 4)
    layout = PackedLayout.from_lengths(torch.tensor([3]), CPU)
    with pytest.raises(ValueError, match="without an attention mask"):
        varlen_attention_forward(torch.nn.Identity(), x, x, x, torch.ones(1, 1, 3, 3), tidemill_layout=layout)


def test_pack_rows():
    prompts = ragged.ragged(torch.tensor([10, 11, 12, 20, 30, 31]), [3, 1, 2, 0])
    responses = ragged.ragged(torch.tensor([13, 21, 22]), [1, 2, 0, 0])
    batch = DataProto.from_dict(
        {"input_ids": ragged.concat_rows(prompts, responses), "responses": responses}, meta_info={"temperature": 0.5}
    )
    inputs = pack_rows(batch, CPU)
    assert inputs.input_ids.tolist() == [[10, 11, 12, 13, 20, 21, 22, 30, 31]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    assert inputs.layout.cu_seqlens.tolist() == [0, 4, 7, 9]
    assert inputs.layout.max_length == 4
    assert inputs.layout.padded_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert inputs.predictors.tolist() == [2, 4, 5]
    assert inputs.labels.tolist() == [13, 21, 22]
    assert inputs.temperature == 0.5
    nothing = pack_rows(batch[0:0], CPU)
    assert nothing.input_ids.shape == (1, 1)
    assert nothing.predictors.numel() == nothing.labels.numel() == 0


@pytest.mark.parametrize("settings", [{"max_token_len": 20}, {"max_token_len": 20, "micro_batch_size": 3}])
@pytest.mark.parametrize("num_rows", [0, 1, 10])
def test_micro_batches_contain_each_row_once_and_restore_order(settings, num_rows):
    batch = make_batch(num_rows, seed=3)
    parts, indices = prepare_micro_batches(batch, **settings)
    padded, padded_indices = prepare_micro_batches(batch, **settings, num_micro_batches=len(parts) + 2)
    assert len(padded) == len(padded_indices) == len(parts) + 2
    for some, rows in ((parts, indices), (padded, padded_indices)):
        assert sorted(row for part in rows for row in part) == list(range(num_rows))
        assert [len(part) for part in some] == [len(part) for part in rows]
        if "micro_batch_size" not in settings:
            assert max(len(ragged.values(part["input_ids"])) for part in some) <= 20
        restored = restore_order([ragged.values(part["responses"]) for part in some], rows, batch["responses"])
        assert torch.equal(ragged.values(restored), ragged.values(batch["responses"]))
        assert torch.equal(ragged.lengths(restored), ragged.lengths(batch["responses"]))


def test_too_few_micro_batches_are_rejected():
    batch = make_batch(10, seed=3)
    with pytest.raises(ValueError, match="must be at least 4 for 10 rows in micro-batches of 3; got 2"):
        prepare_micro_batches(batch, max_token_len=20, micro_batch_size=3, num_micro_batches=2)
    with pytest.raises(ValueError, match="micro-batches"):
        prepare_micro_batches(batch, max_token_len=20, num_micro_batches=2)
    with pytest.raises(ValueError, match="max_token_len=3"):
        prepare_micro_batches(batch, max_token_len=3)


def test_count_trained_and_sft_loss():
    responses = ragged.ragged(torch.arange(6), [3, 1, 0, 2])
    for dtype in (torch.bool, torch.float32, torch.int64):
        mask = ragged.like(torch.tensor([1, 0, 1, 0, 1, 1]).to(dtype), responses)
        batch = DataProto.from_dict({"responses": responses, "response_mask": mask})
        assert count_trained(batch) == (4.0, 2.0)
        output = ModelOutput(log_probs=torch.tensor([-1.0, -9.0, -2.0, -9.0, -3.0, -4.0]))
        loss, metrics = sft_loss(output, batch, Normalizer(num_tokens=4.0, num_sequences=2.0))
        assert loss.item() == 2.5
        assert metrics == {}
        with pytest.raises(TypeError, match="requires the ModelOutput of a language model; got a ValueOutput"):
            sft_loss(ValueOutput(values=output.log_probs), batch, Normalizer(num_tokens=4.0, num_sequences=2.0))
