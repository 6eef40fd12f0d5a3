"""Names of verl, with verl's results."""

import pytest
import torch
from tidemill_dataproto import DataProto, compat, karmarkar_karp


def part(metrics: object, **meta: object) -> DataProto:
    return DataProto.from_dict({"x": torch.ones(1)}, meta_info={"metrics": metrics, **meta})


def test_concat_makes_metrics_one_dict_of_lists() -> None:
    parts = [part({"loss": 1.0, "kl": 0.1}, step=3), part([{"loss": 2.0, "kl": 0.2}, {"loss": 3.0, "kl": 0.3}], step=3)]
    joined = compat.concat([*parts, part(None, step=3)])
    assert joined.meta_info == {"metrics": {"loss": [1.0, 2.0, 3.0], "kl": [0.1, 0.2, 0.3]}, "step": 3}
    assert len(joined) == 3
    assert DataProto.concat(parts, merge={"metrics": compat.merge_metrics}).meta_info["metrics"]["loss"] == [
        1.0,
        2.0,
        3.0,
    ]
    assert "metrics" not in compat.concat([part(None), part([])]).meta_info
    assert compat.concat([part({"loss": 1.0}), part({"loss": 3.0})], merge={"metrics": "mean"}).meta_info == {
        "metrics": {"loss": 2.0}
    }


def test_concat_names_metrics_that_differ_between_parts() -> None:
    with pytest.raises(ValueError, match=r"keys \['loss'\] of dict 0 in all dicts, got \['kl', 'loss'\] in dict 1"):
        compat.concat([part({"loss": 1.0}), part({"loss": 1.0, "kl": 0.1})])
    with pytest.raises(ValueError, match=r"meta_info\['step'\]"):
        compat.concat([part({}, step=1), part({}, step=2)])


def test_fold_and_unfold_batch_dim() -> None:
    batch = DataProto.from_dict({"x": torch.arange(6)}, {"uid": list("aabbcc")}, {"step": 1})
    folded = compat.fold_batch_dim(batch, new_batch_size=3)
    assert folded["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert folded["uid"].tolist() == [["a", "a"], ["b", "b"], ["c", "c"]]
    assert compat.unfold_batch_dim(folded, batch_dims=2) == batch
    with pytest.raises(ValueError, match="new_batch_size that divides the 6 rows, got 4"):
        compat.fold_batch_dim(batch, 4)
    with pytest.raises(ValueError, match="expected batch_dims=2, got 3"):
        compat.unfold_batch_dim(folded, 3)


def test_collate_fn_stacks_items() -> None:
    batch = DataProto.from_dict({"x": torch.rand(3, 2), "n": torch.arange(3)}, {"uid": ["a", "b", "c"]})
    assert compat.collate_fn([batch[2], batch[0]]) == batch[[2, 0]]
    with pytest.raises(ValueError, match="at least one item"):
        compat.collate_fn([])


def test_get_seqlen_balanced_partitions_is_karmarkar_karp() -> None:
    lengths = [8, 7, 6, 5, 4, 1]
    for equal_size in (False, True):
        assert compat.get_seqlen_balanced_partitions(lengths, 2, equal_size) == karmarkar_karp(lengths, 2, equal_size)
