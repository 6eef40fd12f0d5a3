"""An episode as a line of `rollouts.jsonl`."""

from typing import Any

import torch
from tidemill_dataproto import DataProto
from transformers import PreTrainedTokenizerBase

from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary

_VALUES = ("response_mask", "rollout_log_probs", "old_log_probs", "advantages")


def shown_records(episodes: Episodes, batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the records of the episodes of a step that are shown.

    Args:
        episodes: all episodes of the step.
        batch: rows of those that were trained; see `episode_record`.
        tokenizer: tokenizer that decodes the tokens.
    """
    dropped, others = episodes.dropped, episodes.dropped_rows
    shown = [summary for summary in episodes.summaries if summary.task.is_shown]
    return [episode_record(each, others if each.task.number in dropped else batch, tokenizer) for each in shown]


def episode_record(
    summary: EpisodeSummary, batch: DataProto | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return what the report shows of an episode, down to its tokens.

    Args:
        summary: the episode.
        batch: rows of the step, with the columns of `training_rows`, and in training `old_log_probs` and `advantages`;
            None without a row.
        tokenizer: tokenizer that decodes the tokens.

    Returns:
        `prompt` and `response` are the texts of the first row. A failed episode has no rows, and no score. In `rows`,
        `turns` are (context, sampled) token counts, whose sums cover all tokens in order, and `texts` the texts of both
        in each turn, where there are no `messages`; `response_mask`, log-probs and advantages have one entry per token
        after the prompt.
    """
    task, outcome = summary.task, summary.outcome
    own: list[DataProto] = []
    if batch is not None:
        numbers = torch.nonzero(batch["episode"] == task.number).flatten().tolist()
        own = [batch[[number]] for number in numbers]
    prompt = response = ""
    if own:
        prompt = tokenizer.decode(own[0]["prompts"].values())
        response = tokenizer.decode(own[0]["responses"].values(), skip_special_tokens=True)
    return {
        "episode": task.name,
        "data_source": task.problem.data_source,
        "prompt": prompt,
        "response": response,
        "ground_truth": task.problem.ground_truth,
        "score": outcome.reward if outcome.is_trainable else None,
        "acc": summary.acc if outcome.is_trainable else None,
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds": summary.seconds,
        "metrics": {**summary.counts, **outcome.metrics},
        "rows": [_row(row, tokenizer) for row in own],
    }


def _row(row: DataProto, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    ids = row["input_ids"].values().tolist()
    objects = {
        name: row.non_tensor_batch[name][0] for name in ("branch", "finish_reason", "versions", "turns", "messages")
    }
    texts, start = [], 0  # a character may have several tokens, so single tokens do not add up to the text
    for context, sampled in objects["turns"] if objects["messages"] is None else ():
        middle, end = start + context, start + context + sampled
        texts.append([tokenizer.decode(ids[start:middle]), tokenizer.decode(ids[middle:end])])
        start = end
    return {
        **objects,
        "texts": texts,
        "token_ids": ids,
        "tokens": [tokenizer.decode([token]) for token in ids],
        **{name: [round(value, 6) for value in row[name].values().tolist()] for name in _VALUES if name in row.batch},
    }
