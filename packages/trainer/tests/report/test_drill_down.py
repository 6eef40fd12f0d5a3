import json
import math
import re
from html import unescape
from html.parser import HTMLParser

import pytest
from tidemill_trainer.report import write_report

_TAGS = (
    "a b body circle details div h1 h2 h3 h4 h5 head html i line meta p path polyline pre rect section small span "
    "style summary sup svg table tbody td text th thead title tr tspan"
)
_EVIL = (
    "<script>alert(1)</script></script></style></details><img src=x onerror=alert(1)> \"'&amp; \u2028\u2029 \u202e\x00 "
    "数学 🎲"
)


class _Page(HTMLParser):
    """Collects tags, attributes, ids and link targets, and fails at unbalanced tags."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.ids, self.links, self._open = set(), set(), set(), set(), []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.ids |= {value for name, value in attributes if name == "id"}
        self.links |= {value for name, value in attributes if name == "href"}
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self._open.pop()

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


def report(run):
    write_report(run)
    return run.report.read_text(encoding="utf-8")


def text_of(html):
    return unescape(re.sub(r"<[^>]*>", "", html))


def tokens_of(page):
    """Return class, title and text of each token."""
    parts = re.findall(r'<div class="text tokens">(.*?)</div>', page, re.DOTALL)
    found = re.findall(r'<i(?: class="([^"]*)")? title="([^"]*)">(.*?)</i>', "".join(parts), re.DOTALL)
    return [(kind, unescape(title), unescape(text).replace("↵", "")) for kind, title, text in found]


def test_everything_in_a_run_is_escaped(run, sample_line, failed_line):
    line = sample_line(1, 0, _EVIL, tool_name=_EVIL, results=(_EVIL, _EVIL), answer=_EVIL)
    line |= {"ground_truth": _EVIL, "data_source": _EVIL, "episode": _EVIL, "metrics": {_EVIL: 1.0}}
    row = line["rows"][0]
    row |= {"branch": _EVIL, "finish_reason": _EVIL, "versions": [[_EVIL, sum(row["response_mask"])]]}
    row["messages"][1]["name"] = _EVIL
    row["messages"][0] = {"role": _EVIL, "content": [{"type": "text", "text": _EVIL}], "reasoning_content": _EVIL}
    single_turn = {"step": 2, "prompt": _EVIL, "response": _EVIL, "ground_truth": _EVIL, "score": 0.0, "acc": 0.0}
    run.append_rollouts([line, failed_line(1, 1, _EVIL, _EVIL, _EVIL), single_turn])
    run.append_forks([{"step": 1, "episode": _EVIL, "reason": _EVIL, "expected": _EVIL, "received": _EVIL}])
    names = (f"episode/status/{_EVIL}", f"episode/reason/{_EVIL}", f"episode/{_EVIL}/seconds/mean", f"ledger/x/{_EVIL}")
    run.append_metrics({"step": 1, "phase": "rl", **dict.fromkeys((*names, f"rollout/num_forks/{_EVIL}"), 1.0)})
    run.config.write_text(_EVIL)
    page = report(run)
    parsed = _Page(page)
    assert parsed.tags <= set(_TAGS.split())
    assert not any(name.startswith("on") or name == "src" for name in parsed.attributes)
    assert all(re.fullmatch(r"#step-\d+", link) for link in parsed.links)
    assert "url(" not in page
    assert page.count(_EVIL[:8]) == 0
    assert text_of(page).count(_EVIL) >= 20


def test_half_of_a_surrogate_pair_in_a_response_is_shown_as_an_escape(run, sample_line):
    run.append_rollouts([sample_line(1, 0, answer="a\ud83d")])
    assert "a\\ud83d" in report(run)


def test_charts_link_to_the_steps_with_saved_episodes(run, sample_line):
    for step in range(1, 31):
        run.append_metrics({"step": step, "phase": "rl", "critic/score/mean": step / 30, "actor/entropy": 0.5})
        run.append_rollouts([sample_line(step, sample) for sample in range(8)])
    page = report(run)
    parsed = _Page(page)
    assert len(parsed.links) == 5
    assert parsed.links == {f"#{name}" for name in parsed.ids}
    assert {"#step-1", "#step-30"} <= parsed.links
    assert "<title>step 30: mean 1</title>" in page
    assert "40 of 240 saved episodes are shown, of 5 steps." in page


def test_episode_shows_messages_tool_calls_and_results_turn_by_turn(run, sample_line):
    run.append_rollouts([sample_line(3, 1)])
    page = report(run)
    shown = re.sub(r"<details><summary>Tokens.*?</details>", "", page, flags=re.DOTALL)
    expected = ["What is 17*23+4?", "Turn 1", "You may call", "What is 17*23+4?", "I calculate.", "tool call"]
    expected += ['calculator {"expression": "17*23"}', "Turn 2", "tool", "391", '{"expression": "391+4"}']
    expected += ["Turn 3", "395", "The answer is 395.", "ground truth", "395", "num_sampled_tokens"]
    text, place = text_of(shown[shown.index("<h2>Episodes") :]), 0
    for part in expected:
        assert part in text[place:], part
        place = text.index(part, place) + len(part)
    assert "3-17/1" in text
    assert "sums with tools, 3 turns, 1.25 s" in text


def test_every_token_is_shown_with_its_numbers(run, sample_line):
    line = sample_line(3, 1, versions=[["2", 50], ["3", 49]])
    run.append_rollouts([line])
    row = line["rows"][0]
    page = report(run)
    tokens = tokens_of(page)
    assert [text for _, _, text in tokens] == row["tokens"]
    start = len(tokens) - len(row["response_mask"])
    assert [kind.startswith("m") for kind, _, _ in tokens] == [False] * start + [bool(m) for m in row["response_mask"]]
    trained = [place for place, mask in enumerate(row["response_mask"]) if mask]
    for number in (0, 49, 50):
        place = trained[number]
        assert tokens[start + place][1] == (
            f"id {row['token_ids'][start + place]}, rollout {row['rollout_log_probs'][place]:.4g}, training "
            f"{row['old_log_probs'][place]:.4g}, advantage 0.75, version {2 if number < 50 else 3}"
        )
    assert tokens[0][1] == f"id {row['token_ids'][0]}"
    assert re.findall("<sup>(.*?)</sup>", page) == ["v2", "v2", "v3", "v3"]  # at each reply and where it changes


@pytest.mark.parametrize(
    ("rollout", "training", "kind"),
    [
        (-1.0, -1.01, "m d0"),
        (-1.0, -1.05, "m d1"),
        (-1.0, -1.2, "m d2"),
        (-1.0, -3.0, "m d3"),
        (math.nan, -1.0, "m d3"),
    ],
)
def test_color_of_a_token_is_the_difference_of_its_log_probs(run, sample_line, rollout, training, kind):
    line = sample_line(1, 0)
    row = line["rows"][0]
    row["rollout_log_probs"], row["old_log_probs"] = (
        [value] * len(row["response_mask"]) for value in (rollout, training)
    )
    run.append_rollouts([line])
    assert {found for found, _, _ in tokens_of(report(run)) if found} == {kind}


def test_row_without_messages_and_training_log_probs_shows_its_text(run, sample_line):
    line = sample_line(1, 0)
    row = line["rows"][0]
    row["messages"] = None
    row["texts"] = [["the <question>", "数学 🎲"], *[["", ""]] * (len(row["turns"]) - 1)]
    del row["old_log_probs"], row["advantages"]
    run.append_rollouts([line])
    page = report(run)
    assert {kind for kind, _, _ in tokens_of(page) if kind} == {"m"}
    assert "the <question>" in text_of(page)
    assert "数学 🎲" in page


def test_replies_in_the_prompt_belong_to_the_first_turn(run, sample_line):
    line = sample_line(1, 0)
    messages = line["rows"][0]["messages"]
    messages[1:1] = [{"role": "user", "content": "example"}, {"role": "assistant", "content": "example reply"}]
    run.append_rollouts([line])
    text = text_of(report(run))
    assert text.index("Turn 1") < text.index("example reply") < text.index("Turn 2")


def test_tool_call_in_the_prompt_may_have_no_arguments(run, sample_line):
    line = sample_line(1, 0)
    calls = [{"type": "function", "function": {"name": "get_time"}}]  # which tidemill_rollout.messages accepts
    line["rows"][0]["messages"][1:1] = [{"role": "assistant", "content": "", "tool_calls": calls}]
    run.append_rollouts([line])
    assert "get_time" in text_of(report(run))


def test_long_reply_is_cut_in_the_middle_so_that_the_report_stays_small(run, sample_line):
    line = sample_line(1, 0, answer=f"first {'word ' * 10_000}last")
    run.append_rollouts([line])
    page = report(run)
    row = line["rows"][0]
    shown = [text for _, _, text in tokens_of(page)]
    assert shown[:100] + shown[-100:] == row["tokens"][:100] + row["tokens"][-100:]
    [num_left_out] = re.findall(r"… (\d+) more tokens …", page)
    assert len(shown) + int(num_left_out) == len(row["tokens"])
    assert len(shown) < 6_000


def test_failed_episode_shows_status_and_reason(run, failed_line):
    run.append_rollouts([failed_line(1, 2, "environment_error", "ToolTimeout: no answer within 5 s")])
    text = text_of(report(run))
    assert "1-17/2 environment_error" in text
    assert "ToolTimeout: no answer within 5 s" in text


def test_report_of_a_resumed_run_has_no_forks_of_removed_steps(run):
    for step in (1, 2):
        run.append_forks([{"step": step, "episode": "x", "reason": f"r{step}", "expected": "a", "received": "b"}])
    run.remove_after(1)
    page = report(run)
    assert "r1" in page
    assert "r2" not in page
    assert json.loads(run.forks.read_text())["step"] == 1
