"""PROTOCOL.md lists the states, records and blobs of the code."""

import re
from enum import IntEnum
from pathlib import Path
from typing import get_args

import pytest
from tidemill_weight_update.control.board import Area, Record
from tidemill_weight_update.control.mailbox import EngineState, ReaderState, TrainerState

PAGE = (Path(__file__).parents[2] / "PROTOCOL.md").read_text()


def first_column(header: str) -> list[str]:
    """Names in the first column of the table whose first header is `header`."""
    _, table = re.split(rf"^\| {header} \|.*\n\|[-|]+\|\n", PAGE, flags=re.MULTILINE)
    rows = table.split("\n\n")[0].splitlines()
    return [row.split("|")[1].strip().strip("`") for row in rows]


@pytest.mark.parametrize(
    ("header", "states"), [("trainer rank", TrainerState), ("engine rank", EngineState), ("reader", ReaderState)]
)
def test_states_of_the_page_are_those_of_the_code(header: str, states: type[IntEnum]):
    assert first_column(header) == [state.name for state in states]


@pytest.mark.parametrize(("header", "names"), [("record", get_args(Record)), ("blob", get_args(Area))])
def test_records_and_blobs_of_the_page_are_those_of_the_code(header: str, names: tuple[str, ...]):
    assert first_column(header) == list(names)
