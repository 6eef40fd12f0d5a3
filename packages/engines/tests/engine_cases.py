"""Batches, engines, and an independent reference in plain transformers and PyTorch, one unpadded row at a time."""

import json
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from tidemill_dataproto import DataProto, ragged

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Configuration of a tiny model of most families."""
IMAGE_TOKEN, VIDEO_TOKEN = 58, 59  # token ids of vision-language models


def make_batch(num_rows: int, *, seed: int = 0, temperature: float = 1.0, longest: int = 9) -> DataProto:
    """Create random rows of 1 to `longest` prompt and 0 to `longest` response tokens, with mask and advantages."""
    generator = torch.Generator().manual_seed(seed)

    def lengths(low: int) -> torch.Tensor:
        return torch.randint(low, longest + 1, (num_rows,), generator=generator)

    def tokens(counts: torch.Tensor) -> torch.Tensor:
        return ragged.ragged(torch.randint(3, VOCAB, (int(counts.sum()),), generator=generator), counts)

    prompts, responses = tokens(lengths(1)), tokens(lengths(0))
    size = ragged.values(responses).shape
    return DataProto.from_dict(
        {
            "input_ids": ragged.concat_rows(prompts, responses),
            "responses": responses,
            "response_mask": ragged.like(torch.rand(size, generator=generator) > 0.3, responses),
            "advantages": ragged.like(torch.randn(size, generator=generator), responses),
        },
        meta_info={"temperature": temperature},
    )


def pad_batch(batch: DataProto, *, prompt_width: int = 12, response_width: int = 11) -> DataProto:
    """Pad a batch like a rollout: prompts on the left, responses on the right, random tokens in the padding."""
    prompts, _ = ragged.split_rows(
        batch["input_ids"], ragged.lengths(batch["input_ids"]) - ragged.lengths(batch["responses"])
    )

    def left(column: torch.Tensor, filler: float) -> torch.Tensor:
        return ragged.to_padded(column, filler, side="left", max_len=prompt_width)

    def right(column: torch.Tensor, filler: float) -> torch.Tensor:
        return ragged.to_padded(column, filler, max_len=response_width)

    def ones(column: torch.Tensor) -> torch.Tensor:
        return ragged.like(torch.ones(len(ragged.values(column)), dtype=torch.int64), column)

    responses = right(batch["responses"], VOCAB + 5)
    columns = {
        "input_ids": torch.cat([left(prompts, VOCAB + 7), responses], 1),
        "attention_mask": torch.cat([left(ones(prompts), 0), right(ones(batch["responses"]), 0)], 1),
        "responses": responses,
        "response_mask": right(batch["response_mask"], True),
        "advantages": right(batch["advantages"], torch.nan),
        "per_row": torch.arange(float(len(batch))),
    }
    if "position_ids" in batch.batch.keys():  # noqa: SIM118 - a TensorDict
        positions, answers = ragged.split_rows(
            batch["position_ids"], ragged.lengths(batch["input_ids"]) - ragged.lengths(batch["responses"])
        )
        columns["position_ids"] = torch.cat([left(positions, 99), right(answers, 99)], 1)
    return DataProto.from_dict(columns, batch.non_tensor_batch, batch.meta_info)


def policy_like_loss(
    output: Any, micro_batch: DataProto, normalizer: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss with all kinds of terms and metrics: per token, per sequence, entropy, mean, maximum."""
    from tidemill_engines import Metric

    mask = ragged.values(micro_batch["response_mask"]).to(output.log_probs.dtype)
    pg = -(output.log_probs * ragged.values(micro_batch["advantages"]) * mask).sum() / normalizer.num_tokens
    column = micro_batch["responses"]
    counts = ragged.segment_sum(mask, column).clamp(min=1)
    nll = -(ragged.segment_sum(output.log_probs * mask, column) / counts).sum() / normalizer.num_sequences
    entropy = (output.entropy * mask).sum() / normalizer.num_tokens
    metrics = {
        "pg": pg,
        "nll": nll,
        "entropy": entropy,
        "log_prob": Metric.mean(output.log_probs, mask),
        "entropy_max": Metric.max(output.entropy, mask),
    }
    return pg + 0.3 * nll - 0.05 * entropy, metrics


