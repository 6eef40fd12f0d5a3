"""The batch container: dense, ragged and object columns of one batch."""

from tidemill_dataproto import balance, ragged
from tidemill_dataproto.balance import (
    balance_rows,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    rearrange_micro_batches,
    restore_dynamic_batch,
)
from tidemill_dataproto.proto import DataProto

__all__ = [
    "DataProto",
    "balance",
    "balance_rows",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
    "ragged",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
]
