"""Micro-batches by default, for models with the dimensions of Qwen3 and the GPUs of one node."""

import json

import pytest
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import read_config
from tidemill_trainer.plan.micro_batches import with_micro_batches

GIB = 2**30
TOKENS, RESHARD = "engine.max_token_len_per_gpu", "engine.reshard_after_forward"
SIZES = {  # hidden, inner, layers, heads, whether the head is tied
    "0.6B": (1024, 3072, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
}


@pytest.fixture
def config(tmp_path):
    def make(model, *overrides, num_gpus=1):
        hidden, inner, layers, heads, is_tied = SIZES[model]
        fields = {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "tie_word_embeddings": is_tied,
        }
        (tmp_path / "config.json").write_text(json.dumps(fields))
        (tmp_path / "run.toml").write_text(f'[model]\npath = "{tmp_path}"\n')
        turns = ["placement.engines=turns", f"actor.num_workers={num_gpus}", f"rollout.num_engines={num_gpus}"]
        return read_config(Config, tmp_path / "run.toml", [*turns, *overrides], has_gpu=True)

    return make


def chosen(config, gib, num_gpus=1, given=()):
    engine = with_micro_batches(config, given, num_gpus, gib * GIB).engine
    return engine.max_token_len_per_gpu, engine.reshard_after_forward


@pytest.mark.parametrize(
    ("model", "num_gpus", "gib", "expected"),
    [
        ("0.6B", 1, 79.1, (32768, False)),
        ("0.6B", 1, 139.8, (65536, False)),
        ("0.6B", 2, 79.1, (32768, False)),
        ("4B", 1, 79.1, (8192, True)),
        ("4B", 1, 139.8, (16384, False)),
        ("4B", 4, 139.8, (16384, False)),
        ("4B", 8, 79.1, (8192, True)),
        ("8B", 2, 79.1, (4096, True)),
        ("8B", 8, 79.1, (8192, True)),
        ("8B", 8, 139.8, (16384, True)),
    ],
)
def test_micro_batches_fit_beside_the_state_of_the_model(config, model, num_gpus, gib, expected):
    assert chosen(config(model, num_gpus=num_gpus), gib, num_gpus) == expected


def test_given_keys_are_kept(config):
    given = config("4B", "engine.max_token_len_per_gpu=9000", num_gpus=4)
    assert chosen(given, 139.8, 4, [TOKENS]) == (9000, False)
    assert chosen(config("4B", num_gpus=4), 139.8, 4, [RESHARD]) == (16384, True)
    assert chosen(given, 139.8, 4, [TOKENS, RESHARD]) == (9000, True)


def test_rows_of_the_maximum_length_have_room(config):
    long = ["data.max_prompt_length=2000", "rollout.response_length=8000"]
    assert chosen(config("4B", *long), 79.1) == (16384, True)  # 8,192 tokens would fit
    assert chosen(config("0.6B", *long), 79.1) == (32768, False)


def test_configuration_is_unchanged_if_nothing_fits_or_the_model_is_missing(config, tmp_path):
    assert chosen(config("8B"), 79.1) == (16384, True)
    made = config("8B")
    (tmp_path / "config.json").unlink()
    assert chosen(made, 139.8) == (16384, True)


def test_megatron_has_no_gathered_weights_to_keep(config):
    made = config("4B", "engine.backend=megatron", "engine.tp=2", num_gpus=4)
    engine = with_micro_batches(made, (), 4, 139.8 * GIB).engine
    assert engine.max_token_len_per_gpu == 32768  # of which each rank keeps half


@pytest.mark.parametrize(
    ("model", "num_gpus", "gib", "overrides", "expected"),
    [
        ("0.6B", 1, 139.8, [], (False, 0.75)),  # 6.7 GiB of state
        ("0.6B", 1, 79.1, [], (False, 0.71)),
        ("4B", 1, 139.8, [], (True, 0.8)),  # 45 GiB: with it, gathered weights would not fit
        ("4B", 4, 139.8, [], (False, 0.71)),
        ("0.6B", 1, 79.1, ["rollout.response_length=2048"], (True, 0.8)),  # a KV pool of 119 GiB would hold all rows
        ("0.6B", 1, 139.8, ["rollout.response_length=2048"], (True, 0.8)),
        ("0.6B", 1, 139.8, ["rollout.mem_fraction_static=0.7"], (True, 0.7)),
        ("0.6B", 1, 139.8, ['rollout.engine_args={"mem_fraction_static"=0.7}'], (True, 0.8)),
        ("0.6B", 1, 139.8, ["placement.offload=true"], (True, 0.8)),
        ("0.6B", 2, 139.8, ["placement.engines=separate"], (True, 0.8)),
    ],
)
def test_state_stays_on_the_gpu_in_turns_if_the_pool_still_holds_all_episodes(
    config, model, num_gpus, gib, overrides, expected
):
    lengths = ["data.train_batch_size=64", "rollout.n=8", "data.max_prompt_length=128", "rollout.response_length=512"]
    made = config(model, *lengths, *overrides, num_gpus=num_gpus)
    given = [override.split("=")[0] for override in overrides]
    found = with_micro_batches(made, given, num_gpus, gib * GIB)
    assert (found.placement.offload, found.rollout.mem_fraction_static) == expected
    assert chosen(found, gib, num_gpus, ["placement.offload"]) == chosen(made, gib, num_gpus, ["placement.offload"])
