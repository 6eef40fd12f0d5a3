"""The command `tidemill doctor`."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tidemill_dispatch import CallTimeoutError, WorkerDiedError, WorkerError

from tidemill_trainer.config import Config
from tidemill_trainer.config_file import ConfigError, read_either_config, with_absolute_paths
from tidemill_trainer.data import DataError
from tidemill_trainer.doctor.facts import NodeFacts, read_facts
from tidemill_trainer.doctor.finding import Finding
from tidemill_trainer.doctor.leftovers import clean, describe
from tidemill_trainer.doctor.links import Link, check_links
from tidemill_trainer.doctor.machine import inspect_machine
from tidemill_trainer.doctor.node_checks import check_leftovers, check_node
from tidemill_trainer.doctor.room import Resources, check_room, demands
from tidemill_trainer.gpus import placed
from tidemill_trainer.out_of_memory import DeviceMemoryError
from tidemill_trainer.preflight import check_model, check_policy
from tidemill_trainer.progress import Progress
from tidemill_trainer.run_config import BaseTrainerConfig, RunConfig
from tidemill_trainer.sft.config import SFTConfig
from tidemill_trainer.stalls.report import StallError

_BETWEEN_GPUS = "all-reduces between all pairs of GPUs of a node"


def doctor(
    config_path: Path | None, overrides: Sequence[str], *, address: str | None, cleans: bool, compares_log_probs: bool
) -> int:
    """Run `tidemill doctor [CONFIG.toml]`; return 1 if a run would fail, or the configuration is invalid.

    Args:
        config_path: configuration of `tidemill train` or `tidemill sft`; None checks the machines alone.
        overrides: as of `tidemill train`.
        address: address of a Ray cluster, instead of that of the configuration.
        cleans: remove what dead runs left, and do nothing else.
        compares_log_probs: also start an engine and the training workers, and compare their log-probs.
    """
    progress = Progress()
    try:
        config = None if config_path is None else with_absolute_paths(read_either_config(config_path, overrides))
        if config is None and (overrides or compares_log_probs):
            raise ConfigError("key=value and --log-probs require a CONFIG.toml; add it")
        if config is not None and address is not None:
            config = replace(config, trainer=replace(config.trainer, ray_address=address))
        if compares_log_probs and not isinstance(config, Config):
            raise ConfigError("--log-probs requires a configuration of `tidemill train`, which has engines")
        run_dir = str(Path(BaseTrainerConfig().run_dir if config is None else config.trainer.run_dir).absolute())
        address = address if config is None else config.trainer.ray_address
        if cleans:
            return _clean(address, run_dir, progress)
        findings = _inspect(config, address, run_dir, progress)
        if compares_log_probs and not any(finding.is_error for finding in findings):
            assert isinstance(config, Config)
            from tidemill_trainer.doctor.log_probs import compare_log_probs

            findings += compare_log_probs(config, progress)
    except (ConfigError, DataError, OSError) as error:
        progress.fail(str(error))
        return 1
    except (DeviceMemoryError, WorkerError, WorkerDiedError, CallTimeoutError, StallError) as error:
        progress.fail(str(error).partition("remote traceback")[0].rstrip())
        return 1
    return _report(findings, progress)


def _inspect(config: RunConfig | None, address: str | None, run_dir: str, progress: Progress) -> list[Finding]:
    """Check the machines and the model."""
    if isinstance(config, Config):
        check_model(config)
    elif isinstance(config, SFTConfig):
        check_policy(config, config.data.max_length, "data.max_length")
    if address is None:
        facts = read_facts(None, None, describe(Path(run_dir)))
        progress.info(f"{facts.name}: {_summary(facts.versions)}, {facts.num_cpus} CPUs, {len(facts.gpus)} GPUs")
        of_machine = check_node(facts) if config is None else [*inspect_machine(config), *check_leftovers(facts)]
        return [*of_machine, *_measure_gpus(facts, progress)]
    from tidemill_trainer.doctor.survey import Survey
    from tidemill_trainer.ray_session import node_resources

    with _connected(address, progress), Survey(run_dir) as survey:
        room = [] if config is None else _check_room(config, node_resources())
        with progress.waiting("checking each node"):
            model, checkpoint_dir = (
                (None, None) if config is None else (config.model.path, config.trainer.checkpoint_dir)
            )
            survey.inspect(model, checkpoint_dir, has_leftovers=True)
        for facts in survey.facts.values():
            progress.info(f"{facts.name}: {_summary(facts.versions)}, {facts.num_cpus} CPUs, {len(facts.gpus)} GPUs")
        if len(survey.facts) > 1:
            with progress.waiting("connecting all pairs of nodes"):
                survey.check_connections()
            with progress.waiting("all-reduces between all pairs of nodes"):
                _show(survey.measure_links(), progress)
        if any(len(facts.gpus) > 1 for facts in survey.facts.values()):
            with progress.waiting(_BETWEEN_GPUS):
                _show(survey.measure_gpus(), progress)
        return [*room, *survey.findings]


def _measure_gpus(facts: NodeFacts, progress: Progress) -> Iterator[Finding]:
    if len(facts.gpus) < 2:
        return
    from tidemill_trainer.doctor.collective import measure_gpus

    with progress.waiting(_BETWEEN_GPUS):
        links = {f"{facts.name}, {pair}": link for pair, link in measure_gpus().items()}
    _show(links, progress)
    yield from check_links(links, "GPUs")


def _show(links: Mapping[str, Link], progress: Progress) -> None:
    for names, link in links.items():
        if not link.error:
            progress.info(f"{names}: {link}")


def _check_room(config: RunConfig, nodes: Mapping[str, Resources]) -> list[Finding]:
    num_gpus = sum(node.get("GPU", 0.0) for node in nodes.values())
    return check_room(nodes, demands(placed(config, num_gpus) if isinstance(config, Config) else config, num_gpus))


@contextmanager
def _connected(address: str, progress: Progress) -> Iterator[None]:
    """Connect to a Ray cluster; this takes a second, and imports Ray."""
    import ray

    from tidemill_trainer.ray_session import start_ray

    with progress.waiting(f"connecting to Ray at {address}"):
        owns_ray = start_ray(address, 1)
    try:
        yield
    finally:
        if owns_ray:
            ray.shutdown()


def _clean(address: str | None, run_dir: str, progress: Progress) -> int:
    """Remove what dead runs left on each node, and print it."""
    if address is None:
        removed = {socket.gethostname(): clean(Path(run_dir))}
    else:
        from tidemill_trainer.doctor.survey import Survey

        with _connected(address, progress), Survey(run_dir) as survey:
            removed = survey.clean()
            for finding in survey.findings:
                progress.fail(str(finding))
            if survey.findings:
                return 1
    for node, things in removed.items():
        for thing in things:
            progress.info(f"{node}: removed {thing}")
    number = sum(map(len, removed.values()))
    progress.info(f"removed {_number(number, 'leftover')}" if number else "dead runs left nothing", style="bold")
    return 0


def _report(findings: Sequence[Finding], progress: Progress) -> int:
    """Print a line for each finding, and the summary; return the exit status."""
    for finding in findings:
        if finding.is_error:
            progress.fail(str(finding))
        else:
            progress.warn(f"warning: {finding}")
    num_errors = sum(finding.is_error for finding in findings)
    num_warnings = len(findings) - num_errors
    if not findings:
        progress.info("no problems found", style="bold green")
    else:
        progress.info(f"{_number(num_errors, 'error')}, {_number(num_warnings, 'warning')}", style="bold")
    return 1 if num_errors else 0


def _summary(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "sglang", "ray"))


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