def plain_log_probs(model: Any, batch: DataProto) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Compute log-probabilities and entropies of the response tokens with an unpadded forward per row."""
    out = []
    images = batch.non_tensor_batch.get("multi_modal_inputs", [None] * len(batch))
    for ids, response, entries in zip(batch["input_ids"].unbind(), batch["responses"].unbind(), images, strict=True):
        if entries:
            types = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
            entries = entries | {"mm_token_type_ids": types[None]}
        logits = model(input_ids=ids[None], **(entries or {})).logits[0] / batch.meta_info.get("temperature", 1.0)
        log_p = torch.log_softmax(logits, -1)[len(ids) - len(response) - 1 : -1][: len(response)]
        out.append((log_p.gather(-1, response[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
    return out


def plain_distributions(model: Any, batch: DataProto) -> list[torch.Tensor]:
    """Compute the log-probabilities [j, V] of all ids for each response token, with an unpadded forward per row."""
    rows = []
    for ids, response in zip(batch["input_ids"].unbind(), batch["responses"].unbind(), strict=True):
        logits = model(input_ids=ids[None]).logits[0] / batch.meta_info["temperature"]
        rows.append(logits.log_softmax(-1)[len(ids) - len(response) - 1 : -1][: len(response)])
    return rows


def plain_policy_like_loss(model: Any, batch: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute `policy_like_loss` over the whole batch, row by row."""
    masks = [mask.to(model.dtype) for mask in batch["response_mask"].unbind()]
    num_tokens = max(1.0, sum(mask.sum().item() for mask in masks))
    num_sequences = max(1, sum(bool(mask.any()) for mask in masks))
    pg = nll = entropy = torch.zeros((), dtype=model.dtype)
    seen: list[tuple[float, float]] = []
    rows = zip(plain_log_probs(model, batch), masks, batch["advantages"].unbind(), strict=True)
    for (log_probs, entropies), mask, advantages in rows:
        pg = pg - (log_probs * advantages * mask).sum() / num_tokens
        entropy = entropy + (entropies * mask).sum() / num_tokens
        if mask.any():
            nll = nll - (log_probs * mask).sum() / mask.sum() / num_sequences
        seen += [
            pair for pair, m in zip(zip(log_probs.tolist(), entropies.tolist(), strict=True), mask, strict=True) if m
        ]
    metrics = {
        "pg": pg.item(),
        "nll": nll.item(),
        "entropy": entropy.item(),
        "log_prob": sum(log_prob for log_prob, _ in seen) / max(1, len(seen)),
        "entropy_max": max((entropy for _, entropy in seen), default=0.0),
    }
    return pg + 0.3 * nll - 0.05 * entropy, metrics


def starcoder2_model(path: Path) -> Path:
    """Create a model as `tidemill_testing.tiny_model`, with sliding windows and biases.

    Nothing in it is computed in float32 if the weights are in float64.
    """
    import transformers

    config = transformers.Starcoder2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        sliding_window=4,
        attention_dropout=0.0,
        residual_dropout=0.0,
        embedding_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.Starcoder2ForCausalLM(config).save_pretrained(path)
    return path


def plain_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    attention = "eager" if dtype == torch.float32 else "sdpa"  # the softmax of eager is always float32
    sees_images = "vision_config" in json.loads((path / "config.json").read_text())
    cls = transformers.AutoModelForImageTextToText if sees_images else transformers.AutoModelForCausalLM
    return cls.from_pretrained(path, dtype=dtype, attn_implementation=attention)


OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "clip_grad": 0.5, "weight_decay": 0.1, "betas": (0.9, 0.95)}
SCHEDULE = {"lr": 1e-2, "lr_scheduler": "linear", "total_steps": 6, "lr_warmup_steps": 2}


