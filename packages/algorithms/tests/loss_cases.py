"""Random ragged batches for the tests of losses, and the plain loss of a batch."""

from dataclasses import dataclass

import torch
from tidemill_algorithms import ActorLoss, token_weights
from tidemill_dataproto import DataProto, ragged


@dataclass
class Output:
    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    topk_log_probs: torch.Tensor | None = None


@dataclass
class Counts:
    num_tokens: float
    num_sequences: float = 1.0


def make_batch(seed, num_rows=6, *, spread=0.3, dtype=torch.float32):
    """Rows of 0 to 5 tokens with masks; the first row is empty and the second has no trained token.

    Advantages are equal in a row, of either sign. Return the batch and the current log-probabilities.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (num_rows,), generator=generator)
    lengths[0] = 0
    size = int(lengths.sum())
    mask = ragged.ragged((torch.rand(size, generator=generator) > 0.3).to(dtype), lengths)
    ragged.values(mask)[: int(lengths[1])] = 0.0
    old = -3 * torch.rand(size, generator=generator, dtype=dtype) - 1
    log_probs = (old + spread * torch.randn(size, generator=generator, dtype=dtype)).clamp(max=-0.05)  # probabilities
    advantages = torch.randn(num_rows, generator=generator, dtype=dtype)
    rollout = old + 0.3 * torch.randn(size, generator=generator, dtype=dtype)
    columns = {
        "response_mask": mask,
        "old_log_probs": ragged.like(old, mask),
        "rollout_log_probs": ragged.like(rollout, mask),
        "ref_log_prob": ragged.like(rollout + 0.2, mask),
        "advantages": ragged.like(ragged.expand_rows(advantages, mask), mask),
        "topk_ids": ragged.like(torch.tensor([[3, 7]]).repeat(size, 1), mask),
        "teacher_topk_log_probs": ragged.like(torch.stack([rollout - 1.0, 2.0 * old], -1), mask),
    }
    uid = [f"problem {row // 2}" for row in range(num_rows)]
    batch = DataProto.from_dict(columns, {"uid": uid})
    return batch, ragged.like(log_probs, mask)


def weigh(batch, mode="token-mean", **options):
    """Add the column `loss_weights`."""
    options |= {"uid": batch.non_tensor_batch["uid"]} if mode == "prompt-mean" else {}
    options |= {"loss_scale_factor": 7.0} if mode == "seq-mean-token-sum-norm" else {}
    weights = token_weights(batch["response_mask"], mode, **options)
    return batch.union(DataProto.from_dict({"loss_weights": weights}))


def counts_of(batch):
    return Counts(max(1.0, float(ragged.values(batch["response_mask"]).sum())))


def topk_of(log_probs):
    """Return log-probabilities [N, 2] of two other ids that depend on those of the sampled tokens."""
    return torch.stack([log_probs - 1.0, 1.5 * log_probs - 0.5], -1)


def loss_and_gradient(loss: ActorLoss, batch, log_probs, counts, entropy=None):
    """Return the loss of a micro-batch, the gradient of each row, and the metrics."""
    leaf = ragged.values(log_probs).detach().clone().requires_grad_()
    flat_entropy = None if entropy is None else ragged.values(entropy)
    value, metrics = loss(Output(leaf, flat_entropy, topk_of(leaf)), batch, counts)
    value.backward()
    assert leaf.grad is not None
    rows = ragged.like(leaf.grad, log_probs).unbind()
    return value.item(), [row.tolist() for row in rows], {name: metric.item() for name, metric in metrics.items()}
