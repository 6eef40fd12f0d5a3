"""The measured trainers: the engine of a case, or a plain loop."""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from tidemill_dataproto import DataProto
from tidemill_engines import EngineRegistry, FSDP2Config, MegatronConfig, ModelConfig, OptimizerConfig, sft_loss

from engine.case import Case
from engine.shapes import MODELS

OPTIMIZER: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}
MAX_GRAD_NORM = 1.0


class Subject(Protocol):
    """A trainer of one part of a batch.

    Attributes:
        part: index of the part.
        num_parts: number of parts.
        expert_load: tokens of the busiest expert of a MoE model in the last step, relative to an equal share; None if
            unknown.
    """

    part: int
    num_parts: int
    expert_load: float | None

    def train(self, batch: DataProto) -> float:
        """Run one optimizer step; return the mean loss per token."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


def write_config(model: str, folder: str) -> Path:
    """Create a folder with the `config.json` of a model in `MODELS`, without weights."""
    path = Path(folder, model)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[model]))
    return path


class EngineSubject:
    """An engine of this project."""

    def __init__(self, case: Case, path: Path, device: torch.device) -> None:
        words = case.words
        self._engine = EngineRegistry.new(
            model_type="language_model",
            backend=case.backend,
            model=ModelConfig(
                path=str(path),
                init_seed=1,
                dtype="bfloat16" if "bf16" in words else "float32",
                gradient_checkpointing="ckpt" in words or "selective" in words,
                recompute="selective" if "selective" in words else "full",
                compile_layers="compile" in words,
            ),
            engine=_engine_config(case, device),
            optimizer=OptimizerConfig(**OPTIMIZER, clip_grad=MAX_GRAD_NORM),
        )
        self._engine.initialize()
        self.part = self._engine.get_data_parallel_rank()
        self.num_parts = self._engine.get_data_parallel_size()
        self.expert_load: float | None = None

    def train(self, batch: DataProto) -> float:
        metrics = self._engine.train_batch(batch, sft_loss)
        self.expert_load = metrics.get("expert_load/max")
        return metrics["loss"]

    def close(self) -> None:
        self._engine.close()


def _engine_config(case: Case, device: torch.device) -> Any:
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    offload: dict[str, Any] = dict.fromkeys(
        ("param_offload", "grad_offload", "optimizer_offload"), "offload" in case.words
    )
    if case.backend == "fsdp2":
        return FSDP2Config(
            device=device.type,  # type: ignore[arg-type]
            param_dtype=dtype,
            reshard_after_forward="zero2" not in case.words,
            max_token_len_per_gpu=case.micro_tokens,
            **offload,
        )
    dispatcher: Any = next((word for word in ("allgather", "alltoall") if word in case.words), "auto")
    return MegatronConfig(
        device=device.type,  # type: ignore[arg-type]
        param_dtype=dtype,
        transformer_impl="transformer_engine" if "te" in case.words else "local" if "local" in case.words else "auto",
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        num_layers_in_last_pipeline_stage=case.last or None,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=1 if case.ep > 1 else None,
        moe_token_dispatcher_type=dispatcher,
        sequence_parallel=case.tp > 1,
        overlap_grad_reduce="overlap" in case.words,
        overlap_param_gather="overlap" in case.words,
        router_replay="balanced" in case.words,
        max_token_len_per_gpu=case.micro_tokens,
        **offload,
    )


class PlainLoop:
    """A plain loop: transformers under autocast, with rows padded to the longest of a micro-batch.

    Padding is on the right, which causal attention excludes, so SDPA uses its fastest kernel, without a mask. With
    bfloat16 master weights there is no autocast.
    """

    part, num_parts = 0, 1
    expert_load: float | None = None

    def __init__(self, case: Case, path: Path, device: torch.device) -> None:
        import transformers

        self._device = device
        self._micro_tokens = case.micro_tokens
        self._is_sorted = "sorted" in case.words
        dtype = torch.bfloat16 if "bf16" in case.words else torch.float32
        self._autocast = dtype == torch.float32 and device.type == "cuda"
        config = transformers.AutoConfig.from_pretrained(path)
        torch.manual_seed(1)
        with device:
            self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        self._model.config.use_cache = False
        self._model.train()
        if "ckpt" in case.words:
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if "compile" in case.words:
            for layer in self._model.model.layers:
                layer.compile(dynamic=True)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **OPTIMIZER, fused=True)

    def train(self, batch: DataProto) -> float:
        rows = list(zip(batch["input_ids"].unbind(), batch["responses"].unbind(), strict=True))
        num_tokens = sum(len(response) for _, response in rows)
        total = torch.zeros((), device=self._device)
        self._optimizer.zero_grad(set_to_none=True)
        for micro_batch in self._micro_batches(rows):
            loss = self._loss(micro_batch) / num_tokens
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total.item()

    def _micro_batches(self, rows: list[Any]) -> list[list[Any]]:
        if self._is_sorted:
            rows = sorted(rows, key=lambda row: len(row[0]))
        runs: list[list[Any]] = []
        longest = 0
        for row in rows:
            longest = max(longest, len(row[0]))
            if not runs or (len(runs[-1]) + 1) * longest > self._micro_tokens:
                runs.append([])
                longest = len(row[0])
            runs[-1].append(row)
        return runs

    def _loss(self, rows: list[Any]) -> torch.Tensor:
        length = max(len(tokens) for tokens, _ in rows)
        input_ids = torch.zeros(len(rows), length, dtype=torch.int64)
        labels = torch.full((len(rows), length), -100)
        for number, (tokens, response) in enumerate(rows):
            input_ids[number, : len(tokens)] = tokens
            labels[number, len(tokens) - len(response) : len(tokens)] = response
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            logits = self._model(input_ids=input_ids.to(self._device)).logits
        flat = logits[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(flat, labels[:, 1:].flatten().to(self._device), reduction="sum")

    def close(self) -> None:
        del self._model, self._optimizer


def make_subject(case: Case, path: Path, device: torch.device) -> Subject:
    return PlainLoop(case, path, device) if "plain" in case.words else EngineSubject(case, path, device)
