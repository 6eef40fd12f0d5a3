"""Weights in float8 for the engines; that engines load and use them was checked on a GPU (bench/results)."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tidemill_dataproto import DataProto, ragged
from tidemill_engines import EngineRegistry, MegatronConfig, ModelConfig
from tidemill_testing import run_ranks, tiny_model
from tidemill_trainer.bench.decode import decode_bytes
from tidemill_trainer.bench.shapes import SHAPES
from tidemill_trainer.cli import BENCH_CONFIG
from tidemill_trainer.config_file import ConfigError, load_config
from tidemill_trainer.evaluate import evaluation_config
from tidemill_trainer.float8_weights import float8_weights
from tidemill_trainer.mismatch import MismatchError, MismatchGate
from tidemill_trainer.plan.model import count_model
from tidemill_trainer.plan.phases import engine_weight_bytes
from tidemill_trainer.rollout.worker import engine_arguments
from tidemill_weight_update import LocalShard
from tidemill_weight_update.fp8 import BlockFp8
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

QUANTIZED = "rollout.quantization=fp8"


def model_weights():
    generator = torch.Generator().manual_seed(0)
    names = ["embed_tokens.weight"]
    names += [f"layers.{layer}.{part}" for layer in range(3) for part in ("q_proj.weight", "norm.weight")]
    names += ["layers.3.down_proj.weight", "lm_head.weight"]
    return [(name, torch.randn(192, 320, generator=generator)) for name in names]


@pytest.mark.parametrize("group_bytes", [1, 4 * 192 * 320 * 2, 2**30])
def test_groups_of_any_size_give_the_same_tensors_in_order(group_bytes):
    found = list(float8_weights(model_weights(), group_bytes))
    expected = BlockFp8(model_weights()).quantize()
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [name for name, tensor in found if tensor.dtype == torch.float8_e4m3fn] == [
        *(f"layers.{layer}.q_proj.weight" for layer in range(3)),
        "layers.3.down_proj.weight",
    ]
    for (name, mine), (_, whole) in zip(found, expected, strict=True):
        assert torch.equal(mine.view(torch.uint8), whole.view(torch.uint8)), name


def experts():
    generator = torch.Generator().manual_seed(1)
    return [(f"experts.{number}.up_proj.weight", torch.randn(128, 320, generator=generator)) for number in range(3)]


def parts_of_a_rank():
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    mine = experts()[:2] if rank == 0 else experts()[2:]
    weights = [(name, LocalShard(tensor=each, global_shape=(128, 320), start=(0, 0))) for name, each in mine]
    for name, weight in model_weights():
        weights.append((name, distribute_tensor(weight, mesh, [Shard(0)])))
    found = list(float8_weights(weights, 4 * 192 * 320 * 3))
    parts = [(name, part.to_local() if isinstance(part, DTensor) else part.tensor) for name, part in found]
    return {name: part.contiguous().view(torch.uint8).numpy() for name, part in parts}


def test_ranks_that_share_blocks_and_have_different_experts_give_the_tensors_of_one_rank():
    ranks = run_ranks(parts_of_a_rank, 2)  # 96 of 192 rows each, so both have rows of the first blocks
    assert len(ranks[0]) == len(ranks[1]) + 2  # the weights and scales of one more expert
    for name, whole in BlockFp8(experts() + model_weights()).quantize():
        mine = np.concatenate([rank[name] for rank in ranks if name in rank])
        assert np.array_equal(mine, whole.view(torch.uint8).numpy()), name


def parts_of_megatron(path):
    layout = MegatronConfig(device="cpu", tensor_model_parallel_size=2, param_offload=True)
    model = ModelConfig(path=path)
    engine = EngineRegistry.new(model_type="language_model", backend="megatron", model=model, engine=layout)
    engine.initialize()
    weights = float8_weights(engine.get_per_tensor_shards(), 1 << 20)
    return [(name, part.tensor.view(torch.uint8).numpy(), part.global_shape, part.start) for name, part in weights]


def test_parts_of_megatron_are_those_of_whole_matrices(tmp_path):
    sizes = {"hidden_size": 128, "head_dim": 128, "num_attention_heads": 4, "intermediate_size": 256}
    path = tiny_model(tmp_path / "model", num_key_value_heads=2, **sizes)
    expected = dict(BlockFp8(load_file(path / "model.safetensors").items()).quantize())
    missing = {name: torch.ones(whole.shape) for name, whole in expected.items()}
    for name, values, shape, start in itertools.chain(*run_ranks(parts_of_megatron, 2, str(path))):
        whole = expected[name]
        assert shape == tuple(whole.shape)
        size = (*values.shape[:-1], values.shape[-1] // whole.element_size())
        region = tuple(slice(at, at + count) for at, count in zip(start, size, strict=True))
        assert np.array_equal(values, whole[region].contiguous().view(torch.uint8).numpy()), name
        missing[name][region] = 0
    assert not any(each.any() for each in missing.values())


def test_engine_starts_with_random_float8_parameters():
    config = load_config(BENCH_CONFIG, [QUANTIZED, "rollout.device=cuda"])
    arguments = engine_arguments(config.rollout, config.model)
    assert arguments["quantization"] == "fp8"
    assert arguments["load_format"] == "dummy"
    assert json.loads(arguments["json_model_override_args"])["quantization_config"]["weight_block_size"] == [128, 128]
    given = json.dumps({"rope_theta": 5e6})
    rollout = replace(config.rollout, engine_args={"json_model_override_args": given})
    overrides = json.loads(engine_arguments(rollout, config.model)["json_model_override_args"])
    assert set(overrides) == {"rope_theta", "quantization_config"}


@pytest.mark.parametrize(
    ("given", "page_size"),
    [({}, None), ({"kv_cache_dtype": "fp8_e4m3"}, 64), ({"kv_cache_dtype": "fp8_e4m3", "page_size": 128}, 128)],
)
def test_float8_cache_has_pages_of_several_tokens(given, page_size):
    config = load_config(BENCH_CONFIG, ["rollout.device=cuda"])
    arguments = engine_arguments(replace(config.rollout, engine_args=given), config.model)
    assert arguments.get("page_size") == page_size


def test_evaluation_has_the_weights_of_the_checkpoint(tmp_path):
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n[data]\nval_files = ["v.jsonl"]\n')
    config, _ = evaluation_config(tmp_path / "run.toml", [QUANTIZED])
    assert config.rollout.quantization is None


def test_log_probs_may_differ_more_than_in_bfloat16():
    def batch(difference):
        columns = {"rollout_log_probs": -2 - difference, "old_log_probs": -2.0, "response_mask": 1.0}
        return DataProto.from_dict(
            {name: ragged.ragged(torch.full((4,), value), torch.tensor([4])) for name, value in columns.items()}
        )

    staleness = torch.zeros(4, dtype=torch.int64)
    MismatchGate(None, ("fp8", "bfloat16")).check(batch(0.19), staleness)
    for dtypes, difference in ((("fp8", "bfloat16"), 0.21), (("bfloat16", "bfloat16"), 0.19)):
        with pytest.raises(MismatchError):
            MismatchGate(None, dtypes).check(batch(difference), staleness)


def test_layers_of_an_engine_take_a_byte_per_parameter(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"]))
    sizes = count_model(ModelConfig(path=str(tmp_path)))
    embedding = 151_936 * 4096  # the head has as many parameters
    layers = sizes.total - 2 * embedding
    expected = 2 * 2 * embedding + layers
    assert engine_weight_bytes(load_config(BENCH_CONFIG, [QUANTIZED]), sizes) == pytest.approx(expected, rel=1e-5)
    assert engine_weight_bytes(load_config(BENCH_CONFIG), sizes) == 2 * sizes.total
    line = {"prompt_length/mean": 0, "response_length/mean": 1, "response_length/max": 1, "response_length/std": 0}
    cache = 2 * 36 * 8 * 128 * 2
    read = decode_bytes(load_config(BENCH_CONFIG, [QUANTIZED]), sizes, line, 1)
    assert read == pytest.approx(2 * embedding + layers + cache, rel=1e-5)  # the embedding is not read as a whole


@pytest.mark.parametrize("override", ["rollout.dtype=float32", "rollout.device=cpu"])
def test_float8_without_bfloat16_or_gpus_is_refused(override):
    with pytest.raises(ConfigError, match=r'requires rollout.dtype="bfloat16" and GPUs, got'):
        load_config(BENCH_CONFIG, [QUANTIZED, override])
