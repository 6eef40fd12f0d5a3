"""The generation side of a replay: engines sample recorded tokens again, from what came before them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import ray
import torch
from tidemill_rollout import Generation
from tidemill_rollout.session import request_seed

from tidemill_trainer.batch_record import BatchRecord
from tidemill_trainer.config import Config
from tidemill_trainer.mismatch import MismatchError
from tidemill_trainer.progress import Progress
from tidemill_trainer.rollout.engines import Engines
from tidemill_trainer.rollout.episode_task import Episodes
from tidemill_trainer.rollout.episode_worker import session_config
from tidemill_trainer.run_dir import RunDir

_MAX_LOG_PROB_DIFF = 1e-3
"""Largest difference of a log-prob: a prefix that was decoded token by token is now computed at once, in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Tokens of one reply that were sampled by one version of the weights.

    Attributes:
        where: step, episode and position in the reply, for messages.
        version: version of the weights.
        prefix: all tokens before them.
        token_ids, log_probs: the tokens and their log-probs.
        seed: seed of the request.
    """

    where: str
    version: int
    prefix: list[int]
    token_ids: list[int]
    log_probs: list[float]
    seed: int


def segments_of(step: int, episodes: Episodes) -> Iterator[Segment]:
    """Yield the segments of all episodes whose requests are known: those with one row that has all sampled tokens.

    Args:
        step: number of the step, for messages.
        episodes: episodes of the record.
    """
    rows = episodes.rows
    assert rows is not None
    numbers = rows["episode"].tolist()
    num_rows = Counter(numbers)
    summaries = {summary.task.number: summary for summary in episodes.summaries}
    columns = [rows[name].unbind() for name in ("input_ids", "prompts", "rollout_log_probs")]
    objects = [rows.non_tensor_batch[name] for name in ("turns", "versions")]
    for number, ids, prompt, log_probs, turns, versions in zip(numbers, *columns, *objects, strict=True):
        task, counts = summaries[number].task, summaries[number].counts
        is_complete = counts["num_sampled_tokens"] == sum(count for _, count in versions)
        all_are_turns = counts.get("num_requests", len(turns)) == len(turns)  # which have the seeds of their numbers
        if task.seed is None or num_rows[number] > 1 or not (is_complete and all_are_turns):
            continue
        if counts["num_unused_tokens"] > 0:
            continue
        tokens, values = ids.tolist(), [0.0] * len(prompt) + log_probs.tolist()
        for first, count, version, turn, start in _spans(turns, versions):
            end = first + count
            yield Segment(
                where=f"step {step}, episode {task.name}, token {first - start} of reply {turn}",
                version=version,
                prefix=tokens[:first],
                token_ids=tokens[first:end],
                log_probs=values[first:end],
                seed=request_seed(task.seed, turn),
            )


def _spans(
    turns: Sequence[tuple[int, int]], versions: Sequence[tuple[str, int]]
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield position, length, version, turn and start of the turn for each part of a turn of one version.

    Args:
        turns: context and sampled tokens of each turn.
        versions: runs of (version, number of tokens) over all sampled tokens.
    """
    runs = [[int(version), count] for version, count in versions]
    position = 0
    for turn, (context, sampled) in enumerate(turns):
        position += context
        start, end = position, position + sampled
        while position < end:
            count = min(runs[0][1], end - position)
            yield position, count, runs[0][0], turn, start
            position += count
            runs[0][1] -= count
            if runs[0][1] == 0:
                runs.pop(0)


class GenerationReplay:
    """Sample the tokens of each version again when the weights have that version.

    Args:
        config: configuration of the run.
        run: folder of the run.
        steps: numbers of the steps that are repeated.
        engines: engines, connected with the training workers.
        progress: terminal output.
    """

    def __init__(
        self,
        config: Config,
        run: RunDir,
        steps: range,
        engines: Engines,
        progress: Progress,
    ) -> None:
        self._config = config
        self._record = BatchRecord(run.batches)
        self._steps = steps
        self._engines = engines
        self._progress = progress

    def run(self, version: int) -> None:
        """Update the engines and compare the tokens of a version, in all steps that have some.

        Raises:
            MismatchError: a token differs, or a log-prob by more than 1e-3.
        """
        self._engines.update_weights(version)
        self._engines.resume()
        last = min(version + 1 + self._config.rollout.max_staleness, self._steps[-1])
        segments = [
            segment
            for step in range(version + 1, last + 1)
            for segment in segments_of(step, self._record.load(step).episodes)
            if segment.version == version
        ]
        generations = self._generate(segments)
        self._engines.release()
        largest = max(map(compare, segments, generations), default=0.0)
        num_tokens = sum(len(segment.token_ids) for segment in segments)
        self._progress.info(
            f"version {version}: equal ({num_tokens} tokens in {len(segments)} parts of replies are sampled again; "
            f"log-probs differ by at most {largest:.1g})"
        )

    def _generate(self, segments: Sequence[Segment]) -> list[Generation]:
        sampling = session_config(self._config).sampling
        requests = [
            (segment.prefix, replace(sampling, max_tokens=len(segment.token_ids), seed=segment.seed))
            for segment in segments
        ]
        workers = list(self._engines.workers.values())
        calls = [worker.generate.remote(requests[rank :: len(workers)]) for rank, worker in enumerate(workers)]
        results = [iter(part) for part in ray.get(calls)]
        return [next(results[number % len(workers)]) for number in range(len(segments))]


def compare(segment: Segment, generation: Generation) -> float:
    """Return the largest difference of a log-prob.

    Raises:
        MismatchError: a token differs, or a log-prob by too much.
    """
    before, after = segment.token_ids, list(generation.token_ids)
    if before != after:
        pairs = zip(before, after, strict=False)
        position = next((n for n, (old, new) in enumerate(pairs) if old != new), min(len(before), len(after)))
        raise MismatchError(
            f"{segment.where}, sampled by version {segment.version}: after {position} tokens, expected "
            f"{before[position : position + 5]}, got {after[position : position + 5]}"
        )
    pair = torch.tensor([segment.log_probs, list(generation.log_probs)], dtype=torch.float64)
    largest = (pair[0] - pair[1]).abs().max().item()
    if not largest <= _MAX_LOG_PROB_DIFF:
        raise MismatchError(
            f"{segment.where}, sampled by version {segment.version}: log-probs differ by {largest:.2g}, more than "
            f"{_MAX_LOG_PROB_DIFF:g}"
        )
    return largest
