"""Memory of each kind of device in each phase of a step."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from tidemill_engines import FSDP2Config

from tidemill_trainer.config import Config
from tidemill_trainer.gpus import shares_gpus
from tidemill_trainer.plan.engine import ITEM_BYTES, EngineMemory, engine_memory
from tidemill_trainer.plan.model import ModelSizes, count_model
from tidemill_trainer.roles import Role, model_of, optimizer_of, own_workers, required_roles
from tidemill_trainer.sft.config import SFTConfig

Phase = Literal["generation", "log-probs", "forward/backward", "optimizer", "weight update"]
PHASES: tuple[Phase, ...] = ("generation", "log-probs", "forward/backward", "optimizer", "weight update")
_TRAIN: tuple[Phase, ...] = ("forward/backward", "optimizer")
_UNTIL_SENT: tuple[Phase, ...] = (*_TRAIN, "weight update")
SHARE = 0.8
"""Used share of a device. Estimates are within 15 % of measured peaks; the rest is for CUDA and a sleeping engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Memory that one role holds in a phase.

    Attributes:
        role: "policy", another role, or "engine" (SGLang).
        kind: such as "weights" or "activations".
        num_bytes: bytes on each device.
        advice: keys that reduce it.
    """

    role: str
    kind: str
    num_bytes: float
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The processes that share a kind of device.

    Attributes:
        name: their names.
        phases: what is in memory in each phase.
        advice: keys that reduce it, besides those of the parts.
    """

    name: str
    phases: dict[Phase, list[Part]]
    advice: tuple[str, ...] = ()

    def total(self, phase: Phase) -> float:
        """Return the bytes of a phase."""
        return sum(part.num_bytes for part in self.phases[phase])


def role_sizes(config: Config) -> dict[str, ModelSizes]:
    """Count the parameters of the policy and of each other role that has an engine."""
    sizes = {"policy": count_model(config.model)}
    for role in required_roles(config):
        model = model_of(config, role, config.model.path)
        sizes[role] = count_model(model, is_value=role in ("critic", "reward_model"))
    return sizes


def plan_devices(config: Config, sizes: dict[str, ModelSizes], device_bytes: float | None) -> list[Device]:
    """Return the memory of each kind of device in each phase.

    A device has one training process and, in turns or if the fractions of a GPU that both reserve add up to at most 1,
    one process of an engine. In turns, an engine holds nothing during training, and at a weight update its weights,
    while the policy sends its own: all of them if they have room (see `kept_until_sent`), else one at a time. CUDA's
    context and fragmentation (about 1 to 2 GiB) are not included.

    Args:
        config: configuration of the run, `placed`.
        sizes: result of `role_sizes`.
        device_bytes: memory of a device; None: the pool of an engine is that of one episode, unless
            `rollout.max_total_tokens` sets it.
    """
    devices = [_policy_device(config, sizes, device_bytes, kept_until_sent(config, sizes, device_bytes))]
    for role, number in own_workers(config).items():
        phases: dict[Phase, list[Part]] = {p: _training_parts(config, sizes, [role], p, number) for p in PHASES}
        devices.append(Device(name=role, phases=phases))
    if not shares_gpus(config):
        engine = engine_parts(config, sizes["policy"], device_bytes)
        devices.append(Device(name="engine", phases={phase: list(engine) for phase in PHASES}))
    return devices


def kept_until_sent(config: Config, sizes: dict[str, ModelSizes], device_bytes: float | None) -> list[str]:
    """Return which offloaded parts of the policy stay on its devices until its weights were sent: as many as have room.

    So weights are not copied back for that, and the optimizer state only once for all mini-batches.

    Args:
        device_bytes: memory of a device; None: weights have room.

    Returns:
        Some of "weights" and "optimizer".
    """
    offloads = {"weights": config.engine.param_offload, "optimizer": config.engine.optimizer_offload}
    offloaded = [kind for kind, is_offloaded in offloads.items() if is_offloaded]
    if device_bytes is None:
        return [kind for kind in offloaded if kind == "weights"]
    least = _policy_device(config, sizes, device_bytes, ())
    for kept in (offloaded, *([kind] for kind in offloaded)):
        device = _policy_device(config, sizes, device_bytes, kept)
        if all(device.total(phase) <= max(least.total(phase), SHARE * device_bytes) for phase in _UNTIL_SENT):
            return kept
    return []


