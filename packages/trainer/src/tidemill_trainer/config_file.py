"""Reading a configuration from a TOML file and `key=value` arguments, and writing it to a file."""

import dataclasses
import json
import os
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tomli_w
import torch
from pydantic import TypeAdapter, ValidationError
from tidemill_engines.location import absolute, is_url, write_text

from tidemill_trainer.algorithm_config import AlgorithmConfig
from tidemill_trainer.algorithm_options import option_names
from tidemill_trainer.config import Config
from tidemill_trainer.config_keys import BACKENDS, SHORT, advice, names_of, section_in
from tidemill_trainer.doctor.facts import read_gpus
from tidemill_trainer.gpu_defaults import gpu_defaults
from tidemill_trainer.run_config import RunConfig
from tidemill_trainer.sft.config import SFTConfig

ConfigT = TypeVar("ConfigT", bound=RunConfig)
_DEFAULT_BACKEND = "fsdp2"
_SYMBOLS = {  # from pydantic's messages to shorter ones
    "Input should be": "must be",
    "greater than or equal to": ">=",
    "less than or equal to": "<=",
    "greater than": ">",
    "less than": "<",
}
_NOT_TOML = {  # words of Python and JSON, and what to do instead
    "True": "write true",
    "False": "write false",
} | dict.fromkeys(("None", "none", "null"), "leave the key out for its default")


class ConfigError(ValueError):
    """The configuration is invalid; the message names the key and the reason."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration of a run of reinforcement learning; see `read_config`."""
    return read_config(Config, path, overrides)


def read_config(
    kind: type[ConfigT],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    has_gpu: bool | None = None,
    num_gpus: float | None = None,
    device_bytes: float | None = None,
) -> ConfigT:
    """Read the configuration of a run. Keys that it leaves open have other defaults on GPUs; see `gpu_defaults`.

    Args:
        kind: type of the configuration.
        path: TOML file with one table per field of `kind`.
        overrides: "section.key=value", where value is TOML, or else a string; or the path of another TOML file, whose
            keys replace those before. Megatron's parallel sizes have the short names "engine.tp", "pp", "vpp", "cp",
            "ep" and "etp". A path may begin with "~".
        has_gpu: whether the device "auto" is a GPU; None: if this machine has one.
        num_gpus: GPUs of the cluster; None: those of this machine, times its nodes.
        device_bytes: memory of each GPU; None: what is free on those of this machine.

    Raises:
        ConfigError: the file does not exist or is not TOML, a key is unknown (the message suggests a known one), or a
            value is invalid.
    """
    data = _merged(path, overrides)
    has_gpu = torch.cuda.is_available() if has_gpu is None else has_gpu
    given = {f"{name}.{key}" for name, section in data.items() if isinstance(section, dict) for key in section}
    sections = {field.name for field in dataclasses.fields(kind) if isinstance(data.get(field.name, {}), dict)}
    found = gpu_defaults(data, has_gpu=has_gpu)
    _merge(data, {name: values for name, values in found.items() if name in sections})
    config = _with_paths(parse_config(kind, data), os.path.expanduser)
    if isinstance(config, Config) and has_gpu and config.engine.device != "cpu":
        if device_bytes is None:
            gpus = read_gpus(visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
            device_bytes = min((gpu.free_bytes for gpu in gpus), default=None)
        if device_bytes is not None:
            from tidemill_trainer.plan.micro_batches import with_micro_batches  # imports transformers

            num_gpus = float(torch.cuda.device_count() * config.trainer.nnodes) if num_gpus is None else num_gpus
            config = with_micro_batches(config, given, num_gpus, device_bytes)
    return config


def read_either_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    has_gpu: bool | None = None,
    num_gpus: float | None = None,
    device_bytes: float | None = None,
) -> Config | SFTConfig:
    """Read the configuration of a run of `tidemill sft`, if it has its keys, or else of reinforcement learning.

    Arguments and errors are those of `read_config`.
    """
    kind = SFTConfig if _has_sft_keys(_merged(path, overrides)) else Config
    return read_config(kind, path, overrides, has_gpu=has_gpu, num_gpus=num_gpus, device_bytes=device_bytes)


def _has_sft_keys(data: Mapping[str, Any]) -> bool:
    """Return whether a configuration has keys of `tidemill sft` alone, and no section of reinforcement learning."""
    if not data.keys() <= {*names_of(SFTConfig)}:
        return False
    own, others = get_type_hints(SFTConfig), get_type_hints(Config)
    return "dpo" in data or any(
        key in names_of(own[name]) and key not in names_of(others[name])
        for name in ("data", "trainer")
        if isinstance(data.get(name), dict)
        for key in data[name]
    )


