"""CUDA only: the optimizer state is copied back while the device computes."""

import pytest
import torch
from engine_cases import VOCAB, build_engine, make_batch, policy_like_loss, weights_of
from tidemill_engines.offload import OffloadableTensors
from tidemill_testing import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_copies_and_computation_run_at_the_same_time():
    tensors = [torch.arange(5 << 20, device="cuda"), torch.ones(3, device="cuda")]
    expected = [tensor.cpu() for tensor in tensors]
    offloaded = OffloadableTensors(lambda: tensors)
    for _ in range(2):  # the second time with memory that the first one has used
        offloaded.offload()
        offloaded.prefetch()
        assert [tensor.untyped_storage().size() for tensor in tensors] == [0, 0]  # nothing keeps them on the device
        with offloaded.offloaded_later():
            offloaded.prefetch()
            torch.cuda._sleep(1 << 31)
            computed = torch.cuda.Event()
            computed.record()
            offloaded._stream.synchronize()
            assert not computed.query()
            assert offloaded.is_offloaded
            with offloaded.onloaded():
                assert not computed.query()
                for tensor, values in zip(tensors, expected, strict=True):
                    tensor.add_(1)
                    values.add_(1)
            assert not offloaded.is_offloaded
            for tensor, values in zip(tensors, expected, strict=True):
                assert torch.equal(tensor.cpu(), values)
        assert [tensor.untyped_storage().size() for tensor in tensors] == [0, 0]
    with offloaded.offloaded_later():
        offloaded.prefetch()  # and nothing uses them
    assert [tensor.untyped_storage().size() for tensor in tensors] == [0, 0]
    assert torch.equal(offloaded.read(tensors[0]).cpu(), expected[0])


def test_kept_optimizer_state_changes_no_result(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = tiny_model(tmp_path / "model", "qwen3", vocab_size=VOCAB)
    batches = [make_batch(8, seed=seed) for seed in range(4)]
    settings = {"device": "cuda", "optimizer": {"lr": 1e-3, "eps": 1e-3}, "max_token_len_per_gpu": 60}
    plain = build_engine(path, **settings)
    expected = [plain.train_batch(batch, policy_like_loss, calculate_entropy=True) for batch in batches]
    weights = weights_of(plain)
    plain.close()
    engine = build_engine(path, param_offload=True, grad_offload=True, optimizer_offload=True, **settings)
    sizes = []

    def state_bytes():
        values = [value for state in engine.optimizer.state.values() for value in state.values() if value.dim() > 0]
        return sum(value.to_local().untyped_storage().size() for value in values)

    def loss(output, micro_batch, normalizer):
        sizes.append(state_bytes())
        return policy_like_loss(output, micro_batch, normalizer)

    for first in (0, 2):
        with engine.offloaded_later("params", "optimizer"):
            for number in (first, first + 1):
                metrics = engine.train_batch(batches[number], loss, calculate_entropy=True)
                assert metrics == pytest.approx(expected[number], rel=1e-4, abs=1e-6)
                assert state_bytes() > 0
        assert state_bytes() == 0
    assert min(sizes) > 0
    for name, weight in weights_of(engine).items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)
    engine.close()
