"""CUDA only: the varlen attention kernels and bfloat16 training steps."""

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, plain_log_probs, policy_like_loss, weights_of
from tidemill_dataproto import DataProto, ragged
from tidemill_engines import sft_loss
from tidemill_engines.attention.packed import takes_cudnn, varlen_cuda, varlen_padded
from tidemill_engines.batch.packing import pack_rows
from tidemill_engines.model_io import PackedLayout
from tidemill_testing import tiny_model

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_rows_are_packed_while_the_device_works():
    rows = torch.full((32,), 1024)
    tokens = ragged.ragged(torch.randint(VOCAB, (int(rows.sum()),)), rows)
    batch = DataProto.from_dict({"input_ids": tokens, "responses": ragged.split_rows(tokens, rows // 8)[1]})
    torch.cuda._sleep(1 << 31)
    worked = torch.cuda.Event()
    worked.record()
    inputs = pack_rows(batch, DEVICE)
    assert not worked.query()
    assert torch.equal(inputs.input_ids[0].cpu(), ragged.values(tokens))


def assert_equals_the_padded_path(attention, dtype, lengths, *, kv_heads, head_dim=64, window=None):
    """Check that the error of `attention` is at most twice that of the padded path in the same dtype."""
    torch.manual_seed(0)
    total = sum(lengths)
    layout = PackedLayout.from_lengths(torch.tensor(lengths), DEVICE)
    q = torch.randn(total, 8, head_dim, device=DEVICE)
    k, v = (torch.randn(total, kv_heads, head_dim, device=DEVICE) for _ in range(2))
    direction = torch.randn_like(q)

    def run(attention, of):
        inputs = [x.to(of).requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, layout, 0.1, window)
        return [out, *torch.autograd.grad((out * direction.to(of)).sum(), inputs)]

    exact = run(varlen_padded, torch.float32)
    kernel, padded = run(attention, dtype), run(varlen_padded, dtype)
    for name, truth, actual, same_dtype in zip(("out", "dq", "dk", "dv"), exact, kernel, padded, strict=True):
        size = truth.norm().clamp(min=1.0)  # queries of a row of one token have no gradient
        error, rounding = (((x.float() - truth).norm() / size).item() for x in (actual, same_dtype))
        assert error < max(2 * rounding, 1e-3), f"{name}: {error} against {rounding} of the padded path"


@pytest.mark.parametrize(("window", "by_cudnn"), [(None, False), (None, True), (64, False)])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_kernel_equals_the_padded_path(dtype, kv_heads, window, by_cudnn, monkeypatch):
    if by_cudnn:
        needs_cudnn()
    else:
        monkeypatch.setattr("tidemill_engines.attention.packed.HAS_CUDNN", False)
    lengths = [1, 300, 17, 128, 64, 511]
    assert_equals_the_padded_path(varlen_cuda, dtype, lengths, kv_heads=kv_heads, window=window)


def needs_cudnn():
    pytest.importorskip("cudnn")
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("requires a Hopper or data-center Blackwell GPU")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [[700], [1], [1, 1, 1], [2049, 5], [64] * 33, [1000, 24, 1023]], ids=str)
def test_cudnn_attention_for_any_rows_and_lengths(lengths, head_dim):
    needs_cudnn()
    q = torch.empty(sum(lengths), 8, head_dim, device=DEVICE, dtype=torch.bfloat16)
    assert takes_cudnn(q, None)
    assert not takes_cudnn(q, 64)
    assert not takes_cudnn(q.new_empty(1, 8, 256), None)
    assert_equals_the_padded_path(varlen_cuda, torch.bfloat16, lengths, kv_heads=2, head_dim=head_dim)


def test_cudnn_reuses_plans():
    needs_cudnn()
    from tidemill_engines.attention.cudnn import _backward_plan, _forward_plan

    plans = _forward_plan, _backward_plan
    before = [plan.cache_info().misses for plan in plans]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = torch.randint(257, 512, (5,), generator=generator)
        layout = PackedLayout.from_lengths(lengths, DEVICE)
        total = int(lengths.sum())
        q, k, v = (torch.randn(total, 4, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        varlen_cuda(q, k, v, layout, None, None).sum().backward()
    for plan, misses in zip(plans, before, strict=True):  # rows up to 8, of up to 512, of 2,048 or of 4,096 tokens
        assert plan.cache_info().misses <= misses + 2


def test_cudnn_in_compiled_layer():
    needs_cudnn()
    layout = PackedLayout.from_lengths(torch.tensor([300, 212]), DEVICE)
    q, k, v = (torch.randn(512, heads, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for heads in (8, 2, 2))

    def layer(q, k, v):
        return varlen_cuda(q * 0.5, k, v, layout, None, None).square()

    for ours, theirs in zip(*(grads_and_output(f, q, k, v) for f in (torch.compile(layer), layer)), strict=True):
        torch.testing.assert_close(ours, theirs)


def grads_and_output(layer, *inputs):
    out = layer(*inputs)
    return out, *torch.autograd.grad(out.sum(), inputs)


@pytest.fixture
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def cuda_engine(path, **engine):
    return build_engine(path, device="cuda", optimizer={"lr": 1e-3, "eps": 1e-3}, **engine)


def train(engine, batch, steps):
    history = [engine.train_batch(batch, policy_like_loss, calculate_entropy=True) for _ in range(steps)]
    weights = {name: weight.float().cpu() for name, weight in weights_of(engine).items()}
    engine.close()
    return history, weights


def test_float32_on_cuda_equals_cpu(tmp_path, one_process):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(12, seed=1, temperature=0.8)
    on_cpu = train(build_engine(path, optimizer={"lr": 1e-3, "eps": 1e-3}), batch, 2)
    on_cuda = train(cuda_engine(path, max_token_len_per_gpu=60), batch, 2)
    for expected, actual in zip(on_cpu[0], on_cuda[0], strict=True):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name, weight in on_cpu[1].items():
        torch.testing.assert_close(on_cuda[1][name], weight, rtol=1e-4, atol=1e-5)


def test_bfloat16_step_is_close_to_float32(tmp_path, one_process):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(32, seed=2, longest=40)
    exact = cuda_engine(path)
    expected = ragged.values(exact.infer_batch(batch)["log_probs"])
    loss = exact.train_batch(batch, sft_loss)["loss"]
    exact.close()
    engine = cuda_engine(path, param_dtype="bfloat16", max_token_len_per_gpu=400)
    actual = ragged.values(engine.infer_batch(batch)["log_probs"])
    assert (actual - expected).abs().mean() < 0.05
    history = [engine.train_batch(batch, sft_loss) for _ in range(20)]
    assert history[0]["loss"] == pytest.approx(loss, rel=0.02)
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    assert {weight.dtype for weight in weights_of(engine).values()} == {torch.float32}  # the master weights
    engine.save_checkpoint(tmp_path / "checkpoint")
    after = engine.train_batch(batch, sft_loss)
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert engine.train_batch(batch, sft_loss)["loss"] == pytest.approx(after["loss"], rel=1e-3)
    engine.close()


def test_batch_on_any_device(tmp_path, one_process):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batch = make_batch(8, seed=5)
    engine = cuda_engine(path)
    expected = engine.infer_batch(batch)["log_probs"].unbind()
    actual = engine.infer_batch(batch.to("cuda"))["log_probs"].unbind()
    engine.close()
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_log_probs_on_cuda_equal_transformers(tmp_path, one_process):
    from transformers import AutoModelForCausalLM

    path = tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    batch = make_batch(9, seed=3)
    engine = cuda_engine(path)
    actual = engine.infer_batch(batch)["log_probs"].unbind()
    engine.close()
    with torch.no_grad():
        expected = plain_log_probs(AutoModelForCausalLM.from_pretrained(path), batch)
    for row, (log_probs, _) in zip(actual, expected, strict=True):
        torch.testing.assert_close(row, log_probs, rtol=1e-4, atol=1e-4)


def test_cpu_checkpoint_keeps_gpu_random_state(tmp_path, one_process):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    engine = build_engine(path)
    of_cpu = torch.get_rng_state()
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    engine = build_engine(path, device="cuda")
    torch.manual_seed(7)
    of_gpu = torch.cuda.get_rng_state()
    engine.load_checkpoint(tmp_path / "saved")
    engine.close()
    assert torch.equal(torch.get_rng_state(), of_cpu)
    assert torch.equal(torch.cuda.get_rng_state(), of_gpu)


def test_background_checkpoint_needs_no_gpu_memory(tmp_path, one_process):
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    engine = cuda_engine(path, checkpoint={"asynchronous": True})
    engine.train_batch(make_batch(8, seed=5), sft_loss)
    before = torch.cuda.memory_allocated()
    engine.save_checkpoint(tmp_path / "saved", hf_path=tmp_path / "hf")
    assert torch.cuda.memory_allocated() <= before
    engine.close()