def parse_config(kind: type[ConfigT], data: dict[str, Any]) -> ConfigT:
    """Validate nested dicts, as read from TOML, and convert them to a configuration.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid.
    """
    if kind is Config and isinstance(data.get("algorithm"), dict):
        data = data | {"algorithm": _with_options(data["algorithm"])}
    _check_keys(kind, kind, data, ())
    backend = data.get("engine", {}).get("backend", _DEFAULT_BACKEND)
    data = data | {"engine": {"backend": backend} | data.get("engine", {})}
    try:
        # Strict mode accepts a list for a tuple only in JSON. No key is a date, so a TOML date becomes text.
        return TypeAdapter(kind).validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        problems = [describe(_where(problem["loc"], backend), problem) for problem in error.errors()]
        raise ConfigError("\n".join(problems)) from error


def with_absolute_paths(config: ConfigT) -> ConfigT:
    """Resolve relative paths against the current directory, so that the config is valid in any other one."""
    return _with_paths(config, lambda path: str(Path(path).absolute()))


def _with_paths(config: ConfigT, change: Callable[[str], str]) -> ConfigT:
    """Apply `change` to every path of the configuration."""
    checkpoint_dir = config.trainer.checkpoint_dir
    if checkpoint_dir is not None:
        checkpoint_dir = absolute(checkpoint_dir) if is_url(checkpoint_dir) else change(checkpoint_dir)
    config = replace(
        config,
        model=replace(config.model, path=change(config.model.path)),
        data=replace(
            config.data,
            train_files=tuple(change(path) for path in config.data.train_files),
            val_files=tuple(change(path) for path in config.data.val_files),
        ),
        trainer=replace(config.trainer, run_dir=change(config.trainer.run_dir), checkpoint_dir=checkpoint_dir),
    )
    return _with_own_paths(config, change) if isinstance(config, Config) else config


def _with_own_paths(config: Config, change: Callable[[str], str]) -> Config:
    """Apply `change` to the paths that only a configuration of reinforcement learning has."""

    def changed(function: str) -> str:
        file, colon, attr = function.rpartition(":")
        return f"{change(file)}{colon}{attr}" if file.endswith(".py") else function

    return replace(
        config,
        algorithm=replace(
            config.algorithm,
            adv_estimator=changed(config.algorithm.adv_estimator),
            policy_loss=changed(config.algorithm.policy_loss),
        ),
        reference=replace(config.reference, path=_changed_path(config.reference.path, change)),
        critic=replace(config.critic, path=_changed_path(config.critic.path, change)),
        teacher=replace(config.teacher, path=_changed_path(config.teacher.path, change)),
        episode=replace(config.episode, function=changed(config.episode.function)),
        reward_model=replace(config.reward_model, path=_changed_path(config.reward_model.path, change)),
        reward=replace(config.reward, function=_changed_path(config.reward.function, changed)),
    )


def _changed_path(path: str | None, change: Callable[[str], str]) -> str | None:
    return None if path is None else change(path)


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Convert the config to nested dicts, without fields that are None, since TOML has no null."""
    data = _without_none(dataclasses.asdict(config))
    if isinstance(config, Config):
        data["algorithm"] |= data["algorithm"].pop("options")
    return data


def save_config(config: RunConfig, path: Path) -> None:
    """Write the whole config, so that `read_config(type(config), path)` returns an equal one.

    An older file remains until the new one is complete: on a full disk, a run must keep its configuration.
    """
    write_text(str(path), tomli_w.dumps(config_to_dict(config)))


def is_sft_config(path: Path) -> bool:
    """Return whether a file is a configuration of `tidemill sft` that `tidemill train` does not accept."""
    return _has_sft_keys(read_toml(path))


def is_config_file(argument: str) -> bool:
    """Return whether an argument of a command is the path of a TOML file instead of "section.key=value"."""
    return argument.endswith(".toml") and "=" not in argument


def _merged(path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a file and of overrides, which replace them."""
    data = read_toml(Path(path))
    for override in overrides:
        if is_config_file(override):
            _merge(data, read_toml(Path(override)))
        else:
            _apply(data, override)
    return data


