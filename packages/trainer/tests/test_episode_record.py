from dataclasses import replace

from tidemill_rollout import EpisodeResult, Outcome, Problem, Trajectory
from tidemill_trainer.demo.addition import CHARACTERS
from tidemill_trainer.demo.model import piece_tokenizer
from tidemill_trainer.episode_record import shown_records
from tidemill_trainer.group_filter import GroupFilter, joined
from tidemill_trainer.rollout.episode_task import Episodes, EpisodeSummary, EpisodeTask
from tidemill_trainer.rollout.rows import training_rows

TOKENIZER = piece_tokenizer(CHARACTERS)


def episodes(*rewards, first=0):
    """Groups of two episodes with these rewards; each samples the digit of its group after "1+" and that digit."""
    results = []
    for number, reward in enumerate(rewards, start=first):
        problem, outcome = Problem(prompt="?", id=f"{number // 2}"), Outcome(reward=reward)
        prompt, reply = (TOKENIZER.encode(f"{text}{number // 2}", add_special_tokens=False) for text in ("1+", ""))
        row = Trajectory(
            token_ids=[*prompt, *reply],
            num_prompt_tokens=len(prompt),
            response_mask=[1],
            rollout_log_probs=[-1.0],
            versions=[("0", 1)],
            branch="main",
            finish_reason="stop",
            turns=[(len(prompt), 1)],
        )
        task = EpisodeTask(number=number, problem=problem, sample=number % 2, is_shown=number % 2 == 0)
        result = EpisodeResult(problem=problem, outcome=outcome, trajectories=[row], metrics={}, seconds=0.0)
        results.append((task, result))
    summaries = [EpisodeSummary(task=task, outcome=result.outcome) for task, result in results]
    rows = training_rows(results)
    return Episodes(rows=rows, summaries=summaries, num_generated=len(rows), num_lost=0, num_restarts=0)


def test_episodes_that_the_filter_drops_are_shown_with_their_tokens():
    rounds = joined([episodes(1, 1, 0, 1), episodes(1, 0, 0, 0, first=4)])
    chosen = GroupFilter(num_groups=1, group_size=2, metric="score").apply(rounds)
    assert chosen.rows is not None
    assert chosen.rows["episode"].tolist() == [2, 3]
    records = shown_records(chosen, chosen.rows, TOKENIZER)
    texts = [(record["episode"], record["prompt"], record["response"]) for record in records]
    assert texts == [(f"{group}/0", f"1+{group}", f"{group}") for group in range(4)]
    assert [len(record["rows"]) for record in records] == [1, 1, 1, 1]


def test_episode_without_a_row_is_shown_without_tokens():
    other = episodes(0, first=2).rows
    assert other is not None
    [record] = shown_records(replace(episodes(1), rows=None), other, TOKENIZER)
    assert (record["prompt"], record["response"], record["rows"], record["score"]) == ("", "", [], 1.0)
