"""The training worker: a Ray actor with one rank of the policy and of the models that share its processes."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property, reduce
from typing import Any

import torch
from tidemill_dataproto import DataProto
from tidemill_dispatch import Dispatch, register
from tidemill_weight_update import EngineClient, GroupLink, Transfer, WeightUpdater

from tidemill_trainer.algorithm import Algorithm
from tidemill_trainer.config import Config
from tidemill_trainer.float8_weights import float8_weights
from tidemill_trainer.plan.phases import kept_until_sent, role_sizes
from tidemill_trainer.policy_worker import PolicyWorker
from tidemill_trainer.role_worker import RoleWorker, prefixed
from tidemill_trainer.roles import has_adapter_reference
from tidemill_trainer.training_worker import compute


class ActorWorker(PolicyWorker, RoleWorker):
    """One rank of the policy and of the other roles.

    Args:
        config: configuration of the run.
        log_dir: folder for the log of this process.
    """

    def __init__(self, config: Config, log_dir: str) -> None:
        super().__init__(config, log_dir)
        self._has_adapter_reference = has_adapter_reference(config)
        self._loss = Algorithm.of(config).loss
        self._clients: Sequence[EngineClient] = ()
        self._updater: WeightUpdater | None = None
        self._transfer: Transfer | None = None
        self._until_sent = ExitStack()

    @register(compute, blocking=False)
    def infer(self, batch: DataProto) -> DataProto:
        """Compute what the update requires from each model here, ragged like `responses`.

        Returns:
            `old_log_probs` and `entropy` of the policy unless `meta_info["infers_policy"]` is False, `ref_log_prob` of
            the reference, and the columns of `RoleWorker.infer` of the other roles. With router replay, also
            `routed_experts` int32 [B, j, layers, top_k], the experts that were used for each token of `input_ids`:
            those of the same column of `batch`, or the choice of the router if there is none or its value is -1.
        """
        parts = []
        if batch.meta_info.get("infers_policy", True):
            parts.append(self._engine.infer_batch(batch, entropy=True).rename("log_probs", "old_log_probs"))
        if self._has_adapter_reference:
            with self._engine.disable_adapter():
                parts.append(self._engine.infer_batch(batch).rename("log_probs", "ref_log_prob"))
        return reduce(DataProto.union, [*parts, *self._infer_roles(batch)])

    @register(compute, blocking=False)
    def update_actor(self, batch: DataProto) -> dict[str, float]:
        """Make one optimizer step of the policy.

        Returns:
            Metrics of the global batch and the engine's `performance()`, equal on all ranks.
        """
        self._offload_later()
        metrics = self._engine.train_batch(batch, self._loss, calculate_entropy=self._loss.entropy_coeff != 0.0)
        return prefixed("actor", metrics) | self._engine.performance()

    @register(compute, blocking=False)
    def update_on_policy(self, batch: DataProto) -> DataProto:
        """Make the only optimizer step of a batch that these weights have sampled.

        Returns:
            `old_log_probs` and `entropy` before the step, ragged like `responses`, and in `meta_info["actor_metrics"]`
            what `update_actor` returns.
        """
        self._offload_later()
        metrics, outputs = self._engine.train_batch_with_outputs(batch, self._loss, calculate_entropy=True)
        outputs = outputs.select(["log_probs", "entropy"]).rename("log_probs", "old_log_probs")
        outputs.meta_info["actor_metrics"] = prefixed("actor", metrics) | self._engine.performance()
        return outputs

    @register(Dispatch.ONE_TO_ALL)
    def connect_engines(self, engines: Sequence[EngineClient], link_host: str | None) -> None:
        """Create the weight updater for these engines; a second call replaces it.

        Args:
            engines: clients of the engines.
            link_host: address of the node of rank 0, if engines or ranks are on other nodes; None: all are on one.
        """
        if self._updater is not None:
            self._updater.close()
        self._transfer = None
        self._clients = engines
        update = self._config.weight_update
        rollout = self._config.rollout
        dtype: torch.dtype | None = getattr(torch, rollout.dtype)
        if rollout.quantization or self._config.engine.weight_dtype(self._config.model) == rollout.dtype:
            dtype = None  # scales of blocks and the bias of DeepSeek's routers are float32, and must not be cast
        device = "cpu" if update.memory == "cpu" else None
        self._updater = WeightUpdater(
            engines,
            bucket_bytes=update.bucket_bytes,
            dtype=dtype,
            device=device,
            link=None if link_host is None else GroupLink(host=link_host),
            in_flight="wait" if rollout.recompute_kv_cache else "in_place",  # the latter flushes no cache
            timeout_s=update.timeout_s / 3,  # time out on an engine that hangs before calls to the others time out
        )

    @register(Dispatch.ONE_TO_ALL)
    def update_weights(self, weight_version: int | str, only: Sequence[int] | None = None) -> dict[str, float]:
        """Send the weights of the policy to engines; then offload them, if they are to be offloaded after a step.

        Args:
            weight_version: version that the engines report afterwards.
            only: numbers of the engines to update; None: all.

        Returns:
            `weight_update/*` metrics of this rank; `weight_update/offload_s` is the time after the update.

        Raises:
            RuntimeError: an engine was not updated; the run requires all of them.
        """
        assert self._updater is not None, "call connect_engines() first"
        if self._transfer is None:
            self._transfer = self._updater.declare(self._weights())
        with self._until_sent.pop_all():
            if only is None:
                stats = self._transfer.send(weight_version)
            else:
                stats = self._transfer.readmit([self._clients[number] for number in only], weight_version)
            sent_at = time.monotonic()
        if torch.cuda.is_initialized():  # else the policy is on a CPU
            torch.cuda.synchronize()  # in turns, the memory is required next
        if stats.quarantined:
            reasons = "; ".join(f"{engine}: {reason}" for engine, reason in stats.quarantined.items())
            raise RuntimeError(
                f"expected all engines to have weight version {stats.weight_version}, but {len(stats.quarantined)} "
                f"failed: {reasons}; see the rollout logs in the folder of the run"
            )
        metrics = {
            "weight_update/seconds": stats.seconds,
            "weight_update/bytes": float(stats.num_bytes),
            "weight_update/gb_per_s": stats.gb_per_s,
            "weight_update/verified": float(stats.verified),
            "weight_update/offload_s": time.monotonic() - sent_at,
        }
        if stats.weight_version.isdecimal():  # reported by every engine after the update
            metrics["weight_update/version"] = float(stats.weight_version)
        return metrics

    def _offload_later(self) -> None:
        """Keep what is offloaded after a step on the device until the weights are sent, if it has room there."""
        self._until_sent.enter_context(self._engine.offloaded_later(*self._kept))

    @cached_property
    def _kept(self) -> list[str]:
        config, device_bytes = self._config, None
        if not (config.engine.param_offload or config.engine.optimizer_offload):
            return []
        if config.engine.device != "cpu" and torch.cuda.is_available():
            device_bytes = torch.cuda.mem_get_info()[1]
        kinds = {"weights": "params", "optimizer": "optimizer"}
        return [kinds[kept] for kept in kept_until_sent(config, role_sizes(config), device_bytes)]

    def _weights(self) -> Iterable[tuple[str, Any]] | Callable[[], Iterable[tuple[str, Any]]]:
        """Return the weights that stay in memory, or a function that makes copies one after the other."""
        shards = self._engine.get_per_tensor_shards
        if self._config.rollout.quantization == "fp8":
            return lambda: float8_weights(shards(), self._config.weight_update.bucket_bytes)
        return shards if self._engine.streams_weights else shards()
