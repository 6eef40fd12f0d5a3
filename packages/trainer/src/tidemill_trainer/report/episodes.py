"""Steps and their saved episodes as HTML that unfolds without scripts."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from tidemill_trainer.report.elements import plural, text_block
from tidemill_trainer.report.episode import Episode
from tidemill_trainer.report.turns import LEGEND, content_of, sequence_html

_NUM_TOKENS = 30_000  # in a report; a token takes about 100 bytes
_EXCERPT = 80  # characters


def step_anchor(step: float) -> str:
    return f"step-{step:g}"


def episodes_html(
    episodes: Sequence[Episode], num_saved: int, metrics: Mapping[int, Mapping[str, float | None]]
) -> str:
    """Return the steps with their episodes, each unfolding to its turns and tokens.

    Args:
        episodes: episodes to show.
        num_saved: number of episodes in `rollouts.jsonl`.
        metrics: metrics of each step.
    """
    if not episodes:
        return "<p>No episodes are saved; trainer.save_samples is the number per step.</p>"
    by_step: dict[int, list[Episode]] = defaultdict(list)
    for episode in episodes:
        by_step[episode.outcome.step].append(episode)
    max_tokens = _NUM_TOKENS // len(episodes)
    steps = "".join(_step(step, by_step[step], metrics.get(step, {}), max_tokens) for step in sorted(by_step))
    has_tokens = any(episode.sequences for episode in episodes)
    return (
        f"<p>{len(episodes)} of {plural(num_saved, 'saved episode')} are shown, of {plural(len(by_step), 'step')}. "
        "rollouts.jsonl has all of them, and trainer.save_samples is the number per step.</p>"
        f"{LEGEND if has_tokens else ''}{steps}"
    )


def _step(step: int, episodes: Sequence[Episode], metrics: Mapping[str, float | None], max_tokens: int) -> str:
    facts = [plural(len(episodes), "episode")]
    for name, key in (("mean reward", "critic/score/mean"), ("mean length", "response_length/mean")):
        if (value := metrics.get(key)) is not None:
            facts.append(f"{name} {value:.4g}")
    shown = "".join(_episode(episode, max_tokens) for episode in episodes)
    # A browser unfolds what contains the target of a link, so the anchor is inside.
    return (
        f'<details class="step"><summary><b>Step {step}</b> <small>{", ".join(facts)}</small></summary>'
        f'<div id="{step_anchor(step)}">{shown}</div></details>'
    )


def _episode(episode: Episode, max_tokens: int) -> str:
    outcome = episode.outcome
    score = "" if episode.score is None else f"{episode.score:g}"
    style = "good" if episode.acc is not None and episode.acc >= 1 else "score"
    status = "" if outcome.status == "ok" else f' <span class="bad">{escape(outcome.status)}</span>'
    num_turns = sum(len(row.turns) for row in episode.sequences)
    seconds = "" if outcome.seconds is None else f"{outcome.seconds:.2f} s"
    facts = filter(None, [outcome.data_source, plural(num_turns, "turn") if num_turns else "", seconds])
    return (
        f'<details class="episode"><summary><span class="{style}">{score}</span> {escape(episode.name)}{status} '
        f"<small>{escape(', '.join(facts))}</small>"
        f'<div class="excerpt">{escape(_excerpt(episode))}</div></summary>{_content(episode, max_tokens)}</details>'
    )


def _content(episode: Episode, max_tokens: int) -> str:
    parts = [text_block("reason", episode.outcome.reason)] if episode.outcome.reason else []
    if episode.sequences:
        parts += [sequence_html(row, max_tokens // len(episode.sequences)) for row in episode.sequences]
    else:
        parts += [text_block("prompt", episode.prompt), text_block("response", episode.response)]
    parts.append(text_block("ground truth", episode.ground_truth))
    if episode.outcome.metrics:
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in episode.outcome.metrics.items())
        parts.append(text_block("metrics", numbers))
    return "".join(parts)


def _excerpt(episode: Episode) -> str:
    """Return the ends of the question and of the last reply, in which episodes differ most."""
    if not episode.sequences and not episode.prompt:
        return episode.outcome.reason
    prompt, response = episode.prompt, episode.response
    turns = episode.sequences[0].turns if episode.sequences else []
    if turns and turns[0].messages and turns[-1].messages and len(turns[0].messages) > 1:
        prompt, response = content_of(turns[0].messages[-2]), content_of(turns[-1].messages[-1])
    prompt, response = (" ".join(text[-_EXCERPT:].split()) for text in (prompt, response))
    return f"{prompt} ⇒ {response}"
