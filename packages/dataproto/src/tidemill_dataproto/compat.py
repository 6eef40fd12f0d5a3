"""Names of verl for code that moves to tidemill-dataproto. The README lists what is same, renamed, and different.

Everything here is a short call of the package's own API; new code uses that API directly.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tidemill_dataproto.balance import karmarkar_karp
from tidemill_dataproto.gather import all_gather
from tidemill_dataproto.items import DataProtoItem
from tidemill_dataproto.merging import MergeRule
from tidemill_dataproto.proto import DataProto

__all__ = [
    "all_gather_data_proto",
    "collate_fn",
    "concat",
    "fold_batch_dim",
    "get_seqlen_balanced_partitions",
    "list_of_dict_to_dict_of_list",
    "merge_metrics",
    "unfold_batch_dim",
]


def concat(
    data: Sequence[DataProto], fill: Mapping[str, Any] | None = None, merge: Mapping[str, MergeRule] | None = None
) -> DataProto:
    """Concatenate with verl's rule for `meta_info["metrics"]`: one dict of lists, see `merge_metrics`.

    A part whose "metrics" is None is skipped; without any metrics, the key is absent. Arguments and errors are those
    of `DataProto.concat`.
    """
    joined = DataProto.concat(data, fill, {"metrics": merge_metrics, **({} if merge is None else merge)})
    if joined.meta_info.get("metrics") == {}:
        del joined.meta_info["metrics"]
    return joined


def merge_metrics(values: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]] | None]) -> dict[str, list[Any]]:
    """Merge the metrics of several parts, dicts or lists of dicts, into one dict of lists. A rule for `concat(merge=)`.

    Raises:
        ValueError: two dicts have different keys; the error lists them.
    """
    dicts: list[Mapping[str, Any]] = []
    for value in values:
        if value is not None:
            dicts += [value] if isinstance(value, Mapping) else list(value)
    return list_of_dict_to_dict_of_list(dicts)


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows into columns.

    Raises:
        ValueError: two dicts have different keys; the error lists them.
    """
    first = list_of_dict[0] if list_of_dict else {}
    for number, row in enumerate(list_of_dict):
        if row.keys() != first.keys():
            raise ValueError(
                f"expected the keys {sorted(first)} of dict 0 in all dicts, got {sorted(row)} in dict {number}; report "
                f"the same metrics on all ranks"
            )
    return {key: [row[key] for row in list_of_dict] for key in first}


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Make a batch of items, tensors stacked; `DataProto.from_items` also makes ragged columns."""
    dense = [name for name, value in x[0].batch.items() if value.dim() > 0] if len(x) > 0 else []
    return DataProto.from_items(x, dense)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Make `new_batch_size` rows of equally many neighbouring rows each; `data.fold(group_size)`.

    Raises:
        ValueError: the rows do not divide.
    """
    if new_batch_size < 1 or len(data) % new_batch_size != 0:
        raise ValueError(f"expected a new_batch_size that divides the {len(data)} rows, got {new_batch_size}")
    return data.fold(len(data) // new_batch_size)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Make rows of the first two dims; `data.unfold()`.

    Raises:
        ValueError: batch_dims is not 2; flatten more dims one call at a time.
    """
    if batch_dims != 2:
        raise ValueError(f"expected batch_dims=2, got {batch_dims}; call unfold() once for each further dim")
    return data.unfold()


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int] | Tensor, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Partition rows by length; `balance.karmarkar_karp(lengths, k, equal_size)`."""
    return karmarkar_karp(seqlen_list, k_partitions, equal_size)


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace the rows of `data` by those of all ranks, in place, and keep its meta_info. Collective.

    `all_gather(batch, group)` returns a new batch instead and merges meta_info. Errors are those of `all_gather`.
    """
    gathered = all_gather(data.select(meta_info_keys=[]), process_group)
    data.batch = gathered.batch
    data.non_tensor_batch = gathered.non_tensor_batch
    data._padding = None