def read_toml(path: Path) -> dict[str, Any]:
    """Return the keys of a configuration file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        hint = "the first argument must be a TOML file" if "=" in path.name else "check the path"
        raise ConfigError(f"config file {path.absolute()} does not exist; {hint}") from error
    except IsADirectoryError as error:
        raise ConfigError(
            f"expected a config file, got the folder {path.absolute()}; that of a run has the file config.toml"
        ) from error
    except OSError as error:
        raise ConfigError(f"config file {path.absolute()} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "" if path.suffix == ".toml" else f"; if it contains data, pass data.train_files='[\"{path}\"]'"
        raise ConfigError(f"config file {path} is not valid TOML in UTF-8: {error}{hint}") from error


def _merge(data: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = SHORT.get(key.strip(), key.strip())
    names = key.split(".")
    if not equals or not all(names):
        raise ConfigError(f"expected an argument of the form section.key=value, got {override!r}")
    value = _value(key, text)
    table = data
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"unknown config key {key}; {name} is a value, not a section")
    table[names[-1]] = value


def _with_options(algorithm: dict[str, Any]) -> dict[str, Any]:
    """Move the keys of the section that are options of functions to the field `options`.

    A function of the user may have any option, which is checked when the function is loaded.
    """
    if "options" in algorithm:
        raise ConfigError("unknown config key algorithm.options; write the options as keys of [algorithm]")
    own, known = names_of(AlgorithmConfig), option_names()
    is_open = any(":" in str(algorithm.get(key, "")) for key in ("adv_estimator", "policy_loss"))
    options = {key: value for key, value in algorithm.items() if key not in own and (is_open or key in known)}
    return {key: value for key, value in algorithm.items() if key not in options} | {"options": options}


def _check_keys(root: type, cls: type, data: Any, where: tuple[str, ...]) -> None:
    if not isinstance(data, dict):
        raise ConfigError(f"config key {'.'.join(where)} must be a table of keys, got {data!r}")
    hints = get_type_hints(cls)
    known = names_of(cls)
    for key, value in data.items():
        if key not in known:
            owners = [name for name, config in BACKENDS.items() if where == ("engine",) and key in names_of(config)]
            if owners:
                raise ConfigError(f'config key engine.{key} requires engine.backend="{owners[0]}"')
            raise ConfigError(f"unknown config key {'.'.join((*where, key))}; {advice(root, where, key, known)}")
        path = (*where, key)
        section = _engine_config(value) if path == ("engine",) else section_in(hints[key])
        if section is None:
            continue
        if isinstance(value, list) and path != ("engine",):
            for number, item in enumerate(value):
                _check_keys(root, section, item, (*path, str(number)))
        else:
            _check_keys(root, section, value, path)


def _engine_config(section: Any) -> type:
    backend = section.get("backend", _DEFAULT_BACKEND) if isinstance(section, dict) else _DEFAULT_BACKEND
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ConfigError(f"config key engine.backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return BACKENDS[backend]


def _where(loc: tuple[str | int, ...], backend: str) -> str:
    if loc[:2] == ("engine", backend):  # pydantic adds the backend
        loc = ("engine", *loc[2:])
    return ".".join(map(str, loc))


def describe(where: str, problem: Any) -> str:
    """Return the message of one error of pydantic about the key `where`, or about several keys if it is empty."""
    if problem["type"] == "missing":
        return f"config key {where} is required; set it in the file or on the command line"
    message = problem["msg"].removeprefix("Value error, ")
    if not where:  # a check across sections, whose message names the keys
        return message
    if problem["type"] == "value_error" and isinstance(problem["input"], dict):  # a check of a section
        return f"config key {where}: {message}"
    for words, symbol in _SYMBOLS.items():
        message = message.replace(words, symbol)
    hint = f"; write {_array_hint(where, problem['input'])}" if problem["type"] == "tuple_type" else ""
    return f"config key {where} {message}, got {problem['input']!r}{hint}"


def _array_hint(where: str, value: Any) -> str:
    """Return what to write instead of a value that is not an array, such as "[a.jsonl]" without its inner quotes."""
    if not isinstance(value, str) or not ({"[", "]", ","} & set(value)):
        return f"[{json.dumps(value)}]"
    texts = [text.strip() for text in value.strip().removeprefix("[").removesuffix("]").split(",")]
    items = ", ".join(json.dumps(_toml_value(text), default=str) for text in texts if text)
    return f"{shlex.quote(f'{where}=[{items}]')} on the command line; the outer quotes protect the inner ones"


def _value(key: str, text: str) -> Any:
    """Return the value of an argument. Words of Python and JSON would be texts in TOML, and "False" is a true value."""
    word = text.strip()
    remedy = _NOT_TOML.get(word)
    if remedy is None or (key, word) == ("algorithm.adv_estimator", "none"):
        return _toml_value(text)
    quoted = shlex.quote(f'{key}="{word}"')
    raise ConfigError(
        f"config key {key}: expected a value in TOML, got {word}; {remedy}, or write {quoted} for the text"
    )


def _toml_value(text: str) -> Any:
    """Return the value of a text in TOML, or else the text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return type(value)(_without_none(item) for item in value)
    return value
