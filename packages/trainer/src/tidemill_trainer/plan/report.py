"""The text and the JSON of a plan."""

from typing import Any

from tidemill_trainer.plan.phases import Device, Phase

GIB = 2**30
_KINDS = ("weights", "gradients", "optimizer", "gathered", "activations", "KV pool", "buckets")


def table(devices: list[Device]) -> list[str]:
    """Return a line for each role in each phase of each kind of device, in GiB; at most 100 columns."""
    lines = [f"{'phase':17} {'role':13}" + "".join(f"{kind:>12}" for kind in _KINDS[:5]) + f"{'total':>9}"]
    for device in devices:
        lines += ["", f"each device of {device.name}, GiB"]
        for phase, parts in device.phases.items():
            for role in dict.fromkeys(part.role for part in parts):
                held = {part.kind: part.num_bytes for part in parts if part.role == role}
                cells = [held.get(kind, 0.0) for kind in _KINDS[:5]]
                others = "".join(f"  {kind} {held[kind] / GIB:.2f}" for kind in _KINDS[5:] if kind in held)
                numbers = "".join(f"{cell / GIB:12.2f}" if cell else f"{'':12}" for cell in cells)
                lines.append(f"{phase:17} {role:13}{numbers}{sum(held.values()) / GIB:9.2f}")
                if others:
                    lines.append(f"{'':17} {'':13}{others}")
            if len({part.role for part in parts}) > 1:
                lines.append(f"{'':17} {'total':13}{'':60}{device.total(phase) / GIB:9.2f}")
    return [line.rstrip() for line in lines]


def problems(devices: list[Device], device_bytes: float | None, *, tolerance: float = 1.0) -> list[str]:
    """Return a message for each kind of device that is too small: its fullest phase, what holds it, and the keys.

    Args:
        devices: result of `plan_devices`.
        device_bytes: memory of a device; None: nothing is compared.
        tolerance: a device is too small if a phase requires more than this many times its memory.
    """
    if device_bytes is None:
        return []
    found = []
    for device in devices:
        fullest: Phase = max(device.phases, key=device.total)
        if device.total(fullest) <= tolerance * device_bytes:
            continue
        held, keys = largest_parts(device, fullest)
        found.append(
            f"{fullest} requires {device.total(fullest) / GIB:.1f} GiB on each device of {device.name}, which has "
            f"{device_bytes / GIB:.1f} GiB; most of it is {held}; {keys}"
        )
    return found


def largest_parts(device: Device, phase: Phase) -> tuple[str, str]:
    """Return what holds most of the memory of a device in a phase, and the keys that reduce it."""
    largest = sorted(device.phases[phase], key=lambda part: -part.num_bytes)[:3]
    held = ", ".join(f"{part.role} {part.kind} {part.num_bytes / GIB:.1f} GiB" for part in largest)
    return held, "; ".join(dict.fromkeys([*device.advice, *(part.advice for part in largest)]))


def as_json(step: str, devices: list[Device], moved: dict[str, float], found: list[str]) -> dict[str, Any]:
    """Return the plan as JSON values; sizes are bytes."""
    return {
        "step": step,
        "devices": [
            {
                "name": device.name,
                "phases": {
                    phase: {
                        "total": round(device.total(phase)),
                        "parts": [{"role": p.role, "kind": p.kind, "bytes": round(p.num_bytes)} for p in parts],
                    }
                    for phase, parts in device.phases.items()
                },
            }
            for device in devices
        ],
        "bytes_per_step": {name: round(value) for name, value in moved.items()},
        "problems": found,
    }
