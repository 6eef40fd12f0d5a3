"""Balance: rows into parts of nearly equal work, and micro-batches under a token cap."""

from tidemill_dataproto.micro_batches import (
    count_micro_batches,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
)
from tidemill_dataproto.partition import (
    balance_rows,
    get_group_balanced_partitions,
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
    quadratic_workload,
)

__all__ = [
    "balance_rows",
    "count_micro_batches",
    "get_group_balanced_partitions",
    "get_seqlen_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
    "prepare_dynamic_batch",
    "quadratic_workload",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
]
