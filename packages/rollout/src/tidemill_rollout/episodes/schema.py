"""JSON schemas of the parameters of tools."""

import types
from typing import Any, Literal, Union, get_args, get_origin

_LEAVES = (str, int, float, bool, list, dict, Any, type(None))
_TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


def check_hint(name: str, hint: Any) -> None:
    """Raise a TypeError for a type hint that JSON cannot express, which `get_json_schema` would call an object."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (list, dict, Union, types.UnionType):
        for arg in args:
            check_hint(name, arg)
    elif origin is not Literal and hint not in _LEAVES:
        raise TypeError(f"the type hint {hint} of the parameter {name!r} is not supported")


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a JSON value fits a schema that `get_json_schema` made."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    names = schema.get("type", [])
    if isinstance(names, list):
        return not names or any(fits(value, {"type": name}) for name in names)
    if not isinstance(value, _TYPES[names]) or (isinstance(value, bool) and names != "boolean"):
        return False
    if isinstance(value, dict):
        return all(fits(item, schema.get("additionalProperties", {})) for item in value.values())
    return not isinstance(value, list) or all(fits(item, schema.get("items", {})) for item in value)
