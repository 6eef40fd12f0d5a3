"""Ragged columns against plain loops over their rows, and their errors."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tidemill_dataproto import ragged

row_lengths = st.one_of(
    st.lists(st.integers(0, 5), max_size=6),
    st.builds(lambda n, c: [c] * n, st.integers(0, 4), st.integers(0, 3)),
)
trailing_shapes = st.sampled_from([(), (3,), (2, 2)])
SHAPES = [[], [3], [0], [2, 2], [0, 0], [1, 0, 3], [0, 4]]


def column(counts: list[int], trailing: tuple[int, ...] = (), start: int = 0) -> torch.Tensor:
    flat = torch.randn(sum(counts), *trailing, generator=torch.Generator().manual_seed(start), dtype=torch.float64)
    return ragged.ragged(flat, counts)


def rows(col: torch.Tensor) -> list[torch.Tensor]:
    return list(ragged.values(col).split(ragged.lengths(col).tolist()))


def assert_rows(col: torch.Tensor, expected: list[torch.Tensor]) -> None:
    got = rows(col)
    assert len(got) == len(expected) == col.shape[0]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("counts", SHAPES)
def test_values_lengths_and_offsets_of_a_new_column(counts: list[int]) -> None:
    flat = torch.arange(sum(counts))
    col = ragged.ragged(flat, counts)
    assert ragged.lengths(col).tolist() == ragged.host_lengths(col).tolist() == counts
    assert ragged.values(col).data_ptr() == flat.data_ptr()
    again = ragged.ragged(flat, offsets=ragged.offsets(col))
    assert ragged.offsets(again) is ragged.offsets(col)
    assert (again + col).shape[0] == len(counts)
    if counts:
        assert_rows(ragged.ragged_from_list(list(flat.split(counts))), list(flat.split(counts)))


def test_rows_of_several_dims_keep_dim_1_ragged() -> None:
    position_ids = ragged.ragged_from_list([torch.zeros(4, 3), torch.ones(4, 3)])  # equal lengths, three axes
    assert ragged.lengths(position_ids).tolist() == [4, 4]
    assert ragged.values(position_ids).shape == (8, 3)


def test_like_shares_the_layout() -> None:
    col = column([1, 0, 2])
    mask = ragged.like(torch.tensor([True, False, True]), col)
    assert ragged.offsets(mask) is ragged.offsets(col)
    torch.testing.assert_close((col * mask).values(), col.values() * mask.values())


@given(row_lengths, st.data(), trailing_shapes)
def test_concat_rows_joins_each_pair_of_rows(counts: list[int], data: st.DataObject, trailing: tuple[int, ...]) -> None:
    other = data.draw(st.lists(st.integers(0, 4), min_size=len(counts), max_size=len(counts)))
    a, b = column(counts, trailing), column(other, trailing, start=1)
    assert_rows(ragged.concat_rows(a, b), [torch.cat(pair) for pair in zip(rows(a), rows(b), strict=True)])


@given(row_lengths, trailing_shapes, st.sampled_from(["left", "right"]), st.none() | st.integers(5, 7))
def test_to_padded_then_from_padded_with_mask_is_the_identity(
    counts: list[int], trailing: tuple[int, ...], side: str, max_len: int | None
) -> None:
    col = column(counts, trailing)
    width = max(counts, default=0) if max_len is None else max_len
    padded = ragged.to_padded(col, -7.0, side=side, max_len=max_len)
    assert padded.shape == (len(counts), width, *trailing)
    mask = ragged.to_padded(
        ragged.like(torch.ones(sum(counts), dtype=torch.bool), col), False, side=side, max_len=width
    )
    for row, line, keep in zip(rows(col), padded, mask, strict=True):
        at = slice(width - len(row), None) if side == "left" else slice(0, len(row))
        torch.testing.assert_close(line[at], row)
        assert (line[~keep] == -7.0).all()
        assert int(keep.sum()) == len(row)
    assert_rows(ragged.from_padded(padded, mask), rows(col))
    assert_rows(ragged.from_padded(padded, mask.long()), rows(col))


@given(row_lengths, trailing_shapes, st.sampled_from(["left", "right"]), st.none() | st.integers(5, 7))
def test_to_padded_then_from_padded_with_lengths_is_the_identity(
    counts: list[int], trailing: tuple[int, ...], side: str, max_len: int | None
) -> None:
    col = column(counts, trailing)
    padded = ragged.to_padded(col, -7.0, side=side, max_len=max_len)
    for form in (counts, ragged.lengths(col)):
        assert_rows(ragged.from_padded(padded, lengths=form, side=side), rows(col))


@given(row_lengths, st.data())
def test_to_prompt_response_then_back_is_the_identity(counts: list[int], data: st.DataObject) -> None:
    other = data.draw(st.lists(st.integers(0, 4), min_size=len(counts), max_size=len(counts)))
    prompts, responses = column(counts), column(other, start=1)
    padded = ragged.to_prompt_response(prompts, responses, 0.0, max_prompt_len=6)
    assert padded.shape == (len(counts), 6 + max(other, default=0))
    for row, prompt, response in zip(padded, rows(prompts), rows(responses), strict=True):
        assert row.tolist() == [0.0] * (6 - len(prompt)) + torch.cat([prompt, response]).tolist() + (
            [0.0] * (padded.shape[1] - 6 - len(response))
        )
    mask = ragged.to_prompt_response(
        *(ragged.like(torch.ones(ragged.values(c).shape[0], dtype=torch.bool), c) for c in (prompts, responses)),
        False,
        max_prompt_len=6,
    )
    again = ragged.from_prompt_response(padded, mask, 6)
    assert_rows(again[0], rows(prompts))
    assert_rows(again[1], rows(responses))


@given(row_lengths, st.data(), trailing_shapes)
def test_split_rows_then_concat_rows_is_the_identity(
    counts: list[int], data: st.DataObject, trailing: tuple[int, ...]
) -> None:
    head = [data.draw(st.integers(0, count)) for count in counts]
    col = column(counts, trailing)
    for form in (head, torch.tensor(head, dtype=torch.int64), column(head)):
        first, second = ragged.split_rows(col, form)
        assert_rows(first, [row[:n] for row, n in zip(rows(col), head, strict=True)])
        assert_rows(second, [row[n:] for row, n in zip(rows(col), head, strict=True)])
        assert_rows(ragged.concat_rows(first, second), rows(col))


@given(row_lengths, st.data(), trailing_shapes)
def test_response_predictions_are_the_outputs_one_position_before_each_token(
    counts: list[int], data: st.DataObject, trailing: tuple[int, ...]
) -> None:
    prompt = [data.draw(st.integers(1 if count else 0, 3)) for count in counts]
    responses = column(counts)
    outputs = column([a + b for a, b in zip(prompt, counts, strict=True)], trailing)
    shifted = ragged.response_predictions(outputs, responses)
    assert ragged.offsets(shifted) is ragged.offsets(responses)
    # Output t is about token t + 1; token p + k is the k-th of the response.
    expected = [row[p - 1 : p - 1 + n] for row, p, n in zip(rows(outputs), prompt, counts, strict=True) if n]
    assert_rows(ragged.index_rows(shifted, [row for row, n in enumerate(counts) if n]), expected)


@given(st.lists(st.integers(0, 900), max_size=12), st.data())
def test_index_rows_copies_long_rows_of_any_dtype_and_stride(counts: list[int], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=20)) if counts else []
    for dtype in (torch.int32, torch.bfloat16, torch.bool):
        flat = (torch.arange(sum(counts)) * 7 % 251).to(dtype)
        col = ragged.ragged(flat, counts)
        assert_rows(ragged.index_rows(col, index), [rows(col)[i] for i in index])
        every_second = ragged.ragged(flat.repeat_interleave(2)[::2], counts)  # not contiguous
        assert_rows(ragged.index_rows(every_second, index), [rows(col)[i] for i in index])


@given(row_lengths, st.data(), trailing_shapes)
def test_index_rows_takes_rows_in_any_order_and_number(
    counts: list[int], data: st.DataObject, trailing: tuple[int, ...]
) -> None:
    index = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=8)) if counts else []
    col = column(counts, trailing)
    taken = ragged.index_rows(col, torch.tensor(index, dtype=torch.int64))
    assert_rows(taken, [rows(col)[i] for i in index])


@given(row_lengths, trailing_shapes)
def test_expand_rows_and_segment_reductions(counts: list[int], trailing: tuple[int, ...]) -> None:
    col = column(counts)
    per_row = torch.randn(len(counts), *trailing, dtype=torch.float64)
    flat = ragged.expand_rows(per_row, col)
    expected = [value.expand(count, *trailing) for value, count in zip(per_row, counts, strict=True)]
    torch.testing.assert_close(flat, torch.cat([per_row[:0], *expected]))
    total, mean = ragged.segment_sum(flat, col), ragged.segment_mean(flat, col)
    counted = torch.tensor(counts, dtype=torch.float64).reshape(-1, *[1] * len(trailing))
    torch.testing.assert_close(total, per_row * counted)
    torch.testing.assert_close(mean, per_row * (counted > 0))


@pytest.mark.parametrize(
    ("dtype", "sums", "means"),
    [
        (torch.bool, torch.int64, torch.float32),
        (torch.int32, torch.int64, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
    ],
)
def test_dtypes_of_segment_sum_and_mean(dtype: torch.dtype, sums: torch.dtype, means: torch.dtype) -> None:
    col = ragged.ragged(torch.zeros(1002), [1000, 0, 2])
    ones = torch.ones(1002, dtype=dtype)
    total, mean = ragged.segment_sum(ones, col), ragged.segment_mean(ones, col)
    assert total.dtype == sums
    assert mean.dtype == means
    assert total.tolist() == [1000, 0, 2]
    assert mean.tolist() == [1, 0, 1]


def test_long_rows_are_summed_as_exactly_as_torch_sums() -> None:
    flat = torch.rand(2**15, generator=torch.Generator().manual_seed(0))
    total = ragged.segment_sum(flat, ragged.ragged(flat, [flat.numel()]))
    assert total.item() == flat.double().sum().float().item()


@pytest.mark.parametrize("counts", SHAPES)
def test_gradients_flow_through_all_functions(counts: list[int]) -> None:
    col = column(counts)
    start = ragged.values(col).clone().requires_grad_()

    def loss(flat: torch.Tensor) -> torch.Tensor:
        here = ragged.like(flat, col)
        both = ragged.concat_rows(here, here)
        total = ragged.values(both).square().sum() + ragged.to_padded(here, 0.0).exp().sum()
        total = total + ragged.segment_mean(flat, col).square().sum() + ragged.segment_sum(flat, col).square().sum()
        every = ragged.index_rows(here, torch.arange(len(counts)).flip(0))
        first, second = ragged.split_rows(here, [count // 2 for count in counts])
        total = total + ragged.values(first).sin().sum() + ragged.values(second).cos().sum()
        shifted = ragged.response_predictions(ragged.concat_rows(col, here), here)
        total = total + ragged.values(shifted).pow(3).sum()
        return total + ragged.values(every).pow(3).sum() + ragged.expand_rows(ragged.segment_sum(flat, col), col).sum()

    assert torch.autograd.gradcheck(loss, start)


def test_make_columns_in_inference_mode() -> None:
    flat, bounds = torch.arange(3.0), torch.tensor([0, 1, 3])
    with torch.inference_mode():
        outside = ragged.ragged(flat, offsets=bounds)
        inside = ragged.ragged(flat + 1, offsets=bounds)
    assert ragged.values(outside).tolist() == [0, 1, 2]
    assert ragged.values(inside).tolist() == [1, 2, 3]


FLAT = torch.arange(4)
COLUMN = ragged.ragged(FLAT, [1, 3])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls this layout a prototype
    STRIDED = torch.nested.nested_tensor([FLAT, FLAT], layout=torch.strided)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ragged.ragged(FLAT), TypeError, "exactly one"),
        (lambda: ragged.ragged(FLAT, [4], offsets=[0, 4]), TypeError, "exactly one"),
        (lambda: ragged.ragged(FLAT, [1, 2]), ValueError, r"sum 4, .* got \[1, 2\]"),
        (lambda: ragged.ragged(FLAT, [5, -1]), ValueError, "sum 4"),
        (lambda: ragged.ragged(FLAT, [1] * 9), ValueError, r"\.\.\.\] \(9 numbers\)"),
        (lambda: ragged.ragged(FLAT, [1.0, 3.0]), TypeError, "integers"),
        (lambda: ragged.ragged(FLAT, torch.ones(4, dtype=torch.bool)), TypeError, "integers"),
        (lambda: ragged.ragged(FLAT, [[1, 3]]), ValueError, "shape"),
        (lambda: ragged.ragged(FLAT, offsets=[]), ValueError, r"offsets \[B \+ 1\]"),
        (lambda: ragged.ragged(FLAT, offsets=[1, 4]), ValueError, "non-decreasing offsets from 0 to 4"),
        (lambda: ragged.ragged(FLAT, offsets=[0, 3, 1, 4]), ValueError, "non-decreasing"),
        (lambda: ragged.ragged(COLUMN, [2]), ValueError, "flat values"),
        (lambda: ragged.ragged(torch.tensor(1), [1]), ValueError, "flat values"),
        (lambda: ragged.ragged([0, 1], [2]), TypeError, r"values: expected a tensor, got list.*torch.tensor"),
        (lambda: ragged.ragged_from_list([FLAT, [1]]), TypeError, "row 1: expected a tensor, got list"),
        (lambda: ragged.lengths([1, 3]), TypeError, "column: expected a tensor, got list"),
        (lambda: ragged.ragged_from_list([]), ValueError, "at least one row"),
        (lambda: ragged.ragged_from_list([FLAT, FLAT.float()]), ValueError, "row 1 is float32"),
        (lambda: ragged.ragged_from_list([FLAT, FLAT.reshape(2, 2)]), ValueError, "row 1"),
        (lambda: ragged.ragged_from_list([torch.tensor(1)]), ValueError, "row 0"),
        (lambda: ragged.values(FLAT), ValueError, r"expected a ragged column .* int64 \[4\]"),
        (
            lambda: ragged.lengths(STRIDED),
            ValueError,
            "expected a ragged .* nested int64 of layout",
        ),
        (lambda: ragged.like(FLAT[1:], COLUMN), ValueError, r"\[4, \.\.\.\]"),
        (lambda: ragged.like(FLAT.to("meta"), COLUMN), ValueError, "on cpu"),
        (lambda: ragged.concat_rows(COLUMN, ragged.ragged(FLAT, [4])), ValueError, "same number of rows, got 2 and 1"),
        (
            lambda: ragged.concat_rows(COLUMN, ragged.like(FLAT.float(), COLUMN)),
            ValueError,
            "same dtype, device and trailing shape",
        ),
        (lambda: ragged.to_padded(COLUMN, 0, side="middle"), ValueError, "side"),
        (lambda: ragged.to_padded(COLUMN, 0, max_len=2), ValueError, "row 1 has 3 elements"),
        (lambda: ragged.to_padded(COLUMN, 0.5), ValueError, "a value of torch.int64, .*; got 0.5"),
        (lambda: ragged.to_padded(ragged.like(FLAT.byte(), COLUMN), -100), ValueError, "torch.uint8, .*; got -100"),
        (lambda: ragged.to_padded(COLUMN, math.nan), ValueError, "torch.int64, .*; got nan"),
        (lambda: ragged.to_padded(ragged.like(FLAT.half(), COLUMN), 1e6), ValueError, "torch.float16, .*got 1000000.0"),
        (lambda: ragged.to_padded(ragged.like(FLAT > 0, COLUMN), 7), ValueError, "torch.bool, .*; got 7"),
        (lambda: ragged.from_padded(FLAT.reshape(2, 2), torch.ones(2, 3)), ValueError, "mask"),
        (lambda: ragged.from_padded(FLAT, FLAT > 0), ValueError, "mask"),
        (lambda: ragged.from_padded(FLAT.reshape(2, 2)), TypeError, "exactly one of mask"),
        (lambda: ragged.from_padded(FLAT.reshape(2, 2), FLAT.reshape(2, 2) > 0, lengths=[1, 1]), TypeError, "one of"),
        (lambda: ragged.from_padded(FLAT, lengths=[1] * 4), ValueError, r"\[B, T, \.\.\.\]"),
        (lambda: ragged.from_padded(FLAT.reshape(2, 2), lengths=[1, 3]), ValueError, "at most 2.*got 3 for row 1"),
        (lambda: ragged.from_padded(FLAT.reshape(2, 2), lengths=[1]), ValueError, "one number per row"),
        (lambda: ragged.from_padded(FLAT.reshape(2, 2), lengths=[1, 1], side="up"), ValueError, "side"),
        (lambda: ragged.from_prompt_response(FLAT.reshape(2, 2), FLAT.reshape(2, 2) > 0, 3), ValueError, "0 to 2"),
        (lambda: ragged.split_rows(COLUMN, [2, 1]), ValueError, r"row 0 has 1 elements, got lengths\[0\]=2"),
        (lambda: ragged.split_rows(COLUMN, [1]), ValueError, "one number per row"),
        (lambda: ragged.split_rows(COLUMN, [0.5, 1]), TypeError, "lengths as integers"),
        (lambda: ragged.index_rows(COLUMN, [2]), IndexError, "row 2 is out of range"),
        (lambda: ragged.response_predictions(COLUMN, COLUMN), ValueError, "row 0 has 1 tokens and a response of 1"),
        (lambda: ragged.response_predictions(COLUMN, ragged.ragged(FLAT, [4])), ValueError, "same number of rows"),
        (lambda: ragged.expand_rows(FLAT, COLUMN), ValueError, "one value per row"),
        (lambda: ragged.segment_sum(FLAT[1:], COLUMN), ValueError, "flat values"),
        (lambda: ragged.segment_mean(FLAT[1:], COLUMN), ValueError, "flat values"),
    ],
)
def test_invalid_arguments_of_ragged_functions_are_refused_with_a_message(
    call, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_column_with_other_ragged_dim_or_gaps_is_refused() -> None:
    ragged_at_2 = torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(3, 4)], layout=torch.jagged)
    gaps = torch.nested.nested_tensor_from_jagged(FLAT, torch.tensor([0, 2, 4]), lengths=torch.tensor([1, 2]))
    for column in (ragged_at_2, gaps):
        with pytest.raises(ValueError, match="dim 1 ragged and without gaps"):
            ragged.values(column)
