"""Checkout in a shop: the model scans a customer's items with a tool and answers with their total.

The prices are hidden. The tool returns the total so far, so the right answer takes one call for each item.
"""

import json
import random
from typing import Any

from tidemill_rollout import Outcome, Problem, Session
from tidemill_rollout.episodes import tool_loop
from tidemill_rollout.episodes.tool import Tool

ITEMS = (
    *("apple", "banana", "bread", "butter", "carrot", "cheese", "coffee", "egg", "fig", "grape", "honey", "lemon"),
    *("milk", "onion", "orange", "pear", "pepper", "potato", "rice", "salt", "sugar", "tea", "tomato", "yogurt"),
)
MAX_ITEMS = 3
PRICES = range(10, 100)
PIECES = (
    *('<tool_call>\n{"name": "scan", "arguments": {"item": "', '"}}\n</tool_call>', "Error: scan failed: ValueError: "),
    *("scan", ", ", *ITEMS),
)
"""Texts that are one token for the model, which keeps conversations short."""


class Register:
    """The cash register of one customer.

    Args:
        prices: price of each of the customer's items.
    """

    def __init__(self, prices: dict[str, int]) -> None:
        self._prices = prices
        self._total = 0

    async def scan(self, item: str) -> str:
        """Scan an item and return the total so far.

        Args:
            item: name of the item
        """
        if item not in self._prices:
            raise ValueError(f"there is no {item}")
        self._total += self._prices[item]
        return str(self._total)


def is_total(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return 1.0 if the answer is exactly the total, else 0.0."""
    return float(solution_str == ground_truth)


async def checkout(problem: Problem, session: Session) -> Outcome:
    """Serve one customer, with the prices of `problem.extra_info`; the reward is 1 for the right total."""
    register = Register(problem.extra_info)
    return await tool_loop([register.scan], is_total)(problem, session)


def shop_rows(num_train: int, num_val: int, seed: int, *, hasty_share: float) -> tuple[list[dict], list[dict]]:
    """Draw customers with one to `MAX_ITEMS` different items.

    Args:
        num_train: number of training problems, which have a demonstration as `response`.
        num_val: number of validation problems.
        seed: seed of items, prices and demonstrations.
        hasty_share: share of the demonstrations with several items in which the last one is not scanned, so that the
            answer is wrong.
    """
    rng = random.Random(seed)
    tools = [Tool(Register({}).scan).schema]
    train = []
    for _ in range(num_train):
        row = _customer(rng)
        items = list(row["extra_info"])
        is_hasty = len(items) > 1 and rng.random() < hasty_share
        train.append(row | {"response": _served(row["extra_info"], items[:-1] if is_hasty else items), "tools": tools})
    return train, [_customer(rng) for _ in range(num_val)]


def conversation_rows(num_train: int, num_val: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Draw conversations in which the assistant scans every item and answers with the total, for `tidemill sft`."""
    rng = random.Random(seed)
    tools = [Tool(Register({}).scan).schema]
    rows = []
    for _ in range(num_train + num_val):
        customer = _customer(rng)
        prices = customer["extra_info"]
        rows.append({"messages": [*customer["prompt"], *_served(prices, list(prices))], "tools": tools})
    return rows[:num_train], rows[num_train:]


def _customer(rng: random.Random) -> dict[str, Any]:
    count = rng.randint(1, MAX_ITEMS)
    prices = {item: rng.choice(PRICES) for item in rng.sample(ITEMS, count)}
    return {
        "data_source": f"shop-{count}",
        "prompt": [{"role": "user", "content": ", ".join(prices)}],
        "ground_truth": str(sum(prices.values())),
        "extra_info": prices,
    }


def _served(prices: dict[str, int], items: list[str]) -> list[dict[str, Any]]:
    """Return the messages of an assistant that scans these items and answers with the total so far."""
    messages: list[dict[str, Any]] = []
    total = 0
    for item in items:
        total += prices[item]
        function = {"name": "scan", "arguments": json.dumps({"item": item})}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": str(total)},
        ]
    return [*messages, {"role": "assistant", "content": str(total)}]
