"""How long SGLang is given until no request runs and its prefix cache can be emptied."""

DRAIN_S = 10.0
"""For a paused engine: what was aborted needs one more step."""

FLUSH_WAIT_FRACTION = 0.9
"""Of the wait for an answer, so that SGLang says itself that requests did not end."""
