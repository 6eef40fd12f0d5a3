"""Random ragged batches for comparisons with references."""

import numpy as np
import torch
from hypothesis import strategies as st
from tidemill_dataproto import DataProto, ragged


def random_batch(seed: int, num_rows: int, *, num_rewards: int = 2) -> DataProto:
    """Make rows of 0 to 12 tokens with masked runs, empty rows, groups of one and episodes with several rows."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 13, size=num_rows)
    total = int(lengths.sum())
    episode = rng.integers(max(1, 2 * num_rows // 3), size=num_rows)
    problem = rng.integers(max(1, num_rows // 4), size=num_rows)[episode]  # the same in all rows of an episode
    mask = ragged.ragged(torch.from_numpy((rng.random(total) < rng.choice([0.3, 0.7, 1.0])).astype(np.int64)), lengths)
    levels = rng.choice([0.0, 0.1, 0.5, 1.0], size=(num_rows, num_rewards + 2)).astype(np.float32)[episode]

    def per_token_values() -> torch.Tensor:
        return ragged.like(torch.from_numpy(rng.normal(size=total).astype(np.float32)), mask)

    columns = {
        "response_mask": mask,
        "rewards": torch.from_numpy(levels[:, 0]),
        "baseline_rewards": torch.from_numpy(levels[:, 1]),
        "reward_components": torch.from_numpy(levels[:, 2:]),
        "episode": torch.from_numpy(episode),
        "values": per_token_values(),
        "old_log_probs": per_token_values(),
        "ref_log_prob": per_token_values(),
        "teacher_log_prob": per_token_values(),
    }
    return DataProto.from_dict(columns, {"uid": np.array([f"problem {number}" for number in problem], dtype=object)})


seeds, row_counts = st.integers(0, 2**31), st.integers(1, 24)
