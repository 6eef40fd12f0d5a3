"""Invalid input: errors state what was expected, what was received, and what to do."""

import pickle

import numpy as np
import pytest
import torch
from batch_cases import make
from tensordict import TensorDict
from tidemill_dataproto import DataProto, karmarkar_karp


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}), ValueError, "{'a': 2, 'b': 3}"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"b": [1]}), ValueError, "{'a': 2, 'b': 1}"),
        (
            lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"a": [1, 2]}),
            ValueError,
            "'a'.* are tensor and numpy columns",
        ),
        (lambda: DataProto.from_dict({"a": torch.tensor(1)}), ValueError, "'a'.*0 dims"),
        (lambda: DataProto.from_dict({"a": [1]}), TypeError, "'a': expected a tensor, got list"),
        (lambda: DataProto.from_dict({1: torch.zeros(2)}), TypeError, "column name as a string"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2).to_sparse()}), ValueError, "'a'.*sparse"),
        (lambda: DataProto.from_dict(non_tensors={"a": "text"}), TypeError, "'a'.*got str"),
        (lambda: DataProto.from_dict(non_tensors={"a": np.array(1)}), TypeError, "'a'"),
        (lambda: DataProto(non_tensor_batch={"a": [1]}), TypeError, "'a': expected a numpy array"),
        (lambda: DataProto(non_tensor_batch={"a": np.empty((2, 2), object)}), ValueError, r"'a'.*object \[2, 2\]"),
        (
            lambda: DataProto({"a": torch.zeros(2)}),
            TypeError,
            r"a TensorDict .*, got dict; make a batch with",
        ),
        (lambda: DataProto(TensorDict({}, batch_size=[2, 2])), ValueError, r"batch_size \[B\], got \[2, 2\]"),
        (lambda: DataProto(TensorDict({"a": TensorDict({}, [2])}, [2])), TypeError, "'a'.*got TensorDict"),
        (lambda: make()[4], IndexError, "row 4 is out of range for a batch of 4"),
        (lambda: make()[-5], IndexError, "row -5"),
        (lambda: make()[True], TypeError, "got bool"),
        (lambda: make()["none"], KeyError, r"no column 'none'; known: \['x', 'ids', 'mask', 'uid'\]"),
        (lambda: make()[[4]], IndexError, "row 4 is out of range for a batch of 4"),
        (lambda: make()[[0, -5]], IndexError, "row -5"),
        (lambda: DataProto()[[0]], IndexError, "row 0 is out of range for a batch of 0"),
        (lambda: make()[[0.5]], TypeError, "float64"),
        (lambda: make()[torch.zeros(2)], TypeError, "float32"),
        (lambda: make()[["x"]], TypeError, r"integers or a bool mask, got <U1; use select\(\) for columns"),
        (lambda: make()[torch.zeros(1, 1, dtype=torch.int64)], ValueError, "one dim"),
        (lambda: make()[torch.ones(4, dtype=torch.uint8)], TypeError, r"uint8, .* mask; pass .bool\(\)"),
        (lambda: make()[[True, False]], ValueError, "mask of 4 rows"),
        (lambda: make()[None], TypeError, "NoneType"),
        (lambda: DataProto.from_items([]), ValueError, "at least one item"),
        (lambda: DataProto.from_items([{"a": 1}, {"b": 1}]), ValueError, r"columns \['a'\] of item 0, got \['b'\]"),
        (lambda: DataProto.from_items([{"a": torch.ones(2)}, {"a": 1}]), ValueError, "'a'.*item 1 has no tensor"),
        (lambda: DataProto.from_items([{"a": torch.ones(2)}, {"a": torch.ones(2, 2)}]), ValueError, "'a': row 1"),
        (lambda: DataProto.from_items([{"a": torch.ones(2)}, {"a": torch.ones(3)}], ["a"]), ValueError, "'a': item 1"),
        (lambda: DataProto.from_items([{"a": torch.ones(2)}], ["b"]), KeyError, r"no column 'b'; known: \['a'\]"),
        (lambda: DataProto.from_items([{"a": torch.ones(2)}], "a"), TypeError, r"write \['a'\]"),
        (lambda: DataProto.from_tensordict({"a": torch.ones(2)}), TypeError, "got dict"),
        (lambda: make().fold(3), ValueError, "4 rows do not divide into groups of 3"),
        (lambda: make().fold(0), ValueError, "groups of 0"),
        (lambda: make().unfold(), ValueError, r"'x' \[4\] is not folded"),
        (lambda: make().select([]).unfold(), ValueError, "'uid' is not folded"),
        (lambda: make().select([], []).unfold(), ValueError, "none"),
        (lambda: make().fold(2).pop(["ids"]).unfold(), ValueError, "'ids.lengths'"),
        (
            lambda: make().fold(2).union(make().fold(4).repeat(2).rename("x", "y").select(["y"], [])).unfold(),
            ValueError,
            "groups of one size, got .*'y': 4",
        ),
        (
            lambda: make().union(DataProto.from_dict({"ids.lengths": torch.ones(4)})).fold(2),
            ValueError,
            "is reserved",
        ),
        (lambda: make().reorder([0, 1, 2]), ValueError, "permutation of 4 rows"),
        (lambda: make().reorder([0, 1, 2, 2]), ValueError, "permutation"),
        (lambda: make().repeat(-1), ValueError, "repeat_times >= 0"),
        (lambda: make().sample_level_repeat([1, 2]), ValueError, r"one number per row, \[4\], got shape \[2\]"),
        (lambda: make().sample_level_repeat([1, 2, -1, 0]), ValueError, "got -1 for row 2"),
        (lambda: make().sample_level_repeat([1.0] * 4), TypeError, "float64"),
        (lambda: make().repeat([1] * 4), TypeError, r"got list; use sample_level_repeat\(\) for one number per row"),
        (lambda: make().chunk(0), ValueError, "at least one chunk"),
        (lambda: make().chunk(3), ValueError, "4 rows do not divide into 3"),
        (lambda: make().chunk(8), ValueError, "4 rows do not divide into 8"),
        (lambda: DataProto.concat(make()), TypeError, "a list of DataProto, part 0 of it, got DataProtoItem"),
        (lambda: DataProto.concat([make(), {"x": 1}]), TypeError, "part 1 of it, got dict"),
        (lambda: make().union({"y": torch.zeros(4)}), TypeError, "a DataProto, got dict"),
        (lambda: karmarkar_karp([1, 2.5], 2), TypeError, r"integer lengths, one per row, got float32 \[2\]"),
        (lambda: make().split(0), ValueError, "split_size >= 1, got 0"),
        (lambda: make().make_iterator(2).load_state_dict({}), ValueError, r"expected the result of state_dict\(\)"),
        (
            lambda: make().make_iterator(2).load_state_dict(make().make_iterator(3).state_dict()),
            ValueError,
            "mini_batch_size=2, got 3",
        ),
        (
            lambda: make().make_iterator(2).load_state_dict(make(3).make_iterator(2).state_dict()),
            ValueError,
            "num_rows=4, got 3",
        ),
        (lambda: make().make_iterator(0), ValueError, "mini_batch_size >= 1"),
        (lambda: make().make_iterator(1, epochs=-1), ValueError, "epochs >= 0"),
        (lambda: make().select("x"), TypeError, r"write \['x'\]"),
        (lambda: make().select(["none"]), KeyError, "no tensor column 'none'"),
        (lambda: make().select(meta_info_keys=["none"]), KeyError, "no meta_info key 'none'"),
    ],
)
def test_invalid_arguments_of_a_batch_are_refused_with_a_message(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_invalid_column_added_by_hand_is_named_by_the_next_operation() -> None:
    batch = make()
    batch.non_tensor_batch["late"] = np.zeros(3)
    for call in (lambda: batch.chunk(2), lambda: batch[[0]], lambda: pickle.dumps(batch), lambda: batch.to("cpu")):
        with pytest.raises(ValueError, match="'late': 3"):
            call()
    batch = make()
    batch.batch["text"] = "abc"
    with pytest.raises(TypeError, match="column 'text': expected a tensor"):
        batch.chunk(2)
    shifted = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor([2, 4, 9]))
    with pytest.raises(ValueError, match="column 'c': expected offsets from 0"):
        DataProto.from_dict({"c": shifted})
