"""Operations on random batches compared with the same operation on a list of rows."""

import copy
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import batches, check, names_of, rows_of
from hypothesis import given
from hypothesis import strategies as st
from tidemill_dataproto import DataProto, pad_dataproto_to_divisor, ragged, unpad_dataproto


def parts_bounds(n: int, parts: int) -> list[int]:
    return [len(piece) for piece in np.array_split(np.arange(n), parts)]


@given(batches(), st.integers(1, 8))
def test_chunk_then_concat_is_the_identity(batch: DataProto, n: int) -> None:
    rows = rows_of(batch)
    parts = batch.chunk(n, allow_unequal=True)
    assert [len(part) for part in parts] == (parts_bounds(len(batch), n) if len(batch) else [0] * n)
    start = 0
    for part in parts:
        check(part, rows[start : start + len(part)], batch)
        start += len(part)
    whole = DataProto.concat(parts)
    check(whole, rows, batch)
    assert whole == batch
    if len(batch) % n == 0:
        assert [rows_of(part) for part in batch.chunk(n)] == [rows_of(part) for part in parts]
    else:
        with pytest.raises(ValueError, match="allow_unequal"):
            batch.chunk(n)


@given(batches(), st.integers(1, 4))
def test_split_then_concat_is_the_identity(batch: DataProto, size: int) -> None:
    rows = rows_of(batch)
    parts = batch.split(size)
    assert [rows_of(part) for part in parts] == [rows[i : i + size] for i in range(0, len(rows), size)] or not rows
    check(DataProto.concat(parts), rows, batch)


@given(batches(), st.data())
def test_index_takes_the_same_rows_as_a_list(batch: DataProto, data: st.DataObject) -> None:
    rows, n = rows_of(batch), len(batch)
    index = data.draw(st.lists(st.integers(-n, n - 1), max_size=8)) if n else []
    expected = [rows[i] for i in index]
    for form in (index, torch.tensor(index, dtype=torch.int32), np.array(index, dtype=np.int64), tuple(index)):
        check(batch[form], expected, batch)
    mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    expected = [row for row, keep in zip(rows, mask, strict=True) if keep]
    for form in (mask, torch.tensor(mask), np.array(mask)):
        check(batch[form] if n else batch.select_idxs(form), expected, batch)


@given(batches(), st.data())
def test_slice_takes_the_same_rows_as_a_list(batch: DataProto, data: st.DataObject) -> None:
    edge = st.none() | st.integers(-8, 8)
    item = slice(data.draw(edge), data.draw(edge), data.draw(st.sampled_from([None, 1, 2, -1, -3])))
    check(batch[item], rows_of(batch)[item], batch)


@given(batches(min_rows=1))
def test_items_then_from_items_is_the_identity(batch: DataProto) -> None:
    others = [name for name, column in batch.non_tensor_batch.items() if column.dtype == object]
    batch = batch.select(non_tensor_batch_keys=others)  # numbers and strings would become objects
    dense = [name for name in names_of(batch) if not batch[name].is_nested]
    if not names_of(batch) and not others:
        return  # without columns, items do not determine the number of rows
    items = list(batch)
    assert len(items) == len(batch)
    assert DataProto.from_items(items, dense) == batch
    for i in (*range(len(batch)), -1, np.int64(0)):
        assert DataProto.from_items([batch[i]], dense) == batch[[i]]
        assert batch[i].meta_info["nested"] is not batch.meta_info["nested"]
    rows = [{**item.batch, **item.non_tensor_batch} for item in items]
    assert DataProto.from_items(rows, dense) == batch.select(meta_info_keys=[])


@given(batches(), st.randoms(use_true_random=False))
def test_reorder_then_its_inverse_is_the_identity(batch: DataProto, random: Any) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)
    moved = batch.reorder(order)
    check(moved, [rows_of(batch)[i] for i in order], batch)
    check(moved.reorder(torch.tensor(order, dtype=torch.int64).argsort()), rows_of(batch), batch)


@given(batches(), st.integers(0, 3), st.data())
def test_repeat_equals_repeated_rows_in_either_order(batch: DataProto, times: int, data: st.DataObject) -> None:
    rows = rows_of(batch)
    check(batch.repeat(times), [row for row in rows for _ in range(times)], batch)
    check(batch.repeat(np.int64(times), interleave=False), rows * times, batch)
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    expected = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    for form in (counts, torch.tensor(counts, dtype=torch.int64), np.array(counts, dtype=np.int64)):
        check(batch.sample_level_repeat(form), expected, batch)


