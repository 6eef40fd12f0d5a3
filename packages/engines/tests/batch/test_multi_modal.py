"""Vision-language models: rows with and without images against plain transformers, one row at a time."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from engine_cases import (
    IMAGE_TOKEN,
    SIZES,
    VIDEO_TOKEN,
    VOCAB,
    build_engine,
    check_training,
    engine_training,
    pad_batch,
    plain_log_probs,
    plain_model,
    plain_training,
    policy_like_loss,
    shard,
)
from tidemill_dataproto import DataProto, ragged
from tidemill_engines.config import LoraConfig
from tidemill_engines.throughput import training_flops
from tidemill_testing import run_ranks, tiny_model

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
START, END, PATCH = 56, 57, 24  # tokens around an image; elements of a patch


def vision_model(path, family):
    """Create a tiny random model, with image features at the first layer if the family has them."""
    import transformers

    config_cls, model_cls, vision = {
        "qwen2_vl": (
            transformers.Qwen2VLConfig,
            transformers.Qwen2VLForConditionalGeneration,
            {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        ),
        "qwen2_5_vl": (
            transformers.Qwen2_5_VLConfig,
            transformers.Qwen2_5_VLForConditionalGeneration,
            {
                "hidden_size": 16,
                "intermediate_size": 32,
                "out_hidden_size": 32,
                "window_size": 8,
                "fullatt_block_indexes": [1],
            },
        ),
        "qwen3_vl": (
            transformers.Qwen3VLConfig,
            transformers.Qwen3VLForConditionalGeneration,
            {
                "hidden_size": 16,
                "intermediate_size": 32,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        ),
    }[family]
    text = SIZES | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        "pad_token_id": None,
    }
    vision |= {"depth": 2, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = config_cls(
        text_config=text | ({"head_dim": 8} if family == "qwen3_vl" else {}),
        vision_config=vision | {"in_channels": 3, "initializer_range": 0.1},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=family != "qwen2_vl",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_cls(config).save_pretrained(path)
    return path


def vision_batch(images, *, seed=0, temperature=1.0, frames_apart=False):
    """A row for each element: the [t, h, w] of its images, a video if t is above 1, among random tokens.

    With `frames_apart`, other tokens separate the frames of a video, as in Qwen3-VL, which inserts a timestamp before
    each frame.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(low, high):
        count = int(torch.randint(low, high + 1, (), generator=generator))
        return torch.randint(3, START, (count,), generator=generator)

    prompts, responses, column = [], [], []
    for grids in images:
        parts, entries = [tokens(1, 4)], {}
        for grid in grids:
            kind, token = ("image", IMAGE_TOKEN) if grid[0] == 1 else ("video", VIDEO_TOKEN)
            pixels = {"image": "pixel_values", "video": "pixel_values_videos"}[kind]
            size = grid[0] * grid[1] * grid[2]
            pieces = grid[0] if frames_apart else 1
            for _ in range(pieces):
                parts += [torch.tensor([START] + [token] * (size // 4 // pieces) + [END]), tokens(0, 3)]
            entries.setdefault(pixels, []).append(torch.randn(size, PATCH, generator=generator))
            entries.setdefault(f"{kind}_grid_thw", []).append(torch.tensor([grid]))
        prompts.append(torch.cat(parts))
        responses.append(tokens(0, 6))
        column.append({name: torch.cat(values) for name, values in entries.items()} or None)
    answers = ragged.ragged_from_list(responses)
    size = ragged.values(answers).shape
    multi_modal_inputs = np.empty(len(column), dtype=object)
    multi_modal_inputs[:] = column
    return DataProto.from_dict(
        {
            "input_ids": ragged.concat_rows(ragged.ragged_from_list(prompts), answers),
            "responses": answers,
            "response_mask": ragged.like(torch.rand(size, generator=generator) > 0.3, answers),
            "advantages": ragged.like(torch.randn(size, generator=generator), answers),
        },
        {"multi_modal_inputs": multi_modal_inputs},
        meta_info={"temperature": temperature},
    )


SMALL, WIDE, TALL = (1, 2, 2), (1, 4, 6), (1, 8, 4)
BATCHES = [
    vision_batch([[WIDE], [], [SMALL, TALL], [], [TALL], [SMALL]], seed=1, temperature=0.8),
    vision_batch([[], [], [], [WIDE, WIDE]], seed=2),  # the first rank has no image
    vision_batch([[], [], []], seed=3),  # no rank has an image
]
LAYOUTS = [
    {},
    {"micro_batch_size_per_gpu": 1, "reshard_after_forward": False},
    {"max_token_len_per_gpu": 45, "model": {"gradient_checkpointing": True}},
    {"ulysses_sequence_parallel_size": 2, "max_token_len_per_gpu": 25},
    {"model": {"attn_implementation": "sdpa"}},
]


def run_layouts(path, batches, layouts):
    """Train in float64: in float32, the weights after three steps differ by up to 7e-6 from rounding alone."""
    doubles = {"param_dtype": "float64", "reduce_dtype": "float64"}
    return [
        engine_training(path, batches, **layout | doubles | {"model": layout.get("model", {}) | {"dtype": "float64"}})
        for layout in layouts
    ]


def check_layouts(path, family, layouts, world_size):
    vision_model(path, family)
    expected = plain_training(path, BATCHES, dtype=torch.float64)
    results = run_ranks(run_layouts, world_size, path, BATCHES, layouts)
    for number, layout in enumerate(layouts):
        check_training([of_rank[number] for of_rank in results], expected, (family, layout), tolerance=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_transformers_in_any_layout(tmp_path, family):
    check_layouts(tmp_path / "model", family, LAYOUTS, world_size=2)


FOUR_RANKS = [
    {"fsdp_size": 2},
    {"ulysses_sequence_parallel_size": 4},
    {
        "fsdp_size": 2,
        "ulysses_sequence_parallel_size": 2,
        "reshard_after_forward": False,
        "micro_batch_size_per_gpu": 2,
    },
    {"model": {"gradient_checkpointing": True, "recompute": "selective"}},
    {"param_offload": True, "grad_offload": True, "optimizer_offload": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_training_on_four_ranks(tmp_path, family):
    check_layouts(tmp_path / "model", family, FOUR_RANKS, world_size=4)


CLIP, SHORT_CLIP = (3, 4, 4), (2, 2, 4)


def run_videos(path, batches):
    return engine_training(path, batches, max_token_len_per_gpu=45)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_on_images_and_videos_equals_a_plain_loop(tmp_path, family):
    """Each rank computes the layers of images and videos, even if its rows have none."""
    path = vision_model(tmp_path / "model", family)
    batches = [
        vision_batch([[SMALL], [SMALL, WIDE], [CLIP], [SHORT_CLIP, SHORT_CLIP]], seed=4, frames_apart="3" in family),
        vision_batch([[], [SHORT_CLIP, SMALL]], seed=5, frames_apart="3" in family),
    ]
    if family == "qwen2_5_vl":
        batches[1].non_tensor_batch["multi_modal_inputs"][1]["second_per_grid_ts"] = torch.tensor([3.0])
    results = run_ranks(run_videos, 2, path, batches)
    check_training(results, plain_training(path, batches), family)


def with_positions(batch, change=0):
    """Add the column `position_ids`; `change` spreads time, height and width of each row."""
    lengths = ragged.lengths(batch["input_ids"])
    counts = torch.cat([torch.arange(n) for n in lengths.tolist()])
    positions = torch.stack([counts, counts + change * (counts % 3), counts + change * (counts % 2)], 1)
    out = batch.clone()
    out.batch["position_ids"] = ragged.like(positions, batch["input_ids"])
    return out


def plain_columns(model, batch):
    """Compute log-probabilities and entropies with the positions of the column."""

    class AtPositions:
        rows = iter(batch["position_ids"].unbind())

        def __call__(self, *, input_ids, **images):
            return model(input_ids=input_ids, position_ids=next(self.rows).T.unsqueeze(1), **images)

    return [torch.cat(column) for column in zip(*plain_log_probs(AtPositions(), batch), strict=True)]


def run_inference(path, batch, output):
    engine = build_engine(path, max_token_len_per_gpu=45)
    own = shard(engine, batch)
    out = [engine.infer_batch(form, entropy=True) for form in (own, pad_batch(own, prompt_width=60))]
    engine.save_hf(output)
    engine.save_hf(f"{output} in bfloat16", dtype="bfloat16")
    engine.close()
    return [column[name] for column in out for name in ("log_probs", "entropy")]


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_with_position_ids_or_padding_and_exports_equal_the_plain_model(tmp_path, family):
    path = vision_model(tmp_path / "model", family)
    (path / "preprocessor_config.json").write_text("{}")
    batch = with_positions(BATCHES[0], change=2)
    model = plain_model(path)
    with torch.no_grad():
        expected = plain_columns(model, batch)
    results = run_ranks(run_inference, 2, path, batch, tmp_path / "saved")
    for number, column in enumerate(expected):
        actual = torch.cat([ragged.values(of_rank[number]) for of_rank in results])
        torch.testing.assert_close(actual, column, rtol=1e-5, atol=1e-5)
    columns = [torch.cat([of_rank[number] for of_rank in results]) for number in (2, 3)]
    mask = pad_batch(batch, prompt_width=60)["attention_mask"][:, 60:].bool()
    for column, expected_column in zip(columns, expected, strict=True):
        torch.testing.assert_close(column[mask], expected_column, rtol=1e-5, atol=1e-5)
    assert (tmp_path / "saved" / "preprocessor_config.json").exists()
    saved = plain_model(tmp_path / "saved").state_dict()
    assert saved.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(saved[name], weight), name
    config = json.loads((tmp_path / "saved in bfloat16" / "config.json").read_text())
    assert {part["dtype"] for part in (config, config["text_config"], config["vision_config"])} == {"bfloat16"}
    assert "tidemill" not in json.dumps(config)


def test_flops_count_decoder_only(tmp_path):
    model = plain_model(vision_model(tmp_path / "model", "qwen2_vl"))
    flops = training_flops(model, [10, 20], num_outputs=5)
    del model.model.visual
    assert training_flops(model, [10, 20], num_outputs=5) == flops


def run_adapters(path, batches, targets):
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=targets)
    engine = build_engine(path, model={"lora": lora})
    engine.save_adapter(path / "adapter")
    engine.close()
    return engine_training(path, batches, model={"lora": lora}, max_token_len_per_gpu=45)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("targets", [("q_proj", "qkv"), ("all-linear",)], ids=str)
def test_adapters_on_vision_language_model(tmp_path, targets):
    path = vision_model(tmp_path / "model", "qwen2_vl")
    results = run_ranks(run_adapters, 2, path, BATCHES, targets)
    check_training(results, plain_training(path, BATCHES, adapter=path / "adapter"), "adapters")


def run_frozen(path, batches):
    trained = engine_training(path, batches, model={"frozen": ("model.visual.*",)}, max_token_len_per_gpu=45)
    return trained, engine_training(path, [])[1]


def test_frozen_vision_tower_keeps_its_weights(tmp_path):
    path = vision_model(tmp_path / "model", "qwen3_vl")
    for (history, weights), before in run_ranks(run_frozen, 2, path, BATCHES[:2]):
        assert all(metrics["grad_norm"] > 0 for metrics in history)
        changed = {name for name, weight in weights.items() if not torch.equal(weight, before[name])}
        assert changed == {name for name in weights if ".visual." not in name}


def with_entries(batch, row, **entries):
    """Replace entries of `multi_modal_inputs` in a row."""
    out = batch.clone()
    column = out.non_tensor_batch["multi_modal_inputs"]
    column[row] = (column[row] or {}) | entries
    return out


def with_column(batch, name, values):
    out = batch.clone()
    out.batch[name] = values
    return out


def run_refused(path, text_path):
    batch, ragged_ones = BATCHES[0], torch.ones(len(ragged.values(BATCHES[0]["input_ids"])), 3)
    images = batch.non_tensor_batch["multi_modal_inputs"]
    pixels = images[0]["pixel_values"]
    refused = [
        (with_entries(batch, 1, **images[0]), "row 1 of input_ids has the image token 58 0 times, but .* 6 tokens"),
        (with_entries(batch, 0, pixel_values=None, image_grid_thw=None), "row 0 of input_ids has .* 6 times"),
        (with_entries(batch, 0, pixel_values=None), "row 0 must have both pixel_values and image_grid_thw"),
        (with_entries(batch, 0, pixel_values=pixels[1:]), r"of row 0: pixel_values must be .*\(24, 24\) .*\(23, 24\)"),
        (with_entries(batch, 0, image_grid_thw=torch.tensor([[1, 3, 8]])), "must be multiples of 2"),
        (with_entries(batch, 0, image_grid_thw=torch.tensor([1, 4, 6])), r"must be integers >= 1 of shape \[n, 3\]"),
        (with_entries(batch, 0, pixel_values=pixels.numpy()), "pixel_values must be a tensor, got a ndarray"),
        (with_entries(batch, 0, input_ids=pixels), "row 0 has 'input_ids'; remove it. Supported: pixel_values,"),
        (with_column(batch, "position_ids", ragged.like(ragged_ones, batch["input_ids"])), "must be integers"),
        (with_column(batch, "position_ids", torch.ones(6, 9).long()), r"must be integers \[B, j, 3\]"),
    ]
    engine = build_engine(path)
    for bad, message in refused:
        rows = bad if engine.get_data_parallel_rank() == 0 else bad[0:0]
        with pytest.raises((ValueError, TypeError), match=message):
            engine.infer_batch(rows)
        with pytest.raises((ValueError, TypeError), match=message):
            engine.train_batch(rows, policy_like_loss)
    assert len(engine.infer_batch(batch)) == len(batch)  # still works
    engine.close()
    text_engine = build_engine(text_path)
    with pytest.raises(ValueError, match="row 0 has multi_modal_inputs, but the model supports text only"):
        text_engine.infer_batch(batch)
    text_engine.close()
    return True


def test_invalid_images_are_rejected_on_every_rank(tmp_path):
    text_path = tiny_model(tmp_path / "text", "qwen3", vocab_size=VOCAB)
    path = vision_model(tmp_path / "model", "qwen2_vl")
    assert run_ranks(run_refused, 2, path, text_path) == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_images_on_cuda(tmp_path, monkeypatch, family):
    """Compare float32 with the CPU, and bfloat16 with varlen kernels with float32."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = vision_model(tmp_path / "model", family)
    batch = vision_batch([[WIDE], [], [SMALL, TALL], [], [TALL], [SMALL]], seed=1)
    seen = []
    for settings in ({}, {"device": "cuda"}, {"device": "cuda", "param_dtype": "bfloat16"}):
        engine = build_engine(path, max_token_len_per_gpu=45, **settings)
        log_probs = ragged.values(engine.infer_batch(batch)["log_probs"])
        metrics = engine.train_batch(batch, policy_like_loss, calculate_entropy=True)
        seen.append((log_probs, metrics["loss"], metrics["grad_norm"]))
        engine.close()
    (expected, *numbers), (in_float32, *on_cuda), (in_bfloat16, *rounded) = seen
    torch.testing.assert_close(in_float32, expected, rtol=1e-4, atol=1e-4)
    assert on_cuda == pytest.approx(numbers, rel=1e-4)
    assert (in_bfloat16 - expected).abs().mean() < 0.05
    assert rounded == pytest.approx(numbers, rel=0.1)
