"""Problems: what their samples share."""

from tidemill_rollout import Problem


def test_samples_do_not_see_each_other_s_edits_of_the_messages():
    problem = Problem(prompt=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    messages = problem.messages
    messages[0]["content"][0]["text"] += "!"
    messages[0]["role"] = "system"
    assert problem.messages == [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
