"""The batch container: dense, ragged and object columns of one batch."""

from tidemill_dataproto import balance, ragged
from tidemill_dataproto.balance import balance_rows, get_group_balanced_partitions, karmarkar_karp
from tidemill_dataproto.dynamic_batch import (
    count_micro_batches,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
)
from tidemill_dataproto.gather import all_gather
from tidemill_dataproto.items import DataProtoItem
from tidemill_dataproto.padding import pad_dataproto_to_divisor, unpad_dataproto
from tidemill_dataproto.proto import DataProto

__all__ = [
    "DataProto",
    "DataProtoItem",
    "all_gather",
    "balance",
    "balance_rows",
    "count_micro_batches",
    "get_group_balanced_partitions",
    "karmarkar_karp",
    "pad_dataproto_to_divisor",
    "prepare_dynamic_batch",
    "ragged",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
    "unpad_dataproto",
]
