"""Recording: a model's own `load_weights`, run on tensors without data, becomes a copy plan."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from tidemill_weight_update.plan.coverage import left_to_loader, survey
from tidemill_weight_update.plan.plan import CopyPlan, Fill
from tidemill_weight_update.plan.traced import Traced, Watch
from tidemill_weight_update.plan.tracer import Tracer
from tidemill_weight_update.tensors.spec import SourceSpec


def record(model: nn.Module, sources: Sequence[SourceSpec]) -> CopyPlan:
    """Runs `model.load_weights` on `sources` without data and notes what it copies where.

    No parameter is written, and they may be on the meta device. Give all sources at once: some are loaded together.

    The tensors that loading gets say that they are on the meta device, because SGLang hands CPU tensors to other
    threads. Copies of sources are noted in any thread, but constants that another thread writes to a parameter cannot
    be held back. What loading computes from parameters, such as MLA's absorbed matrices, comes out as it was, because
    these have not changed; see `finish_load`.

    Raises:
        ValueError: a source comes twice.
        RuntimeError: `load_weights` failed, did what cannot be followed without data, or gave a parameter other
            memory.
    """
    specs = {spec.name: spec for spec in sources}
    if len(specs) != len(sources):
        names = [spec.name for spec in sources]
        raise ValueError(
            f"each source may come once, got twice: {sorted({n for n in names if names.count(n) > 1})[:5]}"
        )
    parameters = dict(model.named_parameters())
    data = {name: parameter.data for name, parameter in parameters.items()}
    tracer = Tracer(data)
    progress = _Progress(sources, tracer)
    what = f"{type(model).__name__}.load_weights"
    try:
        with Watch(tracer):
            model.load_weights(progress.named_tensors())  # pyright: ignore[reportCallIssue]
    except Exception as error:
        raise RuntimeError(f"{what} failed {progress.where()}: {type(error).__name__}: {error}") from error
    finally:
        moved = _put_back(parameters, data)
    now = dict(model.named_parameters())
    moved += [name for name in now.keys() | parameters.keys() if now.get(name) is not parameters.get(name)]
    if moved:
        raise RuntimeError(
            f"{what} gave {moved[0]!r} (one of {len(moved)}) other memory or another shape: the engine keeps its "
            f"weights in a layout that is not the one it loads. Update it through SGLang's own loader"
        )
    return _plan(tracer, list(specs))


class _Progress:
    """Hands out the sources and knows how far loading has come."""

    def __init__(self, sources: Sequence[SourceSpec], tracer: Tracer) -> None:
        self._sources = sources
        self._tracer = tracer
        self._current: SourceSpec | None = None
        self._exhausted = False

    def named_tensors(self) -> Iterator[tuple[str, Traced]]:
        for spec in self._sources:
            self._current, self._tracer.current = spec, spec.name
            yield spec.name, self._tracer.source(spec)
        self._exhausted, self._tracer.current = True, None

    def where(self) -> str:
        if self._exhausted:
            return f"after it had been given all {len(self._sources)} sources"
        if self._current is None:
            return "before it took a source"
        return f"at source {self._current.name!r} {self._current.shape} {self._current.dtype}"


def _put_back(parameters: Mapping[str, nn.Parameter], data: Mapping[str, Tensor]) -> list[str]:
    """Gives parameters the memory back that they had; the names of those that had lost it."""
    moved = []
    for name, parameter in parameters.items():
        before = data[name]
        if _layout(parameter) != _layout(before):
            parameter.data = before
            moved.append(name)
    return moved


def _layout(tensor: Tensor) -> tuple:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _plan(tracer: Tracer, names: Sequence[str]) -> CopyPlan:
    coverage = survey(tracer.places, tracer.writes)
    groups = _merged(tracer.groups)
    left, known = dict(tracer.untraceable), -1
    while len(left) > known:
        known = len(left)
        for group in groups:
            if reasons := [left[name] for name in group if name in left]:
                for name in group:
                    left.setdefault(name, f"it is loaded together with one that is not copied: {reasons[0]}")
        left = left_to_loader(coverage, tracer.writes, left)
    copies, fills = [], []
    for index, replay in enumerate(tracer.replays):
        if index in coverage.hidden or replay is None:
            continue
        if isinstance(replay, Fill):
            fills.append(replay)
        elif replay.name not in left:
            copies.append(replay)
    copied = {copy.name for copy in copies}
    return CopyPlan(
        copies=tuple(copies),
        fills=tuple(fills),
        through_loader={name: left[name] for name in names if name in left},
        converted=tuple(name for name in names if name in tracer.converted),
        unused=tuple(name for name in names if name not in left and name not in copied),
        uncovered=coverage.uncovered,
        overwritten=coverage.overwritten,
    )


def _merged(groups: Iterable[frozenset[str]]) -> list[set[str]]:
    """Groups that share a name become one."""
    group_of: dict[str, set[str]] = {}
    for group in groups:
        merge_descriptors = set(group).union(*(group_of.get(name, ()) for name in group))
        group_of |= dict.fromkeys(merge_descriptors, merge_descriptors)
    return list({id(group): group for group in group_of.values()}.values())


def write_fills(parameters: Mapping[str, Tensor], fills: Sequence[Fill]) -> None:
    """Writes the constants of a plan, `parameters` being the model's. Needed before any copy."""
    for fill in fills:
        data = parameters[fill.parameter].detach()
        data.as_strided(fill.shape, fill.strides, data.storage_offset() + fill.offset).fill_(fill.value)


def finish_load(model: nn.Module) -> None:
    """Lets a model compute anew what it derives from its weights. Call it after the copies and after `load_weights`.

    SGLang's protocol for loaders that do not go through `load_weights` (`_post_load_weights` in
    `srt/model_loader/loader.py` of 0.5.17): a model that derives tensors from its parameters, as MLA models split
    kv_b_proj into w_kc and w_vc, has a method `post_load_weights`.
    """
    post_load_weights = getattr(model, "post_load_weights", None)
    if post_load_weights is not None:
        post_load_weights()
