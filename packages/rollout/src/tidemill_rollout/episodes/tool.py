"""A Python function that the model can call."""

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any, get_type_hints

from transformers.utils.chat_template_utils import get_json_schema

from tidemill_rollout.episodes.schema import check_hint, fits
from tidemill_rollout.thread import call


class ToolError(RuntimeError):
    """A call failed; the message is for the model."""


class Tool:
    """A function whose type hints and Google-style docstring become an OpenAI tool schema.

    Args:
        function: with or without `async`; parameters of str, int, float, bool, list[...], dict[str, ...], Literal,
            Optional or a union of these, each described in the docstring.

    Raises:
        TypeError: a parameter has no type hint, an unsupported one or no description.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self._function = function
        try:
            parameters = inspect.signature(function).parameters.values()
            for parameter in parameters:
                if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    raise TypeError(f"the parameter {parameter} cannot be passed by name")
            for name, hint in get_type_hints(function).items():
                if name != "return":
                    check_hint(name, hint)
            self.schema: dict[str, Any] = get_json_schema(function)
        except Exception as error:  # get_json_schema has its own classes of errors
            raise TypeError(f"cannot make a tool of the function {self.name}: {error}") from error
        self.schema["function"].pop("return", None)  # not part of OpenAI's format
        self._parameters = self.schema["function"]["parameters"]

    async def __call__(self, arguments: str, timeout_s: float) -> str:
        """Call the function with arguments as JSON text and return its result as text.

        Raises:
            ToolError: the arguments do not fit, the function raised, or it returned nothing in time.
        """
        values = self._check(arguments)
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                result = await call(self._function, **values)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except (Exception, SystemExit) as error:  # a tool may call exit()
            message = f"no result within {timeout_s:g} s" if limit.expired() else f"{type(error).__name__}: {error}"
            raise ToolError(f"{self.name} failed: {message}") from error

    def _check(self, arguments: str) -> dict[str, Any]:
        expected = f"{self.name} expects a JSON object that fits {json.dumps(self._parameters, ensure_ascii=False)}"
        try:
            values = json.loads(arguments)
        except ValueError as error:
            raise ToolError(f"{expected}, got invalid JSON: {error}") from error
        if not isinstance(values, dict) or not all(name in values for name in self._parameters.get("required", ())):
            raise ToolError(f"{expected}, got {arguments}")
        for name, value in values.items():
            if name not in self._parameters["properties"] or not fits(value, self._parameters["properties"][name]):
                raise ToolError(f"{expected}, got {name}={json.dumps(value, ensure_ascii=False)}")
        return values
