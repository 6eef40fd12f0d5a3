"""Training of MoE models with Megatron, which runs on ranks, and the same with transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tidemill_dataproto import DataProto, ragged

LAYERS, EXPERTS, TOP_K = 4, 4, 2
NUM_ROWS = 7
COEFFICIENT = 0.3


def batches() -> list[DataProto]:
    """One batch whose experts are given, except for some tokens, and one routed by the routers."""
    from engine_cases import make_batch

    given = make_batch(NUM_ROWS, seed=1, temperature=0.8)
    generator = torch.Generator().manual_seed(2)
    size = (len(ragged.values(given["input_ids"])), LAYERS)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(size[0] * size[1])])
    experts = experts.view(*size, TOP_K).masked_fill(torch.rand(*size, 1, generator=generator) < 0.2, -1)
    given.batch["routed_experts"] = ragged.like(experts, given["input_ids"])
    return [given, make_batch(NUM_ROWS, seed=3)]


def train(cases: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return, on each rank, the result of `_train` for every (folder, configuration)."""
    return [_train(folder, settings) for folder, settings in cases]


def _train(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    from engine_cases import shard
    from tidemill_engines import sft_loss

    settings = dict(settings)
    engine = build(folder, settings, **settings.pop("model", {}))
    own = [shard(engine, batch) for batch in batches()]
    recorded = engine.infer_batch(own[1])["routed_experts"]
    metrics = [engine.train_batch(batch, sft_loss) for batch in own]
    result = {
        "rank": engine.get_data_parallel_rank(),
        "lengths": (ragged.lengths(recorded), ragged.lengths(own[1]["input_ids"])),
        "recorded": ragged.values(recorded),
        "metrics": metrics,
        "weights": {name: weight.cpu() for name, weight in engine.get_per_tensor_param()},
    }
    engine.close()
    return result


def build(folder: str, settings: dict[str, Any], **model: Any) -> Any:
    from engine_cases import build_engine

    model = {"router_aux_loss_coef": COEFFICIENT} | model
    return build_engine(folder, backend="megatron", model=model, **{"router_replay": True} | settings)


def errors_of(folder: str, configs: Sequence[dict[str, Any]], experts: dict[str, torch.Tensor]) -> list[str]:
    """Return an engine's errors for each configuration, then for each column of routed experts [N, ...] of a batch.

    The column "lengths" gets rows of other lengths.
    """
    from engine_cases import shard

    messages = []
    for settings in map(dict, configs):
        try:
            build(folder, settings, **settings.pop("model", {})).close()
        except ValueError as error:
            messages.append(str(error))
    engine = build(folder, {}) if experts else None
    batch = batches()[1]
    for name, values in experts.items():
        lengths = ragged.lengths(batch["input_ids"])
        column = ragged.ragged(values, lengths.flip(0) if name == "lengths" else lengths)
        batch.batch["routed_experts"] = column
        try:
            engine.infer_batch(shard(engine, batch))
        except ValueError as error:
            messages.append(str(error))
    if engine is not None:
        engine.close()
    return messages


class GivenRouter(torch.nn.Module):
    """A router of transformers that uses given experts [n, K] where they are not -1."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight, self.top_k, self.normalizes = router.weight, router.top_k, router.norm_topk_prob
        self.given: torch.Tensor | None = None
        self.result: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden_states.reshape(-1, self.weight.shape[1]) @ self.weight.T
        probabilities = logits.softmax(-1)
        experts = probabilities.topk(self.top_k, -1).indices
        if self.given is not None:
            experts = experts.where(self.given < 0, self.given)
        self.result = probabilities, experts
        values = probabilities.gather(-1, experts)
        if self.normalizes:
            values = values / values.sum(-1, keepdim=True)
        return logits, values, experts


def plain_training(path: Path) -> dict[str, Any]:
    """The same steps as `_train`, with transformers, row by row."""
    from engine_cases import OPTIMIZER, checkpoint_weights, plain_model

    model = plain_model(path).train()
    routers = []
    for layer in model.model.layers:
        layer.mlp.gate = GivenRouter(layer.mlp.gate)
        routers.append(layer.mlp.gate)
    settings = {name: value for name, value in OPTIMIZER.items() if name != "clip_grad"}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **settings)
    with torch.no_grad():
        recorded = [_row(model, routers, row)[2] for row in _rows(batches()[1])]
    metrics = []
    for batch in batches():
        rows = [_row(model, routers, row) for row in _rows(batch)]
        masks = [mask.float() for mask in batch["response_mask"].unbind()]
        trained = [bool(mask.any()) for mask in masks]
        nll = -sum((row[0] * mask).sum() for row, mask in zip(rows, masks, strict=True)) / sum(m.sum() for m in masks)
        balance = sum(row[1] for row, is_trained in zip(rows, trained, strict=True) if is_trained) / sum(trained)
        loss = nll + COEFFICIENT * balance
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])
        optimizer.step()
        counts = torch.nn.functional.one_hot(torch.cat([row[2] for row in rows]), EXPERTS).sum((0, 2)).float()
        metrics.append(
            {
                "loss": loss.item(),
                "router_loss": balance.item(),
                "grad_norm": norm.item(),
                "expert_load/max": (counts / counts.mean(-1, keepdim=True)).max().item(),
                "expert_load/idle": (counts == 0).float().mean().item(),
            }
        )
    return {"recorded": recorded, "metrics": metrics, "weights": checkpoint_weights(model)}


def _rows(batch: DataProto) -> list[tuple[Any, ...]]:
    given = batch["routed_experts"].unbind() if "routed_experts" in batch.batch else [None] * len(batch)
    temperature = batch.meta_info.get("temperature", 1.0)
    return [
        (*row, temperature) for row in zip(batch["input_ids"].unbind(), batch["responses"].unbind(), given, strict=True)
    ]


def _row(model: Any, routers: list[GivenRouter], row: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of the response, the balance loss, and the experts [T, L, K]."""
    ids, response, given, temperature = row
    for number, router in enumerate(routers):
        router.given = None if given is None else given[:, number]
    logits = model(input_ids=ids[None]).logits[0] / temperature
    log_p = torch.log_softmax(logits, -1)[len(ids) - len(response) - 1 : -1][: len(response)]
    probabilities = torch.stack([router.result[0] for router in routers])  # type: ignore[index]
    experts = torch.stack([router.result[1] for router in routers])  # type: ignore[index]
    sent = torch.nn.functional.one_hot(experts, EXPERTS).sum(2).float().mean((0, 1))
    balance = EXPERTS * (sent * probabilities.mean((0, 1))).sum()
    return log_p.gather(-1, response[:, None])[:, 0], balance, experts.transpose(0, 1)
