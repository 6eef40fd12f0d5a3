"""Batches, engines, and an independent reference: plain transformers and plain PyTorch, one unpadded row at a time."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from tidemill_dataproto import DataProto, ragged

VOCAB = 61


def make_batch(num_rows: int, *, seed: int = 0, temperature: float = 1.0, longest: int = 9) -> DataProto:
    """Random rows of 1 to `longest` prompt and 0 to `longest` response tokens, a mask and per-token advantages."""
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


def policy_like_loss(
    output: Any, micro_batch: DataProto, normalizer: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Every kind of term at once: per token, per sequence (mean within rows), and entropy."""
    mask = ragged.values(micro_batch["response_mask"]).to(output.log_probs.dtype)
    pg = -(output.log_probs * ragged.values(micro_batch["advantages"]) * mask).sum() / normalizer.num_tokens
    column = micro_batch["responses"]
    counts = ragged.segment_sum(mask, column).clamp(min=1)
    nll = -(ragged.segment_sum(output.log_probs * mask, column) / counts).sum() / normalizer.num_sequences
    entropy = (output.entropy * mask).sum() / normalizer.num_tokens
    return pg + 0.3 * nll - 0.05 * entropy, {"pg": pg, "nll": nll, "entropy": entropy}


def plain_log_probs(model: Any, batch: DataProto) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per row: log-probabilities and entropies of the response tokens, from an unpadded forward of that row alone."""
    out = []
    for ids, response in zip(batch["input_ids"].unbind(), batch["responses"].unbind(), strict=True):
        logits = model(input_ids=ids[None]).logits[0] / batch.meta_info.get("temperature", 1.0)
        log_p = torch.log_softmax(logits.float(), -1)[len(ids) - len(response) - 1 : -1][: len(response)]
        out.append((log_p.gather(-1, response[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
    return out


def plain_policy_like_loss(model: Any, batch: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`policy_like_loss` over the whole batch, written row by row."""
    masks = [mask.float() for mask in batch["response_mask"].unbind()]
    num_tokens = max(1.0, sum(mask.sum().item() for mask in masks))
    num_sequences = max(1, sum(bool(mask.any()) for mask in masks))
    total = {"pg": torch.zeros(()), "nll": torch.zeros(()), "entropy": torch.zeros(())}
    rows = zip(plain_log_probs(model, batch), masks, batch["advantages"].unbind(), strict=True)
    for (log_probs, entropy), mask, advantages in rows:
        total["pg"] = total["pg"] - (log_probs * advantages * mask).sum() / num_tokens
        total["entropy"] = total["entropy"] + (entropy * mask).sum() / num_tokens
        if mask.any():
            total["nll"] = total["nll"] - (log_probs * mask).sum() / mask.sum() / num_sequences
    return total["pg"] + 0.3 * total["nll"] - 0.05 * total["entropy"], total


def plain_model(path: Path) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


OPTIMIZER = {"lr": 1e-2, "eps": 1e-3, "clip_grad": 0.5, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def plain_training(
    path: Path, batches: list[DataProto], learning_rates: Sequence[float] = ()
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Trains on the batches; returns the metrics of each step and the weights by checkpoint name."""
    model = plain_model(path).train()
    settings = {name: value for name, value in OPTIMIZER.items() if name != "clip_grad"}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **settings)
    history = []
    for batch, lr in zip_longest(batches, learning_rates, fillvalue=OPTIMIZER["lr"]):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss, metrics = plain_policy_like_loss(model, batch)
        if loss.requires_grad:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])
        optimizer.step()
        history.append({"loss": loss.item(), "grad_norm": norm.item()} | {k: v.item() for k, v in metrics.items()})
    return history, {name: weight.detach() for name, weight in model.named_parameters()}


def build_engine(
    path: Path, *, optimizer: bool | dict[str, Any] = True, model: dict[str, Any] | None = None, **engine: Any
):
    from tidemill_engines import EngineConfig, EngineRegistry, ModelConfig, OptimizerConfig

    settings = OPTIMIZER if optimizer is True else optimizer
    new = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model=ModelConfig(path=str(path), **({} if model is None else model)),
        engine=EngineConfig(device="cpu", **engine),
        optimizer=OptimizerConfig(**settings) if settings else None,
    )
    new.initialize()
    return new


def shard(engine: Any, batch: DataProto) -> DataProto:
    """This rank's rows of a global batch."""
    return batch.chunk(engine.get_data_parallel_size(), allow_unequal=True)[engine.get_data_parallel_rank()]


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: full(weight).clone() for name, weight in engine.get_per_tensor_param()}


def full(weight: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def engine_training(path: Path, batches: list[DataProto], **settings: Any):
    """As `plain_training`, with an engine on this rank."""
    engine = build_engine(path, **settings)
    history = [engine.train_batch(shard(engine, batch), policy_like_loss, calculate_entropy=True) for batch in batches]
    weights = weights_of(engine)
    engine.close()
    return history, weights


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
