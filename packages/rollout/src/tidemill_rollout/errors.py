"""The errors that an episode can meet or raise."""

from typing import Any


class EngineError(RuntimeError):
    """The engine failed, timed out, or returned tokens that cannot be trained on."""


class EngineDiedError(EngineError):
    """The engine is dead or cannot be reached, so another engine can process the same request."""


class EngineClosedError(EngineDiedError):
    """The engine had stopped before the request reached it."""


class ModelError(RuntimeError):
    """Raised by an episode when the model made it impossible to continue, such as by an invalid answer format.

    The outcome is "model_error" with a reward of 0, and the episode is trained on. Every other exception except
    `LimitError` is a failure of the environment, which is never trained on.
    """


class LimitError(RuntimeError):
    """The session has reached a limit. An episode that does not catch it is "truncated".

    Attributes:
        limit: "length" or "turns".
    """

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.limit, str(self))  # by default, with the message alone


class SessionEndedError(RuntimeError):
    """The session was used after its episode had ended."""


class TemplateError(ValueError):
    """The chat template rejects the messages, or ignores the tools or a variable."""


def short(value: Any) -> str:
    """Return a value as text for an error message, of at most 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
