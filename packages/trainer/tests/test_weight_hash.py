import torch
from tidemill_engines import WeightShard
from tidemill_trainer.weight_hash import weight_hash


def _weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(7, 5, generator=generator).to(dtype) for name in ("a", "b")}


def _hash(weights):
    return weight_hash(iter(weights.items()))


def test_equal_values_have_equal_hashes_whatever_their_strides():
    weights = _weights()
    transposed = {name: tensor.t().contiguous().t() for name, tensor in weights.items()}
    shards = {
        name: WeightShard(tensor=tensor, global_shape=(7, 5), start=(0, 0), replica=0, num_replicas=1)
        for name, tensor in weights.items()
    }
    assert _hash(weights) == _hash(transposed) == _hash(shards)


def test_each_changed_bit_name_shape_and_order_changes_the_hash():
    seen = {_hash({})}

    def is_new(weights):
        count = len(seen)
        seen.add(_hash(weights))
        return len(seen) > count

    weights = _weights()
    assert is_new(weights)
    for row in range(7):
        for bit in range(32):
            changed = {name: tensor.clone() for name, tensor in weights.items()}
            changed["b"].view(torch.int32)[row, row % 5] ^= -(2**31) if bit == 31 else 2**bit
            assert is_new(changed), (row, bit)
    assert is_new({"a": weights["b"], "b": weights["a"]})
    assert is_new({"a": weights["a"].flip(0), "b": weights["b"]})
    assert is_new({"a": weights["a"].view(5, 7), "b": weights["b"]})
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn):
        assert is_new(_weights(dtype))