@given(batches(), st.integers(1, 3), st.data())
def test_unfold_column_chunks_cuts_rows_of_the_chosen_columns(batch: DataProto, n: int, data: st.DataObject) -> None:
    wide = DataProto.from_dict(
        {
            name: ragged.concat_rows(column, column) if column.is_nested else torch.cat([column, column], dim=1)
            for name, column in batch.batch.items()
            if column.dim() > 1
        },
        {"lists": [[i, -i] for i in range(len(batch))], "pairs": np.arange(2 * len(batch)).reshape(-1, 2)},
    )
    names = data.draw(st.lists(st.sampled_from([*names_of(wide), "lists", "pairs"]), unique=True))
    split = wide.unfold_column_chunks(2, names)
    assert len(split) == 2 * len(wide)
    expected = [
        {
            name: value[at * len(value) // 2 : (at + 1) * len(value) // 2] if name in names else value
            for name, value in row.items()
        }
        for row in wide_rows(wide)
        for at in range(2)
    ]
    assert wide_rows(split) == expected
    assert [*split.batch.keys()] == [*wide.batch.keys()]
    same = batch.unfold_column_chunks(n)
    check(same, rows_of(batch.repeat(n)), batch)


def wide_rows(batch: DataProto) -> list[dict[str, Any]]:
    """The rows, arrays as lists."""
    return [{k: v[1] if isinstance(v, tuple) else v for k, v in row.items()} for row in rows_of(batch)]


@given(batches(), st.integers(1, 3), st.integers(0, 3))
def test_fold_then_unfold_is_the_identity(batch: DataProto, size: int, groups: int) -> None:
    batch = batch.repeat(size * groups) if len(batch) else batch
    folded = batch.fold(size)
    assert len(folded) == len(batch) // size
    assert folded.unfold() == batch
    check(folded.unfold(), rows_of(batch), batch)
    order = list(range(len(folded)))[::-1]
    moved = [row for group in order for row in rows_of(batch)[group * size : (group + 1) * size]]
    check(folded.reorder(order).unfold(), moved, batch)  # groups move as wholes
    if len(batch) and names_of(batch) + list(batch.non_tensor_batch):
        assert pickle.loads(pickle.dumps(DataProto.concat(folded.split(1)))).unfold() == batch


@given(batches(), st.integers(1, 4), st.integers(0, 3))
def test_iterator_yields_every_row_once_per_epoch(batch: DataProto, size: int, epochs: int) -> None:
    in_order = [row for part in batch.make_iterator(size, epochs=epochs, shuffle=False) for row in rows_of(part)]
    assert in_order == rows_of(batch) * epochs
    numbered = DataProto.from_dict({"row": torch.arange(len(batch))}).union(batch)
    seen = [part["row"].tolist() for part in numbered.make_iterator(size, epochs=epochs, seed=3)]
    assert seen == [part["row"].tolist() for part in numbered.make_iterator(size, epochs=epochs, seed=3)]
    flat = [row for part in seen for row in part]
    for epoch in range(epochs):
        assert sorted(flat[epoch * len(batch) : (epoch + 1) * len(batch)]) == list(range(len(batch)))
    assert all(0 < len(part) <= size for part in seen)


@given(st.integers(0, 7), st.integers(1, 4), st.integers(0, 3), st.booleans(), st.data())
def test_iterator_resumes_at_any_position(n: int, size: int, epochs: int, shuffle: bool, data: st.DataObject) -> None:
    batch = DataProto.from_dict({"row": torch.arange(n)})
    whole = batch.make_iterator(size, epochs, shuffle=shuffle)
    total = len(whole)
    position = data.draw(st.integers(0, total))
    seen = [next(whole)["row"].tolist() for _ in range(position)]
    state = pickle.loads(pickle.dumps(whole.state_dict()))
    rest = [part["row"].tolist() for part in whole]
    assert len(seen) + len(rest) == total
    resumed = batch.make_iterator(size, epochs, shuffle=shuffle)
    resumed.load_state_dict(state)
    assert [part["row"].tolist() for part in resumed] == rest
    whole.load_state_dict(state)  # back to where it was
    assert [part["row"].tolist() for part in whole] == rest


@given(batches(min_rows=1), st.integers(1, 5))
def test_pad_then_unpad_is_the_identity(batch: DataProto, divisor: int) -> None:
    rows = rows_of(batch)
    padded, size = pad_dataproto_to_divisor(batch, divisor)
    assert 0 <= size < divisor
    assert len(padded) == len(batch) + size
    assert len(padded) % divisor == 0
    assert padded.is_padding.tolist() == [False] * len(batch) + [True] * size
    check(unpad_dataproto(padded, size), rows, batch)
    assert unpad_dataproto(padded, size) == batch
    for part in (padded.chunk(divisor), padded.split(1), [padded[::-1][::-1]], [pickle.loads(pickle.dumps(padded))]):
        assert rows_of(DataProto.concat(part)) == rows  # concat drops padding
        assert unpad_dataproto(DataProto.concat(part), size) == batch  # unpad sees that padding was dropped
    assert [row for part in padded.make_iterator(2, shuffle=False) for row in rows_of(part)] == rows
    assert len(list(padded)) == len(batch)


@pytest.mark.parametrize(
    "operation",
    [
        lambda b: b.chunk(2)[1],
        lambda b: b[[3, 0]],
        lambda b: b.repeat(2),
        lambda b: DataProto.concat([b, b]),
        lambda b: DataProto.concat(b.chunk(4)),
        lambda b: b.clone(),
        lambda b: b.fold(2).unfold(),
        lambda b: pickle.loads(pickle.dumps(b)),
        lambda b: b.select(),
    ],
)
@pytest.mark.parametrize("added", ["union", "put in", "both"])
def test_layouts_shared_between_batches_stay_shared(operation: Any, added: str) -> None:
    ids = ragged.ragged(torch.arange(7), [2, 0, 4, 1])
    batch = DataProto.from_dict({"ids": ids})
    if added != "put in":
        more = DataProto.from_dict({"mask": ragged.like(torch.ones(7), batch["ids"])})
        batch = batch.union(more) if added == "union" else more.union(batch)
    if added != "union":
        batch.batch["weight"] = ragged.like(torch.full((7,), 2.0), batch["ids"])
    result = operation(batch)
    names = [name for name in result.batch.keys() if name != "ids"]  # noqa: SIM118 - a TensorDict
    for name in names:
        assert ragged.offsets(result[name]) is ragged.offsets(result["ids"])
        assert (result[name] * result["ids"]).values().shape == ragged.values(result["ids"]).shape


@given(batches(), st.sampled_from([2, 3, 4, 5]))
def test_pickle_in_band_is_the_identity(batch: DataProto, protocol: int) -> None:
    copied = pickle.loads(pickle.dumps(batch, protocol))
    assert copied == batch
    check(copied, rows_of(batch), batch)


@given(batches())
def test_pickle_out_of_band_is_the_identity(batch: DataProto) -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    check(pickle.loads(data, buffers=buffers), rows_of(batch), batch)
    read_only = [bytes(buffer.raw()) for buffer in buffers]
    check(pickle.loads(data, buffers=read_only), rows_of(batch), batch)


@given(batches())
def test_save_then_load_is_the_identity(batch: DataProto) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "batch.safetensors"
        batch.save_to_disk(path)
        loaded = DataProto.load_from_disk(path)
        assert loaded == batch
        check(loaded, rows_of(batch), batch)
        assert [file.name for file in Path(folder).iterdir()] == ["batch.safetensors"]


@given(batches())
def test_from_tensordict_of_batch_keeps_columns(batch: DataProto) -> None:
    tensors = batch.select(non_tensor_batch_keys=[])
    again = DataProto.from_tensordict(tensors.batch.clone(), batch.meta_info)
    assert again == tensors


@given(batches())
def test_copies_are_equal_and_independent(batch: DataProto) -> None:
    for new in (batch.clone(), copy.deepcopy(batch)):
        assert new == batch
        check(new, rows_of(batch), batch)
        for name in names_of(new):
            new_data, old_data = (ragged.values(c) if c.is_nested else c for c in (new[name], batch[name]))
            if new_data.numel() > 0:
                assert new_data.data_ptr() != old_data.data_ptr()
    check(batch.to("cpu"), rows_of(batch), batch)


@given(batches(), st.data())
def test_select_then_union_is_the_identity(batch: DataProto, data: st.DataObject) -> None:
    before = rows_of(batch)
    tensor_names = data.draw(st.sets(st.sampled_from(sorted(names_of(batch)) or ["none"]))) - {"none"}
    other_names = data.draw(st.sets(st.sampled_from(sorted(batch.non_tensor_batch) or ["none"]))) - {"none"}
    chosen = [{name: row[name] for name in [*tensor_names, *other_names]} for row in before]
    assert rows_of(batch.select(sorted(tensor_names), sorted(other_names), [])) == chosen
    assert rows_of(batch) == before
    rest = batch.select()
    popped = rest.pop(sorted(tensor_names), sorted(other_names), ["step"])
    assert rows_of(popped) == chosen
    assert popped.meta_info == {"step": 1}
    assert rest.meta_info == {"nested": {"list": [1]}}
    assert len(popped) == len(rest) == len(batch)
    assert rows_of(batch) == before
    assert rest.union(popped) == batch
    if batch != batch.select([], [], []):
        assert batch.select([], [], []) != batch


@given(batches(min_rows=1), st.data())
def test_equality_detects_every_change(batch: DataProto, data: st.DataObject) -> None:
    changed = batch.clone()
    names = [*names_of(batch), *batch.non_tensor_batch]
    name = data.draw(st.sampled_from(["meta", *names]))
    if name == "meta":
        changed.meta_info["nested"]["list"].append(2)
    elif name in changed.non_tensor_batch:
        changed.non_tensor_batch[name] = changed.non_tensor_batch[name].copy()
        changed.non_tensor_batch[name][0] = "else" if changed.non_tensor_batch[name].dtype.kind in "OU" else -1
    else:
        column = changed[name]
        flat = ragged.values(column) if column.is_nested else column
        if flat.numel() == 0:
            return
        flat.view(-1)[0] = 1 - flat.view(-1)[0].int()
    assert changed != batch
    assert batch == batch.clone()


@given(batches())
def test_repr_names_every_column(batch: DataProto) -> None:
    text = repr(batch)
    assert text.startswith(f"DataProto({len(batch)} rows, ")
    assert all(name in text for name in [*names_of(batch), *batch.non_tensor_batch, "nested"])
