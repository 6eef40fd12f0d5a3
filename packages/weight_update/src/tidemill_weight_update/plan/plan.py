"""Copy plans: what an engine does with each source tensor. Also on disk, so that an engine that starts again does not
record them again.
"""

import hashlib
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from tidemill_weight_update.copy.table import Copy
from tidemill_weight_update.tensors import SourceSpec


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements of `parameter` that loading sets to a constant, such as padding. Written before any copy.

    The elements are `offset + sum(i_d * strides[d])` for all `i` below `shape`, relative to `data_ptr()`.
    """

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What `load_weights` does with its sources, as data.

    Attributes:
        copies: copies, each element of a parameter is written by at most one of them.
        fills: constants, written before the first copy.
        through_loader: name -> reason, for sources whose loading is more than copies. They have no copies; pass all of
            them, in this order, to one call of the model's own `load_weights` after the copies.
        converted: names in `through_loader` that loading would cast between integers and floating-point numbers.
        uncovered: parameter -> number of elements that nothing writes.
    """

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...] = ()
    through_loader: dict[str, str] = field(default_factory=dict)
    converted: tuple[str, ...] = ()
    uncovered: dict[str, int] = field(default_factory=dict)


logger = logging.getLogger(__name__)

_SIMPLE = (bool, int, float, str, torch.dtype, type(None))
_OPAQUE = (nn.Module, torch.Tensor, type, ModuleType)


class StoredPlans:
    """Plans of one model in `tidemill/plans` in `$XDG_CACHE_HOME` or `~/.cache`, one file for each list of sources.

    A plan is used again only for equal sources, parameters (names, shapes, strides, dtypes), attributes of all modules
    (numbers, strings and dtypes, also in lists, in dicts and in the attributes of an object), and code: of the classes
    of modules and parameters, and of this package.

    Args:
        model: model with a `load_weights`.
        identity: what else the plan depends on: a list with the version of the library that loads, the rank, and the
            model's config. The folder of a checkpoint (`_name_or_path`) does not count.
    """

    def __init__(self, model: nn.Module, identity: Sequence[object]) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = cache / "tidemill" / "plans"
        self._model = model
        self._identity = [torch.__version__, *map(_plain, identity)]

    def get(self, sources: Sequence[SourceSpec], record: Callable[[], CopyPlan]) -> CopyPlan:
        """Return the plan of these sources, in this order: the stored one, or the result of `record`, which is stored.

        A damaged file, and a folder that cannot be written, are logged and otherwise the same as no file.
        """
        try:
            path = self._path(sources)  # before recording, which may change attributes
        except OSError as error:
            logger.warning("cannot store the plan: the code of the model cannot be read: %s", error)
            return record()
        plan = _read(path)
        if plan is None:
            plan = record()
            _write(path, plan)
        return plan

    def _path(self, sources: Sequence[SourceSpec]) -> Path:
        digest = hashlib.sha256()
        for line in (*self._identity, *_description(self._model), *((s.name, s.shape, s.dtype) for s in sources)):
            digest.update(f"{line}\n".encode())
        return self._folder / f"{type(self._model).__name__}-{digest.hexdigest()[:32]}.pickle"


def _read(path: Path) -> CopyPlan | None:
    try:
        digest, _, text = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(text).hexdigest().encode() != digest:
        logger.warning("the stored plan %s is damaged; it is recorded again", path)
        return None
    return pickle.loads(text)


def _write(path: Path, plan: CopyPlan) -> None:
    text = pickle.dumps(plan)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder, path.name)
            new.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
            os.replace(new, path)  # an engine that starts now reads a whole file or none
    except OSError as error:
        logger.warning("cannot store the plan %s: %s", path, error)


def _description(model: nn.Module) -> Iterator[object]:
    """Yield everything of a model that its loading code may depend on, except values of tensors."""
    classes = {type(module) for module in model.modules()} | {type(p) for p in model.parameters()}
    modules = {sys.modules.get(base.__module__) for each in classes for base in each.__mro__}
    paths = {getattr(module, "__file__", None) for module in modules}
    for path in sorted(filter(None, paths)) + sorted(map(str, Path(__file__).parents[1].rglob("*.py"))):
        yield Path(path).name, hashlib.sha256(Path(path).read_bytes()).hexdigest()
    for name, module in model.named_modules():
        yield name, type(module).__qualname__, _plain(vars(module))
    storages: dict[int, int] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        storage = storages.setdefault(p.untyped_storage()._cdata, len(storages))
        yield name, tuple(p.shape), p.stride(), p.dtype, storage, p.storage_offset(), _plain(vars(p))


def _plain(value: object, *, opens_objects: bool = True) -> object:
    """Return numbers, strings and dtypes as they are, also in lists, in dicts and, if `opens_objects`, in attributes of
    an object; of other objects only the type.
    """
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each, opens_objects=opens_objects) for each in value]
    if isinstance(value, dict):
        items = sorted((str(key), each) for key, each in value.items() if key != "_name_or_path")
        return {key: _plain(each, opens_objects=opens_objects) for key, each in items}
    if opens_objects and hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
        return type(value).__qualname__, _plain(vars(value), opens_objects=False)
    return type(value).__qualname__
