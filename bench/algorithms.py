"""Times of advantages, token weights and losses for a batch of 1,024 x 8,192 tokens on two CPU threads.

    python bench/algorithms.py            two minutes, 3 GiB of memory
    python bench/algorithms.py --tiny     seconds; checks that the benchmark runs, the times mean nothing

"full": 1,024 rows of 8,192 trained tokens. "turns": 2,048 rows of 1 to 8,192 tokens, about as many in total, of which
runs of 64 are masked with probability 0.2, like the observations of an agent. Prints the median milliseconds of a call,
and the median CPU time of both threads, which depends less on other processes. A loss is timed as an `ActorLoss`, with
its metrics, and again with its backward pass; the token weights are computed before it. It is called once for the whole
batch, and once for each of 32 micro-batches of about 262,144 tokens, as engines do, whose logits for the whole batch
would not fit into memory. The aim is an estimator and a loss together below 150 ms.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, get_args

import numpy as np
import torch
from tidemill_algorithms import ADV_ESTIMATORS, POLICY_LOSSES, ActorLoss, token_rewards, token_weights
from tidemill_algorithms.aggregation import AggMode
from tidemill_dataproto import DataProto, ragged

THREADS = 2
TOP_K = 8
NUM_MICRO_BATCHES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    topk_log_probs: torch.Tensor | None = None


Parts: TypeAlias = list[tuple[DataProto, Outputs]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    num_tokens: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    is_tiny = parser.parse_args().tiny
    rows, width, turns = (64, 16, 2) if is_tiny else (1024, 8192, 5)
    torch.set_num_threads(THREADS)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, {THREADS} threads, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    rng = np.random.default_rng(0)
    full = make_batch(rng, np.full(rows, width), masked_share=0.0)
    multi_turn = make_batch(rng, rng.integers(1, width + 1, size=2 * rows), masked_share=0.2)
    for name, batch in {"full": full, "turns": multi_turn}.items():
        tokens = ragged.values(batch["response_mask"])
        print(f"\n{name}: {len(batch)} rows, {len(tokens)} tokens, {int(tokens.sum())} trained")
        time_estimators(batch, turns)
        time_losses(batch, turns)


def make_batch(rng: np.random.Generator, lengths: np.ndarray, *, masked_share: float) -> DataProto:
    rows, total = len(lengths), int(lengths.sum())
    is_trained = np.repeat(rng.random(total // 64 + 1) >= masked_share, 64)[:total]
    mask = ragged.ragged(torch.from_numpy(is_trained.astype(np.int64)), torch.from_numpy(lengths))

    def per_token(scale: float) -> torch.Tensor:
        return ragged.like(torch.from_numpy(rng.normal(scale=scale, size=total).astype(np.float32)), mask)

    columns = {
        "response_mask": mask,
        "rewards": torch.from_numpy(rng.integers(2, size=rows).astype(np.float32)),
        "reward_components": torch.from_numpy(rng.random((rows, 2)).astype(np.float32)),
        "baseline_rewards": torch.zeros(rows),
        "values": per_token(0.1),
        "old_log_probs": per_token(1.0),
        "ref_log_prob": per_token(1.0),
        "teacher_log_prob": per_token(1.0),
        "teacher_topk_log_probs": ragged.like(draw_topk(total), mask),
        "advantages": per_token(1.0),
    }
    return DataProto.from_dict(columns, {"uid": np.array([f"{row // 8}" for row in range(rows)], dtype=object)})


def draw_topk(num_tokens: int) -> torch.Tensor:
    """Draw log-probabilities [N, TOP_K] that leave a part of the probability to other ids."""
    return torch.randn(num_tokens, TOP_K + 1).log_softmax(-1)[:, :TOP_K].contiguous()


def time_estimators(batch: DataProto, turns: int) -> None:
    print(f"{'estimator':44} {'ms':>9} {'CPU ms':>9}")
    for name, estimator in ADV_ESTIMATORS.items():
        measure(name, lambda estimator=estimator: estimator(batch), turns)
    measure("gae, gamma 0.99, lam 0.95", lambda: ADV_ESTIMATORS["gae"](batch, gamma=0.99, lam=0.95), turns)
    measure("token_rewards, kl_coef 0.1", lambda: token_rewards(batch, kl_coef=0.1), turns)


def time_losses(batch: DataProto, turns: int) -> None:
    mask = batch["response_mask"]
    print("aggregation")
    for mode in get_args(AggMode):
        options = {"uid": batch["uid"]} if mode == "prompt-mean" else {}
        options |= {"loss_scale_factor": 8192.0} if mode == "seq-mean-token-sum-norm" else {}
        measure(mode, lambda mode=mode, options=options: token_weights(mask, mode, **options), turns)
    batch = batch.union(DataProto.from_dict({"loss_weights": token_weights(mask, "token-mean")}))
    counts = Counts(num_tokens=float(ragged.values(mask).sum()))
    for num_parts in (1, NUM_MICRO_BATCHES):
        parts = [(part, draw_outputs(part)) for part in batch.chunk(num_parts)]
        print("loss, of the whole batch" if num_parts == 1 else f"loss, of {num_parts} micro-batches")
        for name in POLICY_LOSSES:
            loss_fn = ActorLoss(policy_loss=name)

            def forward(loss_fn: ActorLoss = loss_fn, parts: Parts = parts) -> None:
                with torch.no_grad():
                    for part, output in parts:
                        loss_fn(output_for(loss_fn, output), part, counts)

            def backward(loss_fn: ActorLoss = loss_fn, parts: Parts = parts) -> None:
                for part, output in parts:
                    for tensor in (output.log_probs, output.topk_log_probs):
                        if tensor is not None:
                            tensor.grad = None
                    loss_fn(output_for(loss_fn, output), part, counts)[0].backward()

            measure(name, forward, turns)
            measure(f"{name} and backward", backward, turns)


def draw_outputs(batch: DataProto) -> Outputs:
    old = ragged.values(batch["old_log_probs"])
    log_probs = old + 0.1 * torch.randn(len(old))
    return Outputs(log_probs=log_probs.requires_grad_(), topk_log_probs=draw_topk(len(old)).requires_grad_())


def output_for(loss_fn: ActorLoss, output: Outputs) -> Outputs:
    return output if loss_fn.policy_loss == "forward_kl_topk" else Outputs(log_probs=output.log_probs)


def measure(name: str, call: Callable[[], object], turns: int) -> None:
    """Print the median times of a call, after one that is not timed; its result is freed before the next one."""
    call()
    times = []
    for _ in range(turns):
        start, cpu_start = time.perf_counter(), time.process_time()
        result = call()
        times.append((time.perf_counter() - start, time.process_time() - cpu_start))
        del result
    wall_ms, cpu_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    print(f"{name:44} {wall_ms:9.0f} {cpu_ms:9.0f}")


if __name__ == "__main__":
    main()
