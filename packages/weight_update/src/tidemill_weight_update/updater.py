"""The updater: from named tensors to engines that serve them."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tidemill_weight_update.client import EngineClient
from tidemill_weight_update.control.mailbox import MAX_RECEIVERS
from tidemill_weight_update.control.request import Request
from tidemill_weight_update.failure import Failure
from tidemill_weight_update.lora.config import LoraConfig
from tidemill_weight_update.remote.group_link import GroupLink
from tidemill_weight_update.send.adapter import AdapterPath
from tidemill_weight_update.send.fast import FastPath
from tidemill_weight_update.send.fleet import IN_FLIGHT, Fleet, InFlight, Member
from tidemill_weight_update.send.load_calls import LoadCalls
from tidemill_weight_update.send.plain import PlainCheck
from tidemill_weight_update.send.quarantine import Operation, Quarantine, distinct
from tidemill_weight_update.send.ranks import RankLostError, Ranks
from tidemill_weight_update.send.sender import PreparedBucket
from tidemill_weight_update.send.stock import StockPath
from tidemill_weight_update.stages import Stages
from tidemill_weight_update.stats import UpdateStats
from tidemill_weight_update.tensors.source import NamedTensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class WeightUpdater:
    """Sends weights to engines.

    All ranks of `process_group` (None: the default group, or this process alone) make it and call `update` together;
    rank 0 of the group talks to the engines. Engines that were launched with `sglang_launch_args()` take what they need
    from each rank directly (the fast path); others get full tensors from rank 0 (the stock path).

    Args:
        engines: where the weights go; used on rank 0 only, other ranks may pass an empty sequence.
        bucket_bytes: tensors that cannot be read where they are travel through shared memory of twice this size on each
            rank, however large they are. On the stock path a tensor larger than a bucket travels alone, and the shared
            memory grows to its size.
        process_group: the ranks that update together, over a small gloo group that they make for it. Its timeout bounds
            their wait for the last to call `update` and for what rank 0 still has to wait for when all is sent.
        dtype: floating-point tensors are sent as `tensor.to(dtype)`, unless they have one byte an element. None: as
            they are; the fast path casts them to the dtype of the engine's parameter.
        device: where the shared memory lives, "cpu" or a CUDA device; None: where the first tensor is. Engines on GPUs
            read both kinds, engines on CPUs only host memory.
        in_flight: what becomes of requests that run when an update comes. "wait": they end first; "abort": they are
            ended; "retract": they are computed anew with the new weights, except their prompts, which SGLang finds in
            its prefix cache; "in_place": they go on with what they have computed. With the last two that cache is not
            flushed; give requests the version as `extra_key`.
        allow_non_finite: whether infinite and not-a-number elements may be sent (fast path; the stock path does not
            look).
        link: to engines on other machines, and between trainer ranks on several; the same on all ranks. All ranks and
            engines need the run's token.
        timeout_s: longest wait for an engine that makes no progress, be it because of running requests; then the others
            load without it. `update` still returns, and what it paused goes on, when its client has given up, too. Less
            than what clients wait for an answer, else these give up all engines while they wait for one. (Engines wait
            as long for a trainer rank that lives and sends nothing if there is a link, else three times as long; ranks
            of the fast path that have sent all wait three times as long for the others.)
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
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point dtype as torch.bfloat16, got {dtype!r}")
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"in_flight must be one of {', '.join(map(repr, IN_FLIGHT))}, got {in_flight!r}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._engines = distinct(engines)
        self._quarantine = Quarantine()
        self._ranks = Ranks(process_group)
        self._plain = PlainCheck(self._ranks)
        place = None if device is None else torch.device(device)
        self._fast = FastPath(
            bucket_bytes=bucket_bytes,
            dtype=dtype,
            device=place,
            allow_non_finite=allow_non_finite,
            timeout_s=timeout_s,
            group_rank=self._ranks.rank,
            link=link,
        )
        self._link = link
        self._stock = StockPath(self._ranks, bucket_bytes=bucket_bytes, dtype=dtype, device=place)
        self._adapters = AdapterPath(self._ranks, dtype=dtype, allow_non_finite=allow_non_finite)
        self._in_flight: InFlight = in_flight
        self._timeout_s = timeout_s
        self._sequence = 0
        self._closed = False

    def update(
        self,
        named_tensors: NamedTensors,
        weight_version: int | str,
        *,
        partial: bool = False,
        engines: Sequence[EngineClient] | None = None,
    ) -> UpdateStats:
        """Loads `named_tensors` into the engines and makes `weight_version` visible on those that have all of it.

        Collective. The prefix caches are flushed. The tensors must not change until this returns.

        On the fast path each rank passes what it holds, under Hugging Face names: plain tensors (rank 0's count, so it
        has all of them), DTensors, `LocalShard`s; in any order. If `named_tensors` is a collection (a list,
        `state_dict().items()`), all of it is checked before an engine changes anything. A generator is read as it is
        sent, so its tensors may be temporary; then a missing tensor is found when the others are loaded. On the stock
        path every rank passes the same names in the same order, as plain tensors or DTensors.

        Args:
            named_tensors: all parameters of the model, as pairs of name and tensor.
            weight_version: what the engines report afterwards, as a string.
            partial: parameters that nothing was sent for keep their values; else that is an error. Engines that failed
                in an earlier update take part only if they are named: then nothing else may be older in them.
            engines: update these only, quarantined ones and new ones too; they take part in later updates. On rank 0.

        Raises:
            ValueError: no tensors, a name twice, an empty version, no engines, an engine twice, more engine ranks than
                can be updated at once (256, without a link), tensors that are not finite, a LocalShard that does not
                fit its tensor, plain tensors that another rank has and rank 0 has not (found when the others are sent),
                a partial update of an engine that failed before and is not named.
            TypeError: an item that is not `(name, dense tensor)`, a generator for engines of both paths, or (fast path)
                on some ranks only.
            RuntimeError: no engine could be updated (each is named with its reason), another rank failed, the ranks
                passed different tensors on the stock path, or the updater is closed. What the iterable raises is raised
                as it is. An error on one rank is an error on all. If a rank is lost (`RankLostError`), close the
                updater; those that are left can make another.
            An engine that fails while others do not raises nothing: see `UpdateStats.quarantined`.
        """
        started = time.perf_counter()
        version = str(weight_version)
        stages, failure = Stages(), Failure()
        fleet, begun = Fleet([], self._in_flight), (0, 0)
        self._sequence += 1
        with failure:
            self._check_ready(version)
            fleet = self._assemble(engines, "update", self._in_flight, catches_up=not partial or engines is not None)
            begun = self._fast.begin(self._sequence)
        is_stream = isinstance(named_tensors, Iterator)
        rows = self._ranks.exchange(failure.error, [*begun, fleet.num_receivers, len(fleet.stock), is_stream])
        _, _, num_receivers, num_stock, _ = rows[0]
        if num_receivers:
            _check_kinds([bool(row[-1]) for row in rows])
        fast = stock = (0, 0, 0)
        with self._paused(fleet, "update"):
            if num_receivers:
                mailboxes = self._connect([(row[0], row[1]) for row in rows], num_receivers)
                try:
                    fast = self._send(named_tensors, fleet, mailboxes, num_receivers, num_stock, partial, stages)
                except RankLostError as error:  # which one it was, engines may know
                    raise RankLostError("; ".join([str(error), *fleet.failures()])) from error
            if num_stock:
                with torch.inference_mode(False), torch.no_grad():
                    stock = self._stock.send(
                        named_tensors, version, fleet.stock, fleet.flushes, stages, alone=not num_receivers
                    )
            with stages("finish"):
                fleet.make_visible(version)
        counts = fast[0] + stock[0], max(fast[1], stock[1]), fast[2] + stock[2]
        return self._report(fleet, version, counts, started, stages)

    def update_adapter(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        name: str,
        config: LoraConfig,
        weight_version: int | str,
        *,
        replaces: str | None = None,
        engines: Sequence[EngineClient] | None = None,
    ) -> UpdateStats:
        """Makes the engines serve a LoRA adapter as `name` (`lora_path` of SGLang's requests), then `weight_version`.

        Collective; all ranks pass the same tensors in the same order. The engines' own weights stay as they are. If
        they serve an adapter of that name, it is unloaded first: SGLang waits for the requests that use it, whatever
        `in_flight` says unless that is "abort", and refuses new ones until the new adapter is there. To have no such
        gap, pass a new name and the old one as `replaces`. SGLang keeps a prefix cache for each load of an adapter.

        SGLang compares an adapter with its model when a request first uses it, and ends if they do not fit.

        Args:
            named_tensors: its matrices, named as PEFT does in files or in models, plain tensors or DTensors.
            config: its settings.
            replaces: an adapter that is unloaded when the new one is there.
            engines: update these only; those that failed at an earlier adapter or were left out of it, too. On rank 0.

        Raises:
            ValueError: a matrix is missing or has another shape than `config` says, is not finite, or `update` raises
                it; an engine of `engines` failed in `update` and has to be brought up to date by that first.
            TypeError: an item that is not `(name, dense tensor)`, or a LocalShard.
            RuntimeError: as in `update`. An engine that fails serves its own weights as before; requests for the
                adapter reach the old one or the new one, or are refused.
        """
        started = time.perf_counter()
        version = str(weight_version)
        stages, failure = Stages(), Failure()
        fleet = Fleet([], "wait")
        with failure:
            self._check_ready(version)
            if not name:
                raise ValueError("name must not be empty")
            in_flight: InFlight = "abort" if self._in_flight == "abort" else "wait"
            fleet = self._assemble(engines, "update_adapter", in_flight, catches_up=False)
        self._ranks.exchange(failure.error, [])
        with self._paused(fleet, "update_adapter"):
            with torch.inference_mode(False), torch.no_grad():
                counts = self._adapters.send(named_tensors, name, config, replaces, fleet.members, stages)
            with stages("finish"):
                fleet.make_visible(version, everywhere=True)
        return self._report(fleet, version, (1, *counts), started, stages)

    def close(self) -> None:
        """Releases the shared memory. The engines are left as they are. May be called twice; not collective."""
        self._closed = True
        self._ranks.close()
        self._fast.close()
        self._stock.close()

    def _check_ready(self, version: str) -> None:
        if self._closed:
            raise RuntimeError("this WeightUpdater is closed; make a new one")
        if not version:
            raise ValueError("weight_version must not be empty")

    def _assemble(
        self, engines: Sequence[EngineClient] | None, operation: Operation, in_flight: InFlight, *, catches_up: bool
    ) -> Fleet:
        """The engines of this update, on rank 0.

        Args:
            catches_up: engines get all that they lack, so that those that failed before can take part.
        """
        if self._ranks.rank != 0:
            return Fleet([], in_flight)
        chosen = self._quarantine.eligible(self._engines, operation) if engines is None else distinct(engines)
        if not chosen:
            raise ValueError("rank 0 talks to the engines, but was given none")
        fleet = Fleet(chosen, in_flight)
        if operation == "update" and self._link is None and fleet.num_receivers > MAX_RECEIVERS:
            raise ValueError(
                f"engines of {MAX_RECEIVERS} ranks in all can be updated at once, these have {fleet.num_receivers}; "
                f"pass some of them as engines=... and then the others"
            )
        for member in fleet.members:
            self._quarantine.restore(member)
            if member.paused and not catches_up:
                raise ValueError(
                    f"{member.name} failed in update() or is still paused; bring it up to date with "
                    f"update(engines=[it]) first, and with all tensors that may be older in it"
                )
        self._engines += [engine for engine in chosen if not any(engine is known for known in self._engines)]
        return fleet

    @contextmanager
    def _paused(self, fleet: Fleet, operation: Operation) -> Iterator[None]:
        """Pauses the engines, and fences or resumes them in the end."""
        try:
            fleet.pause()
            yield
        except BaseException as error:
            fleet.fail_changed(f"the trainer failed before the update was complete: {type(error).__name__}: {error}")
            raise
        finally:
            try:
                fleet.resume()
            finally:
                self._quarantine.record_outcome(fleet, operation)

    def _report(
        self, fleet: Fleet, version: str, counts: tuple[int, int, int], started: float, stages: Stages
    ) -> UpdateStats:
        """Raises on all ranks if no engine could be updated."""
        num_buckets, num_tensors, num_bytes = counts
        return UpdateStats(
            seconds=time.perf_counter() - started,
            num_bytes=num_bytes,
            num_tensors=num_tensors,
            num_buckets=num_buckets,
            weight_version=version,
            prepare_s=stages.seconds["prepare"],
            gather_s=stages.seconds["gather"],
            fill_s=stages.seconds["fill"],
            load_s=stages.seconds["load"],
            finish_s=stages.seconds["finish"],
            **self._agree_on_outcome(fleet),
        )

    def _connect(self, begun: Sequence[tuple[int, int]], num_receivers: int) -> tuple[str, ...]:
        """The paths of all ranks' mailboxes, once they can be opened."""
        failure = Failure()
        mailboxes: tuple[str, ...] = ()
        with failure:
            mailboxes = self._fast.connect(begun, num_receivers)
        if self._link is not None:
            self._ranks.exchange(failure.error, [], 3 * self._timeout_s)
        return mailboxes

    def _send(
        self,
        named_tensors: NamedTensors,
        fleet: Fleet,
        mailboxes: tuple[str, ...],
        num_receivers: int,
        num_stock: int,
        partial: bool,
        stages: Stages,
    ) -> tuple[int, int, int]:
        """The fast path: all engines read while all ranks publish."""
        is_stream = isinstance(named_tensors, Iterator)

        def request(member: Member) -> Request:
            return self._request(member, mailboxes, not is_stream, partial)

        load_calls = LoadCalls(fleet, self._fast, self._sequence, request)
        failure = Failure()
        counts, is_sent = (0, 0, 0), False
        try:
            with failure, torch.inference_mode(False), torch.no_grad():  # what is kept is written to again
                if is_stream and num_stock:
                    raise TypeError(
                        "a generator can be read once, but engines of both paths need it; pass a collection"
                    )
                # One rank alone has more to read, and the way to its engine is shorter: its GPU begins first.
                if self._ranks.size > 1:
                    load_calls.start()
                buckets: Iterable[PreparedBucket]
                if is_stream:
                    buckets = self._fast.stream(named_tensors)
                else:
                    buckets = self._fast.prepare(named_tensors, stages, load_calls.let_calls_start)
                counts = self._fast.send(
                    buckets, mailboxes[0], num_receivers, stages, load_calls.start, load_calls.hold
                )
                is_sent = True
            if not is_sent:  # the engines would wait
                load_calls.cancel()
            # While the engines compare. What the others may wait for now, engines, they give up after a while.
            self._plain.exchange(failure.error, self._fast.plain, 3 * self._timeout_s)
        except RankLostError:
            is_sent = False
            raise
        finally:  # after an interrupt, too
            if not is_sent:
                load_calls.cancel()
            with stages("load"):
                load_calls.join()
        return counts

    def _request(self, member: Member, mailboxes: tuple[str, ...], complete: bool, partial: bool) -> Request:
        return Request(
            sequence=self._sequence,
            mailboxes=mailboxes,
            first_receiver=member.rows.start,
            num_receivers=len(member.rows),
            complete=complete,
            partial=partial,
            # Rank 0 gives up an engine after one, other ranks after two; over a link all do after half of one.
            timeout_s=self._timeout_s if self._link is not None else 3 * self._timeout_s,
        )

    def _agree_on_outcome(self, fleet: Fleet) -> dict[str, Any]:
        """What the engines said, on all ranks; raises on all ranks if none of them could be updated."""
        outcome = json.loads(self._ranks.from_first(json.dumps(fleet.outcome())))
        if outcome.pop("all_failed"):
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in outcome["quarantined"].items()))
        return outcome


def _check_kinds(are_streams: Sequence[bool]) -> None:
    """What may be missing, engines are told once for all ranks."""
    if len(set(are_streams)) > 1:
        streams = ", ".join(str(rank) for rank, is_stream in enumerate(are_streams) if is_stream)
        raise TypeError(
            f"rank {streams} of {len(are_streams)} passed a generator and the others a collection; all must pass the "
            f"same kind: list(...) makes a collection of a generator, iter(...) an iterator of a collection"
        )
