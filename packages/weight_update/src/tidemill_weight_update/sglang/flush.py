"""Timeouts for emptying SGLang's prefix cache, which requires that no request runs."""

DRAIN_S = 10.0
"""For a paused engine: aborted requests need one more step."""

FLUSH_WAIT_FRACTION = 0.9
"""Fraction of the client's timeout, so that SGLang reports by itself that requests did not finish."""
