"""Weights that leave an engine, and checkpoints."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from tidemill_engines.base.lifecycle import ConfigT, EngineLifecycle
from tidemill_engines.checkpoint.folder import Progress, opened
from tidemill_engines.checkpoint.host_memory import copies_fit, gathered
from tidemill_engines.config import Dtype
from tidemill_engines.hf_weights.export import MAX_SHARD_SIZE, shard_bytes, start_export, write_weights
from tidemill_engines.hf_weights.shard import WeightShard
from tidemill_engines.location import absolute


class EnginePersistence(EngineLifecycle[ConfigT]):
    """The part of `BaseEngine` that exports weights and saves checkpoints."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Free the gradients, or zero the gradient buffers (Megatron)."""

    @abstractmethod
    def get_per_tensor_param(self, dtype: Dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights lazily by their Hugging Face names, in checkpoint order, tied weights once.

        Adapters are merged. The next weight is a collective with adapters and with Megatron, which all-gathers weights.

        Args:
            dtype: dtype that parameters are cast to; None is `EngineConfig.weight_dtype`. Buffers, such as biases of
                routers, keep theirs.

        Yields:
            Name and DTensor (or full tensor), detached and valid until the next step. `full_tensor()` of a DTensor is
            collective, so all ranks must take the same weights in the same order.
        """

    def get_per_tensor_shards(self) -> Iterator[tuple[str, torch.Tensor | WeightShard]]:
        """Yield this rank's parts of the weights by the names of `get_per_tensor_param`; nothing is all-gathered.

        A part is a DTensor, or a `WeightShard` where DTensors cannot describe it. Ranks may yield different names, and
        a name once for each part that the rank holds.

        Yields:
            Name and part, detached and valid until the next step.
        """
        return self.get_per_tensor_param()

    @property
    def streams_weights(self) -> bool:
        """Whether weights are yielded as copies (merged adapters, offloaded weights).

        Then release each weight before taking the next one; all of them together need the memory of a second model.
        """
        return False

    def get_adapter_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapter parameters as `get_per_tensor_param` does, by peft's names; nothing without adapters."""
        return iter(())

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapters to `path` in the format of peft. Collective.

        Raises:
            ValueError: the engine trains no adapter.
            OSError: a write failed; raised on every rank.
        """
        raise ValueError(f"{type(self).__name__} trains no adapter; save all weights with save_hf() instead of {path}")

    def save_hf(
        self, path: str | Path, dtype: Dtype | None = None, *, max_shard_size: int | str = MAX_SHARD_SIZE
    ) -> None:
        """Write the model to `path` (or a URL) in Hugging Face format, with its tokenizer files. Collective.

        Args:
            dtype: dtype of the weights, as in `get_per_tensor_param`.
            max_shard_size: maximum size of a safetensors file, and of its memory while it is written: bytes, or a text
                such as "5GB". Several files have an index.

        Raises:
            ValueError: `max_shard_size` is not a size.
            OSError: a write failed; raised on every rank.
        """
        where, max_shard_bytes, group = absolute(path), shard_bytes(max_shard_size), self.groups.control
        sizes_bytes = self._start_export(where, dtype)
        write_weights(self.get_per_tensor_param(dtype), sizes_bytes, where, group, max_shard_bytes=max_shard_bytes)

    def _start_export(self, path: str, dtype: Dtype | None) -> list[tuple[str, int]]:
        """Write the files of `save_hf` without the weights; return the names and sizes of these. Collective."""
        saved_as = self.engine_config.weight_dtype(self.model_config) if dtype is None else dtype
        start_export(path, self.export_config(), saved_as, Path(self.model_config.path), self.groups.control)
        return self._exported_bytes(dtype)

    def _export(self, path: str) -> Callable[[], None]:
        """Return the function that writes the files of `save_hf`, from copies if the first host has room. Collective.

        Without room they are written here, and the function does nothing.
        """
        sizes_bytes, group = self._start_export(path, None), self.groups.control
        held_bytes = sum(size for _, size in sizes_bytes) if dist.get_rank(group) == 0 else 0
        weights = self.get_per_tensor_param()
        if not (self.checkpoint_config.asynchronous and copies_fit(held_bytes, group)):
            write_weights(weights, sizes_bytes, path, group)
            return lambda: None
        held = gathered(weights, group)
        return lambda: write_weights(iter(held), sizes_bytes, path, self.groups.checkpoint)

    @abstractmethod
    def export_config(self) -> PretrainedConfig:
        """Return a copy of the model's Hugging Face configuration, for `save_hf`."""

    @abstractmethod
    def _exported_bytes(self, dtype: Dtype | None) -> list[tuple[str, int]]:
        """Return names and sizes of the weights that `get_per_tensor_param(dtype)` yields, in its order."""

    def save_checkpoint(self, path: str | Path, *, hf_path: str | Path | None = None) -> None:
        """Write weights, optimizer, schedule and random state to a new folder `path`, sharded. Collective.

        The folder appears under its name when it is complete, at once or in the background (`CheckpointConfig`).

        Args:
            path: a folder that all ranks share, or an fsspec URL, such as "s3://bucket/folder". Each rank writes its
                files for a URL to a temporary folder, and uploads them; `engine.json`, which is last, completes it.
            hf_path: a folder or URL outside of `path`; the model is written there, too, as `save_hf` does, and in the
                background like the checkpoint.

        Raises:
            ValueError: `hf_path` is `path` or within it.
            OSError: `path` exists or a write failed; raised on every rank. A partial folder is removed; a URL keeps
                the files that were uploaded.
        """
        if hf_path is not None and f"{absolute(hf_path)}/".startswith(f"{absolute(path)}/"):
            raise ValueError(f"hf_path must be outside of the new folder {path}, got {hf_path}; use a folder beside it")
        self._saver.finish()  # before its state is copied, so that at most one copy exists
        lora = self.model_config.lora
        progress = Progress(
            step=self.step,
            skipped_steps=self.skipped_steps,
            world_size=dist.get_world_size(),
            has_optimizer=self.optimizer_config is not None,
            lora_alpha=None if lora is None else lora.alpha,
        )
        group = self.groups.checkpoint
        with self._weights_onloaded(), self._offloader.onloaded("optimizer"):
            # All copies are complete before anything is written: beside a write they take several times as long.
            write_hf = None if hf_path is None else self._export(absolute(hf_path))
            parts = self._offloadable()
            num_bytes = sum(parts[kind].num_bytes() for kind in ("params", "optimizer"))
            in_background = self.checkpoint_config.asynchronous and copies_fit(num_bytes, self.groups.control)
            state = self._collect_state(copied=in_background)
            if not in_background:
                self._write_state(absolute(path), state, progress, group)
        if in_background:
            self._saver.start(lambda: self._write_state(absolute(path), state, progress, group))
        if write_hf is not None:
            self._saver.start(write_hf)

    @property
    def is_saving(self) -> bool:
        """Whether this rank writes in the background; `finish_checkpoint` then waits."""
        return self._saver.is_saving

    def finish_checkpoint(self) -> None:
        """Wait until what is saved in the background is complete.

        Raises:
            OSError: a write failed; raised on every rank.
        """
        self._saver.finish()

    def load_checkpoint(self, path: str | Path) -> None:
        """Restore the state of `save_checkpoint`, on any number of ranks in any layout. Collective.

        Gradients are freed. Random states are restored if the number of ranks is that of the save. Each host downloads
        all files of a URL to a temporary folder (TMPDIR), which needs room for them.

        Raises:
            FileNotFoundError: `path` contains no complete checkpoint.
            ValueError: the checkpoint is damaged, or of another format version or model, or its adapters have
                another alpha. Nothing has changed.
        """
        self._saver.finish()
        has_optimizer = self.optimizer_config is not None
        with (
            opened(absolute(path), self.groups.control, with_optimizer=has_optimizer) as (folder, progress),
            self._weights_onloaded(),
            self._offloader.onloaded("optimizer"),
        ):
            self._check_adapters(absolute(path), progress)
            self._load_state(folder, progress)
        self.step, self.skipped_steps = progress.step, progress.skipped_steps
        self.optimizer_zero_grad()

    def _check_adapters(self, path: str, progress: Progress) -> None:
        lora, saved = self.model_config.lora, progress.lora_alpha
        if lora is not None and saved not in (None, lora.alpha):
            raise ValueError(
                f"the adapters of {path} were trained with LoraConfig.alpha={saved}, and this engine has {lora.alpha}; "
                "use the same alpha, as the tensors do not contain it"
            )

    @abstractmethod
    def _collect_state(self, *, copied: bool) -> Any:
        """Return the state to save, as copies on the CPU if `copied`."""

    @abstractmethod
    def _write_state(self, path: str, state: Any, progress: Progress, group: dist.ProcessGroup) -> None:
        """Write what `_collect_state` returned; may run in another thread. Collective over `group`."""

    @abstractmethod
    def _load_state(self, path: Path, progress: Progress) -> None:
        """Restore weights, optimizer and random states."""
