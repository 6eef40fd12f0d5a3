import numpy as np
import pytest
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_rollout import Generation, Outcome, Problem
from tidemill_rollout.session import request_seed
from tidemill_trainer.mismatch import MismatchError
from tidemill_trainer.replay.generation import compare, segments_of
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary, EpisodeTask


def _objects(values):
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _episodes(numbers, turns, versions, **counts):
    """One row per number, with a prompt of 2 tokens; the tokens of a row are 0, 1, 2, ..."""
    length = sum(context + sampled for context, sampled in turns)
    count = len(numbers)
    prompts = ragged.ragged(torch.arange(2).repeat(count), [2] * count)
    responses = ragged.ragged(torch.arange(2, length).repeat(count), [length - 2] * count)
    columns = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": ragged.concat_rows(prompts, responses),
        "rollout_log_probs": ragged.like(-torch.arange(2.0, length).repeat(count), responses),
        "episode": torch.tensor(numbers),
    }
    objects = {"turns": _objects([tuple(turns)] * count), "versions": _objects([tuple(versions)] * count)}
    sampled = float(sum(number for _, number in versions))
    counts = {"num_sampled_tokens": sampled, "num_unused_tokens": 0.0} | counts
    summaries = [
        EpisodeSummary(
            task=EpisodeTask(number=number, problem=Problem(prompt="", id=f"p{number}"), seed=11),
            outcome=Outcome(reward=1.0),
            counts=counts,
        )
        for number in sorted(set(numbers))
    ]
    rows = DataProto.from_dict(columns, objects)
    return Episodes(rows=rows, summaries=summaries, num_generated=0, num_lost=0, num_restarts=0)


def test_segments_are_the_parts_of_each_reply_by_version():
    """The first reply has 3 tokens, of which version 5 sampled 2; the second one has 2, after a tool result."""
    found = list(segments_of(7, _episodes([4], [(2, 3), (1, 2)], [("5", 2), ("6", 3)])))
    assert [(each.version, each.prefix, each.token_ids) for each in found] == [
        (5, [0, 1], [2, 3]),
        (6, [0, 1, 2, 3], [4]),
        (6, [0, 1, 2, 3, 4, 5], [6, 7]),
    ]
    assert [each.log_probs for each in found] == [[-2.0, -3.0], [-4.0], [-6.0, -7.0]]
    assert [each.seed for each in found] == [11, 11, request_seed(11, 1)]
    assert found[1].where == "step 7, episode p4/0, token 2 of reply 0"


def test_episodes_whose_requests_are_not_recorded_in_order_are_left_out():
    turns, versions = [(2, 3)], [("5", 3)]
    assert list(segments_of(7, _episodes([4, 4], turns, versions))) == []
    assert list(segments_of(7, _episodes([4], turns, versions, num_unused_tokens=1.0))) == []
    assert list(segments_of(7, _episodes([4], turns, versions, num_requests=len(turns) + 1.0))) == []
    assert list(segments_of(7, _episodes([4], turns, versions, num_sampled_tokens=9.0))) == []
    assert len(list(segments_of(7, _episodes([4, 5], turns, versions)))) == 2


def test_different_tokens_and_log_probs_are_errors_that_name_the_reply():
    [segment] = segments_of(7, _episodes([4], [(2, 3)], [("5", 3)]))

    def generation(ids, log_probs):
        return Generation(token_ids=ids, log_probs=log_probs, finish_reason="length", versions=[("5", len(ids))])

    assert compare(segment, generation([2, 3, 4], [-2.0, -3.0, -4.0])) == 0.0
    message = (
        r"step 7, episode p4/0, token 0 of reply 0, sampled by version 5: after 2 tokens, expected \[4\], got \[9\]"
    )
    with pytest.raises(MismatchError, match=message):
        compare(segment, generation([2, 3, 9], [-2.0, -3.0, -4.0]))
    with pytest.raises(MismatchError, match=r"after 2 tokens, expected \[4\], got \[\]"):
        compare(segment, generation([2, 3], [-2.0, -3.0]))
    with pytest.raises(MismatchError, match=r"sampled by version 5: log-probs differ by 0.5, more than 0.001"):
        compare(segment, generation([2, 3, 4], [-2.0, -3.5, -4.0]))