def _policy_device(
    config: Config, sizes: dict[str, ModelSizes], device_bytes: float | None, kept: Collection[str]
) -> Device:
    """Return the memory of a device of the policy, which keeps these kinds of parts until its weights are sent."""
    own = own_workers(config)
    shared: list[str] = [role for role in sizes if role not in own]
    number, in_turns = config.actor.num_workers, config.placement.engines == "turns"
    phases: dict[Phase, list[Part]] = {
        phase: _training_parts(config, sizes, shared, phase, number, kept if phase in _UNTIL_SENT else ())
        for phase in PHASES
    }
    phases["weight update"].append(_buffer(config))
    if config.engine.param_offload and "weights" not in kept:
        phases["weight update"].append(_sent(config, sizes["policy"]))
    if not shares_gpus(config):
        return Device(name=" + ".join(shared), phases=phases)
    engine = engine_parts(config, sizes["policy"], device_bytes)
    held: dict[Phase, list[Part]] = {phase: [] if in_turns else engine for phase in PHASES}
    held |= {"generation": engine, "weight update": engine[:1] if in_turns else engine}
    return Device(
        name=" + ".join([*shared, "engine"]) + (" in turns" if in_turns else ""),
        phases={phase: [*parts, *held[phase]] for phase, parts in phases.items()},
        advice=() if in_turns else ('set placement.engines="turns" without fractions of GPUs',),
    )


def plan_fine_tuning(config: SFTConfig, sizes: ModelSizes) -> list[Device]:
    """Return the memory of a training process of `tidemill sft` in each phase, as `plan_devices`.

    There are log-probs in validations and with DPO, whose reference holds no memory.
    """
    has_log_probs = config.dpo is not None or len(config.data.val_files) > 0
    phases: dict[Phase, list[Part]] = {
        phase: _training_parts(config, {"policy": sizes}, ["policy"], phase, config.actor.num_workers)
        for phase in PHASES
        if phase in _TRAIN or (phase == "log-probs" and has_log_probs)
    }
    return [Device(name="policy", phases=phases)]


def engine_parts(config: Config, sizes: ModelSizes, device_bytes: float | None) -> list[Part]:
    """Return weights and KV pool of an engine on each of its devices, in bytes.

    Weights: `engine_weight_bytes` / tp. KV pool: `kv_cache_token_bytes` for each token, with
    `rollout.max_total_tokens`; else what `mem_fraction_static` of the device leaves after the weights.
    """
    rollout = config.rollout
    args = rollout.engine_args
    tp = engine_ranks(config)
    weights = engine_weight_bytes(config, sizes) / tp
    token = kv_cache_token_bytes(config, sizes)
    pool = args.get("max_total_tokens", rollout.max_total_tokens)
    longest = config.data.max_prompt_length + rollout.response_length
    fraction = args.get("mem_fraction_static", rollout.mem_fraction_static)
    least = token * longest
    if pool is not None:
        kv, key = token * pool, "lower rollout.max_total_tokens"
    elif device_bytes is not None:
        kv, key = max(fraction * device_bytes - weights, least), "lower rollout.mem_fraction_static"
    else:
        kv, key = least, "lower rollout.response_length"
    more = "raise rollout.tensor_parallel_size"
    return [
        Part(role="engine", kind="weights", num_bytes=weights, advice=more),
        Part(role="engine", kind="KV pool", num_bytes=kv, advice=key),
    ]


def kv_cache_token_bytes(config: Config, sizes: ModelSizes) -> float:
    """Return the bytes of a token in the KV cache of each rank of an engine.

    They are elements x layers x dtype, divided by tp, but at most by the number of key heads: more ranks have copies.
    """
    dtype = config.rollout.engine_args.get("kv_cache_dtype", "auto")
    item = 1 if dtype.startswith("fp8") else ITEM_BYTES[config.rollout.dtype]
    return sizes.cached * sizes.num_layers * item / min(engine_ranks(config), sizes.cached_heads)


def engine_ranks(config: Config) -> int:
    """Return the tensor-parallel ranks of an engine."""
    return config.rollout.engine_args.get("tp_size", config.rollout.tensor_parallel_size)


def engine_weight_bytes(config: Config, sizes: ModelSizes) -> float:
    """Return the bytes of the weights of an engine: P x dtype, or one byte for each parameter of a layer with "fp8"."""
    item = ITEM_BYTES[config.rollout.dtype]
    return sizes.root * item + (sizes.total - sizes.root) * (1 if config.rollout.quantization == "fp8" else item)


def _buffer(config: Config) -> Part:
    """Return the two halves of the arena of a weight update."""
    num_bytes = 0 if config.weight_update.memory == "cpu" else 2 * config.weight_update.bucket_bytes
    return Part(role="policy", kind="buckets", num_bytes=num_bytes, advice="lower weight_update.bucket_bytes")


def _sent(config: Config, sizes: ModelSizes) -> Part:
    """Return the part of offloaded weights that is on the device at a weight update: one at a time."""
    num_bytes = engine_memory(sizes, config.model, config.engine, config.actor.num_workers).params
    is_fsdp2 = isinstance(config.engine, FSDP2Config)  # Megatron has each expert alone
    num_bytes *= (sizes.largest if is_fsdp2 else sizes.embedding) / sizes.total
    return _part(config, "policy", "weights", num_bytes, at_work=True)


