"""The public entry point: sends named tensors from a trainer to engines."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tidemill_weight_update.client import EngineClient, GroupLink
from tidemill_weight_update.lora import LoraConfig
from tidemill_weight_update.send.declaration import Transfer
from tidemill_weight_update.send.fast import FastPath
from tidemill_weight_update.send.fleet import IN_FLIGHT, Engines, Fleet, InFlight
from tidemill_weight_update.send.ranks import Failure, RankLostError, Ranks, check_plain
from tidemill_weight_update.send.stock import StockPath
from tidemill_weight_update.stats import Stages, UpdateStats
from tidemill_weight_update.tensors import NamedTensors, items_of, source_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class WeightUpdater:
    """Sends weights from a trainer to inference engines.

    All ranks of `process_group` (None: the default group, or this process alone) create it and call its methods
    together; rank 0 of the group calls the engines.

    Args:
        engines: engines to update; used on rank 0 only, other ranks may pass an empty sequence.
        bucket_bytes: size of a bucket. Each rank uses shared memory of at most twice this size for tensors that the
            engines cannot read in place; larger tensors are split, except on the stock path.
        process_group: ranks that update together. They communicate over an extra gloo group with the same timeout,
            which limits how long they wait for the last rank to call `update`.
        dtype: dtype in which floating-point tensors are sent, except dtypes of one byte per element. None: send tensors
            as they are; the fast path casts them to the dtype of the engine's parameter.
        device: device of the shared memory, "cpu" or a CUDA device. None: the device of the first tensor. Engines on
            GPUs read both kinds, engines on CPUs only host memory.
        in_flight: what happens to running requests: the update waits for them, they are aborted, recomputed with the
            new weights ("retract"), or continue with their old KV cache ("in_place"). The last two do not flush the
            prefix cache.
        allow_non_finite: whether infinite and NaN elements may be sent (checked on the fast path and for adapters).
        link: connection to engines on other machines; the same on all ranks.
        timeout_s: longest wait for an engine that makes no progress, for example because of running requests; then the
            others load without it. Must be less than the clients' timeouts. PROTOCOL.md lists the timeouts that follow
            from it.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        *,
        bucket_bytes: int = 512 << 20,
        process_group: "ProcessGroup | None" = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        in_flight: InFlight = "wait",
        allow_non_finite: bool = False,
        link: GroupLink | None = None,
        timeout_s: float = 100.0,
    ) -> None:
        if not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be a positive int, got {bucket_bytes!r}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point dtype such as torch.bfloat16, got {dtype!r}")
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"in_flight must be one of {', '.join(map(repr, IN_FLIGHT))}, got {in_flight!r}")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be positive and finite, got {timeout_s}")
        if link is not None and not isinstance(link, GroupLink):
            raise TypeError(f"link must be a GroupLink, such as GroupLink(host='10.0.0.1'), got {link!r}")
        self._ranks = Ranks(process_group)
        place, failure = None, Failure()
        with failure:  # what may differ between ranks
            self._engines = Engines(engines)
            place = None if device is None else _device(device)
        self._ranks.exchange(failure.error, [], call="WeightUpdater()")
        self._fast = FastPath(
            self._ranks,
            bucket_bytes=bucket_bytes,
            dtype=dtype,
            device=place,
            allow_non_finite=allow_non_finite,
            timeout_s=timeout_s,
            link=link,
        )
        self._stock = StockPath(
            self._ranks,
            bucket_bytes=bucket_bytes,
            dtype=dtype,
            device=place,
            allow_non_finite=allow_non_finite,
            has_link=link is not None,
        )
        self._in_flight: InFlight = in_flight
        self._timeout_s = timeout_s
        self._sequence = 0  # of collective calls, so that it is equal on ranks that have made different calls
        self._num_declared = 0
        self._closed = False

    def update(self, named_tensors: NamedTensors, weight_version: int | str, *, partial: bool = False) -> UpdateStats:
        """Load `named_tensors` into the engines and set `weight_version` on those that loaded all of it.

        Collective. The tensors must not change until this call returns. Declares them (see `declare`) unless they, or
        the function, are those of the last call.

        Each rank passes what it holds, under Hugging Face names and in any order: plain tensors (those of rank 0 are
        sent, so it must have all of them), DTensors, and `LocalShard`s. On the stock path every rank passes the same
        names in the same order, without `LocalShard`s.

        Args:
            named_tensors: pairs of name and tensor, for all parameters of the model. An iterator is read before
                anything is sent. A function that returns an iterator is called once to describe the tensors and once to
                send them, one bucket at a time; it must return equal names, shapes and dtypes in the same order.
            weight_version: version that the engines report afterwards, as a string.
            partial: whether parameters without a tensor keep their values; otherwise they are an error.

        Returns:
            The statistics of this update. An engine that fails while others succeed raises nothing: it is listed in
            `UpdateStats.quarantined` and excluded from later updates until `readmit`.

        Raises:
            ValueError: no tensors, a duplicate name, an empty version, no or duplicate engines, too many engine ranks,
                non-finite tensors, a LocalShard that does not fit its tensor, plain tensors that rank 0 does not have.
            TypeError: an item that is not `(name, dense tensor)`.
            RuntimeError: no engine could be updated (the message contains the error of each), all are excluded, another
                rank failed, or the updater is closed. An error on one rank raises on all ranks. After `RankLostError`,
                close the updater; the remaining ranks can create another one.
        """
        return self._send(lambda: self._describe(named_tensors, partial=partial), weight_version, None)

    def declare(self, named_tensors: NamedTensors, *, partial: bool = False) -> Transfer:
        """Describe tensors once, to send them at every step with `Transfer.send`.

        Collective. Reads names, shapes, dtypes, sharding and addresses. The engines record and check their copy plans
        at the first `send`.

        Raises the errors of `update` about tensors.
        """
        failure, transfer, digest = Failure(), None, 0
        self._sequence += 1
        with failure:
            self._check_open()
            transfer = self._describe(named_tensors, partial=partial, number=self._num_declared + 1)
            digest = transfer.declaration.plain_digest
        rows = self._ranks.exchange(failure.error, [digest], call=f"declare({'partial=True' if partial else ''})")
        assert transfer is not None
        check_plain(self._ranks, transfer.declaration.plain, [row[0] for row in rows])
        self._num_declared += 1
        return transfer

    def readmit(
        self, engines: Sequence[EngineClient], named_tensors: NamedTensors, weight_version: int | str
    ) -> UpdateStats:
        """Load `named_tensors`, all of them, into engines that failed or join late, and include them in later updates.

        Collective, like `update`, with the same arguments and errors. The other engines are not called. Each engine is
        resumed afterwards, whoever paused it. One that fails stays excluded. Adapters are not sent.

        Args:
            engines: engines to update; used on rank 0 only, other ranks may pass an empty sequence.
        """
        return self._send(lambda: self._describe(named_tensors, partial=False), weight_version, engines)

    def _describe(self, named_tensors: NamedTensors, *, partial: bool, number: int = 0) -> Transfer:
        """Describe tensors, unless they are those described last."""
        with torch.inference_mode(False), torch.no_grad():
            source = source_of(named_tensors)
            declaration = self._fast.declare(source)
            return Transfer(source=source, declaration=declaration, partial=partial, number=number, _send=self._send)

    def _send(
        self, describe: Callable[[], Transfer], weight_version: int | str, readmitted: Sequence[EngineClient] | None
    ) -> UpdateStats:
        """Send tensors to the engines to readmit, or to all that are not excluded."""
        version = str(weight_version)
        stages, failure = Stages(), Failure()
        transfer, fleet = None, Fleet([], self._in_flight)
        values: list[Any] = []
        call = ""
        self._sequence += 1
        with failure:
            self._check_ready(weight_version)
            with stages("prepare"):
                transfer = describe()
            if self._ranks.rank == 0:
                fleet = self._engines.fleet(self._in_flight, readmitted)
            begun = self._fast.begin(self._sequence, transfer, fleet)
            values = [begun, fleet.num_receivers, len(fleet.stock), transfer.declaration.plain_digest]
            method = "readmit" if readmitted is not None else "send" if transfer.number else "update"
            call = f"{method}({version!r}{', partial=True' if transfer.partial else ''})"
            if transfer.number:
                call += f" of declaration {transfer.number}"
        rows = self._ranks.exchange(failure.error, values, call=call)
        assert transfer is not None
        _, num_receivers, num_stock, _ = rows[0]
        if transfer.number == 0:  # others were checked by `declare`
            check_plain(self._ranks, transfer.declaration.plain, [row[3] for row in rows])
        fast = stock = (0, 0, 0)
        with self._paused(fleet):
            if num_receivers:
                try:
                    fast = self._fast.update(transfer, fleet, [row[0] for row in rows], num_receivers, stages)
                except RankLostError as error:  # engines may know which rank was lost
                    raise RankLostError("; ".join([str(error), *fleet.failures()])) from error
            if num_stock:
                stock = self._stock.send(items_of(transfer.source), fleet, stages)
            with stages("finish"):
                fleet.make_visible(version)
        counts = fast[0] + stock[0], max(fast[1], stock[1]), fast[2] + stock[2]
        return self._report(fleet, version, counts, stages)

    def update_adapter(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        name: str,
        config: LoraConfig,
        weight_version: int | str,
        *,
        replaces: str | None = None,
    ) -> UpdateStats:
        """Make the engines serve a LoRA adapter as `name`, then set `weight_version`.

        Collective; all ranks pass the same tensors in the same order. The engines' own weights do not change. An
        adapter of that name is unloaded first: SGLang waits for its requests, except with `in_flight="abort"`, and
        refuses new ones until the new adapter is loaded. SGLang compares an adapter with its model when a request first
        uses it, and crashes if they do not fit.

        Args:
            named_tensors: matrices of the adapter, under PEFT's names; plain tensors or DTensors.
            name: name under which requests select the adapter (`lora_path`).
            replaces: adapter to unload after the new one is loaded; with a new `name` no request is refused.

        Raises:
            ValueError: a matrix is missing, has another shape than `config` requires, or is not finite; or an error
                that `update` raises too.
            TypeError: an item that is not `(name, dense tensor)`, or a LocalShard.
            RuntimeError: as in `update`. An engine that fails continues to serve its own weights; requests for the
                adapter use the old one or the new one, or are refused.
        """
        version = str(weight_version)
        stages, failure = Stages(), Failure()
        fleet = Fleet([], "wait")
        self._sequence += 1
        with failure:
            self._check_ready(weight_version)
            if not name:
                raise ValueError("name must not be empty")
            if self._ranks.rank == 0:
                fleet = self._engines.fleet("abort" if self._in_flight == "abort" else "wait")
        self._ranks.exchange(failure.error, [], call=f"update_adapter({version!r})")
        with self._paused(fleet):
            counts = self._stock.send_adapter(named_tensors, name, config, replaces, fleet.members, stages)
            with stages("finish"):
                fleet.make_visible(version, unchanged=True)
        return self._report(fleet, version, counts, stages)

    def close(self) -> None:
        """Release the shared memory and do not touch the engines. Not collective; may be called twice."""
        self._closed = True
        self._ranks.close()
        self._fast.close()
        self._stock.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this WeightUpdater is closed; create a new one")

    def _check_ready(self, weight_version: int | str) -> None:
        self._check_open()
        if not isinstance(weight_version, int | str):
            raise TypeError(f"weight_version must be an int or a str, got {weight_version!r}")
        if weight_version == "":
            raise ValueError("weight_version must not be empty")

    @contextmanager
    def _paused(self, fleet: Fleet) -> Iterator[None]:
        """Pause the engines; finally resume them and exclude those that failed."""
        is_complete = False
        try:
            fleet.pause(self._timeout_s)
            # Buffers are kept and written again later, so they must not be inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                yield
            is_complete = True
        except BaseException as error:
            fleet.fail_changed(f"the trainer failed before the update was complete: {type(error).__name__}: {error}")
            raise
        finally:
            try:
                fleet.resume()
            finally:
                self._engines.record(fleet, is_complete=is_complete)
                self._fast.end(failed=not is_complete or bool(fleet.failures()))

    def _report(self, fleet: Fleet, version: str, counts: tuple[int, int, int], stages: Stages) -> UpdateStats:
        """Return the statistics; raise on all ranks if no engine could be updated."""
        num_buckets, num_tensors, num_bytes = counts
        mine = fleet.outcome() | {"excluded": self._engines.excluded(fleet)}
        outcome: dict[str, Any] = self._ranks.exchange(None, [mine])[0][0]
        if outcome.pop("all_failed"):
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in outcome["quarantined"].items()))
        return UpdateStats(
            seconds=stages.total_s(),
            num_bytes=num_bytes,
            num_tensors=num_tensors,
            num_buckets=num_buckets,
            weight_version=version,
            prepare_s=stages.seconds["prepare"],
            gather_s=stages.seconds["gather"],
            fill_s=stages.seconds["fill"],
            load_s=stages.seconds["load"],
            finish_s=stages.seconds["finish"],
            **outcome,
        )


def _device(device: torch.device | str) -> torch.device:
    """Return a device of this process, with an index if it is a CUDA device, as tensors have it."""
    place = torch.device(device)
    if place.type != "cuda":
        return place
    if (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {device}, but this process has {torch.cuda.device_count()} CUDA devices")
    return place if place.index is not None else torch.device("cuda", torch.cuda.current_device())