def plain_training(
    path: Path,
    batches: list[DataProto],
    learning_rates: Sequence[float] = (),
    *,
    dtype: torch.dtype = torch.float32,
    adapter: Path | None = None,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train on the batches; return the metrics of each step and the weights by checkpoint name.

    With an `adapter`, a folder of peft, that is trained, and the weights are those with it merged.
    """
    model = plain_model(path, dtype)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    params = [param for param in model.train().parameters() if param.requires_grad]
    settings = {name: value for name, value in OPTIMIZER.items() if name != "clip_grad"}
    optimizer = torch.optim.AdamW(params, foreach=False, **settings)
    history = []
    for batch, lr in zip_longest(batches, learning_rates, fillvalue=OPTIMIZER["lr"]):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss, metrics = plain_policy_like_loss(model, batch)
        if loss.requires_grad:
            loss.backward()
        grads = [param.grad for param in params if param.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt() if grads else torch.zeros(())
        for grad in grads:  # torch's clip_grad_norm_ adds 1e-6 to the norm
            grad.mul_((OPTIMIZER["clip_grad"] / norm).clamp(max=1.0))
        optimizer.step()
        history.append({"loss": loss.item(), "grad_norm": norm.item()} | metrics)
    return history, checkpoint_weights(model if adapter is None else model.merge_and_unload())


def checkpoint_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights by checkpoint name, as `save_pretrained` writes them; of tied ones the first."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def build_engine(
    path: Path | str,
    *,
    backend: str = "fsdp2",
    model_type: str = "language_model",
    optimizer: bool | dict[str, Any] = True,
    model: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    **engine: Any,
):
    from tidemill_engines import CheckpointConfig, EngineRegistry, FSDP2Config, ModelConfig, OptimizerConfig
    from tidemill_engines.megatron.config import MegatronConfig

    config_class = MegatronConfig if backend == "megatron" else FSDP2Config
    settings = OPTIMIZER if optimizer is True else optimizer
    new = EngineRegistry.new(
        model_type=model_type,
        backend=backend,
        model=ModelConfig(path=str(path), **({} if model is None else model)),
        engine=config_class(**{"device": "cpu"} | engine),
        optimizer=OptimizerConfig(**settings) if settings else None,
        checkpoint=CheckpointConfig(**({} if checkpoint is None else checkpoint)),
    )
    new.initialize()
    return new


def shard(engine: Any, batch: DataProto) -> DataProto:
    """Return this rank's rows of a global batch."""
    return batch.chunk(engine.get_data_parallel_size(), allow_unequal=True)[engine.get_data_parallel_rank()]


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: full(weight).clone() for name, weight in engine.get_per_tensor_param()}


def full(weight: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def engine_training(path: Path, batches: list[DataProto], **settings: Any):
    """Run `plain_training` with an engine on this rank."""
    engine = build_engine(path, **settings)
    trained = trained_on(engine, batches)
    engine.close()
    return trained


def trained_on(engine: Any, batches: list[DataProto]):
    """Run `plain_training` with this rank's rows."""
    history = [engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True) for batch in batches]
    return history, weights_of(engine)


def train(engine: Any, seeds: list[int]) -> list[dict[str, float]]:
    """Run a step for each seed on batches of 9 rows; return their metrics."""
    return [
        engine.train_batch(shard(engine, make_batch(9, seed=seed)), policy_like_loss, calculate_entropy=True)
        for seed in seeds
    ]


def check_training(results: Any, expected: Any, case: Any, tolerance: float = 1e-5) -> None:
    """Check that every rank of `engine_training` has the metrics and weights of `plain_training`."""
    history, weights = expected
    for rank, (actual_history, actual_weights) in enumerate(results):
        for step, (actual, plain) in enumerate(zip(actual_history, history, strict=True)):
            for name, value in plain.items():
                error = abs(actual[name] - value)
                assert error <= tolerance * max(abs(value), 0.1), (case, rank, step, name, actual[name], value)
            assert actual["grad_nonfinite"] == 0
        assert actual_weights.keys() == weights.keys(), case
        for name, weight in weights.items():
            assert relative_error(actual_weights[name], weight) < tolerance, (case, rank, name)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