def _training_parts(
    config: Config | SFTConfig,
    sizes: dict[str, ModelSizes],
    roles: list[str],
    phase: Phase,
    num_workers: int,
    kept: Collection[str] = (),
) -> list[Part]:
    """Return what a training process with these roles holds at most.

    The roles compute one after the other, so in each phase one of them is at work, and weights of others are resident
    unless they are offloaded. It is the one that then adds most to what it holds as a resident.

    Args:
        kept: kinds of parts of the policy that are resident although they are offloaded in other phases.
    """
    memory = {role: _memory(config, sizes[role], role, num_workers) for role in roles}
    stays = {role: kept if role == "policy" else () for role in roles}
    at_work = {role: _working(config, role, each, phase, stays[role]) for role, each in memory.items()}
    resident = {role: _resident(config, role, each, stays[role]) for role, each in memory.items()}

    def added(role: str) -> float:
        return sum(part.num_bytes for part in at_work[role]) - sum(part.num_bytes for part in resident[role])

    busiest = max(roles, key=added)
    return [part for role in roles for part in (at_work if role == busiest else resident)[role] if part.num_bytes]


def _memory(config: Config | SFTConfig, sizes: ModelSizes, role: str, num_workers: int) -> EngineMemory:
    if role == "policy":
        return engine_memory(sizes, config.model, config.engine, num_workers)
    assert isinstance(config, Config)
    other: Role = role  # pyright: ignore[reportAssignmentType]
    memory = engine_memory(sizes, model_of(config, other, config.model.path), config.engine, num_workers)
    if optimizer_of(config, other) is None:
        memory = replace(memory, grads=0.0, optimizer=0.0)
    return memory


def _part(config: Config | SFTConfig, role: str, kind: str, num_bytes: float, *, at_work: bool = False) -> Part:
    """Return a part with the keys that reduce it; a model at work is not offloaded."""
    is_fsdp2 = isinstance(config.engine, FSDP2Config)
    has_own = isinstance(config, Config) and role in own_workers(config)
    workers = role if has_own else "actor"
    more = f"raise {workers}.num_workers"
    states = f"{more}, or set engine.offload_policy=true" if is_fsdp2 else f"{more} or a parallel size of engine"
    advice = {
        "weights": f"{more}, or set {'engine' if role == 'policy' else role}.param_offload=true",
        "optimizer": f"{more}, or set engine.optimizer_offload=true",
        "gradients": f"{more}, or set engine.grad_offload=true",
        "gathered": "keep engine.reshard_after_forward=true",
        "activations": "lower engine.max_token_len_per_gpu, or set model.gradient_checkpointing=true",
    }
    is_state = at_work and kind in ("weights", "optimizer", "gradients")
    return Part(role=role, kind=kind, num_bytes=num_bytes, advice=states if is_state else advice[kind])


def _resident(config: Config | SFTConfig, role: str, memory: EngineMemory, kept: Collection[str]) -> list[Part]:
    """Return what a role holds while others are at work. Gradients of FSDP2 are freed after each step."""
    engine = config.engine
    offloads = engine.param_offload if role == "policy" else getattr(config, role).param_offload
    parts = [_part(config, role, "weights", memory.params)] if not offloads or "weights" in kept else []
    if not isinstance(engine, FSDP2Config) and not engine.grad_offload:
        parts.append(_part(config, role, "gradients", memory.grads))
    is_here = not engine.optimizer_offload or "optimizer" in kept
    return parts + ([_part(config, role, "optimizer", memory.optimizer)] if is_here else [])


def _working(
    config: Config | SFTConfig, role: str, memory: EngineMemory, phase: Phase, kept: Collection[str]
) -> list[Part]:
    """Return what a role holds in a phase in which it is at work."""

    def part(kind: str, num_bytes: float) -> Part:
        return _part(config, role, kind, num_bytes, at_work=True)

    if phase in _TRAIN and memory.optimizer + memory.grads > 0:
        parts = [part("weights", memory.params), part("gradients", memory.grads)]
        if phase == "forward/backward":
            parts += [part("gathered", memory.gathered), part("activations", memory.activations)]
        if phase == "optimizer" or not config.engine.optimizer_offload or "optimizer" in kept:
            parts.append(part("optimizer", memory.optimizer))
        return parts
    resident = _resident(config, role, memory, kept)
    if phase == "log-probs":
        others = [each for each in resident if each.kind != "weights"]
        at_work = [part("gathered", memory.gathered), part("activations", memory.inference)]
        return [part("weights", memory.params), *others, *at_work]
    return resident
