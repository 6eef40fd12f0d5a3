"""Stop strings of requests that weight updates interrupt: SGLang looks for them in each part alone."""

import base64

import numpy as np
import pytest
from tidemill_rollout import Generation
from tidemill_rollout.sglang import _first, end_at_stop

TEXT = "the answer is forty-two</s> what is the weather today"


@pytest.mark.parametrize("stop", [("two</s>",), ("s> w", "never"), ("é",)])
def test_stop_string_is_found_wherever_the_request_was_interrupted(tokenizer, stop):
    ids = tokenizer.encode(TEXT.replace("weather", "wéather"), add_special_tokens=False)
    ends = [end for end in range(len(ids) + 1) if any(each in tokenizer.decode(ids[:end]) for each in stop)]
    for last in range(2, ends[0]):  # a part that has all of the stop string ends with it
        found = end_at_stop([ids[:1], ids[1:last], ids[last:]], stop, tokenizer.decode)
        assert found in (None, ends[0])
        if not any(each in tokenizer.decode(ids[last : ends[0]]) for each in stop):
            assert found == ends[0], last


def test_nothing_is_found_without_a_stop_string(tokenizer):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert end_at_stop([ids[:5], ids[5:]], ("</t>",), tokenizer.decode) is None


def test_first_tokens_have_their_versions_and_experts():
    experts = np.arange((3 + 5 - 1) * 2 * 2, dtype=np.int32)
    whole = Generation(
        token_ids=[4, 5, 6, 7, 8],
        log_probs=[-0.1, -0.2, -0.3, -0.4, -0.5],
        finish_reason="length",
        versions=[("1", 2), ("2", 2), ("3", 1)],
        extra={"routed_experts": base64.b64encode(experts.tobytes()).decode()},
    )
    first = _first(whole, 3, num_before=3)
    assert (first.token_ids, first.log_probs, first.finish_reason) == ([4, 5, 6], [-0.1, -0.2, -0.3], "stop")
    assert first.versions == [("1", 2), ("2", 1)]
    kept = np.frombuffer(base64.b64decode(first.extra["routed_experts"]), np.int32)
    assert np.array_equal(kept, experts[: (3 + 3 - 1) * 4])
