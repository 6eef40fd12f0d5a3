import base64

import pytest
import torch
from tidemill_dataproto import ragged
from tidemill_trainer.config import Config
from tidemill_trainer.config_file import parse_config
from tidemill_trainer.rollout.routed_experts import routed_experts_column
from tidemill_trainer.rollout.worker import engine_arguments

LAYERS, TOP_K = 3, 2


def encoded(experts):
    return base64.b64encode(experts.to(torch.int32).numpy().tobytes()).decode()


def rows(*lengths):
    return ragged.ragged(torch.arange(sum(lengths)), list(lengths))


def test_all_tokens_except_the_last_of_a_row_have_experts():
    read = [torch.randint(0, 8, (length - 1, LAYERS, TOP_K)) for length in (4, 2, 7)]
    column = routed_experts_column([encoded(row) for row in read], rows(4, 2, 7), num_layers=LAYERS, top_k=TOP_K)
    assert column.dtype == torch.int32
    assert ragged.lengths(column).tolist() == [4, 2, 7]
    for expected, row in zip(read, column.unbind(), strict=True):
        assert torch.equal(row[:-1], expected.int())
        assert torch.equal(row[-1], torch.full((LAYERS, TOP_K), -1, dtype=torch.int32))


def test_zero_rows_and_a_row_with_one_token():
    empty = routed_experts_column([], rows(), num_layers=LAYERS, top_k=TOP_K)
    assert ragged.values(empty).shape == (0, LAYERS, TOP_K)
    assert len(ragged.lengths(empty)) == 0
    one = routed_experts_column([encoded(torch.empty(0))], rows(1), num_layers=LAYERS, top_k=TOP_K)
    assert (ragged.values(one) == -1).all()


def test_wrong_number_of_experts_is_rejected():
    read = torch.zeros(4, LAYERS, TOP_K)
    with pytest.raises(ValueError, match=r"row 1: expected 30 expert ids .*5 tokens x 3 layers x 2 experts\), got 24"):
        routed_experts_column([encoded(read), encoded(read)], rows(5, 6), num_layers=LAYERS, top_k=TOP_K)


def test_engine_returns_experts_only_if_requested():
    config = parse_config(Config, {"model": {"path": "m"}, "rollout": {"device": "cpu"}})
    assert engine_arguments(config.rollout, config.model, return_routed_experts=True)["enable_return_routed_experts"]
    assert "enable_return_routed_experts" not in engine_arguments(config.rollout, config.model)
