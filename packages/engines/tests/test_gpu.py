"""What runs only on CUDA: the variable-length attention kernel and a bfloat16 training step."""

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, plain_log_probs, policy_like_loss, weights_of
from tidemill_dataproto import ragged
from tidemill_engines import EngineConfig, EngineRegistry, ModelConfig, OptimizerConfig, sft_loss
from tidemill_engines.attention import varlen_cuda, varlen_padded
from tidemill_engines.packing import PackedLayout
from tidemill_testing import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_kernel_equals_the_padded_path(window, kv_heads, dtype):
    device = torch.device("cuda")
    torch.manual_seed(0)
    lengths = torch.tensor([1, 300, 17, 128, 64, 511])
    total = int(lengths.sum())
    layout = PackedLayout.from_lengths(lengths, device)
    q = torch.randn(total, 8, 64, device=device)
    k, v = (torch.randn(total, kv_heads, 64, device=device) for _ in range(2))
    direction = torch.randn_like(q)

    def run(attention, of):
        inputs = [x.to(of).requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, layout, 0.1, window)
        return [out, *torch.autograd.grad((out * direction.to(of)).sum(), inputs)]

    exact = run(varlen_padded, torch.float32)
    kernel, padded = run(varlen_cuda, dtype), run(varlen_padded, dtype)
    for name, truth, actual, same_dtype in zip(("out", "dq", "dk", "dv"), exact, kernel, padded, strict=True):
        error = ((actual.float() - truth).norm() / truth.norm()).item()
        rounding = ((same_dtype.float() - truth).norm() / truth.norm()).item()
        assert error < max(2 * rounding, 1e-3), f"{name}: {error} against {rounding} of the padded path"


@pytest.fixture
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def cuda_engine(path, **engine):
    new = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model=ModelConfig(path=str(path)),
        engine=EngineConfig(device="cuda", **engine),
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-3),
    )
    new.initialize()
    return new


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


def test_bfloat16_step_learns_and_stays_near_float32(tmp_path, one_process):
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


def test_a_batch_may_be_on_any_device(tmp_path, one_process):
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
