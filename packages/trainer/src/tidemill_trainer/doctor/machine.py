"""The checks that every run performs before anything expensive."""

from collections.abc import Iterable

import torch

from tidemill_trainer.config_file import ConfigError
from tidemill_trainer.doctor.facts import read_facts
from tidemill_trainer.doctor.finding import Finding
from tidemill_trainer.doctor.node_checks import check_devices, check_node
from tidemill_trainer.doctor.shared_folder import not_shared, shared_file
from tidemill_trainer.progress import Progress
from tidemill_trainer.run_config import RunConfig


def inspect_machine(config: RunConfig) -> list[Finding]:
    """Check this machine for a run without a cluster."""
    facts = read_facts(None, None)
    findings = [*check_devices(facts, config, has_cuda=torch.cuda.is_available()), *check_node(facts)]
    folders = {"trainer.run_dir": config.trainer.run_dir, "trainer.checkpoint_dir": config.trainer.checkpoint_dir}
    for key, folder in folders.items():
        if folder is not None:
            try:
                with shared_file(folder) as file:
                    file.check()
            except OSError as error:
                findings.append(not_shared(key, facts.name, str(error)))
    return findings


def check_machine(config: RunConfig, progress: Progress) -> None:
    """Check this machine and show warnings, before any process starts.

    A run in a cluster (`trainer.ray_address`) checks all nodes when it has connected; see `check_cluster`.

    Raises:
        ConfigError: the run would fail; the message has a line for each finding.
    """
    if config.trainer.ray_address is None:
        enforce(inspect_machine(config), progress)


def check_cluster(config: RunConfig, progress: Progress) -> None:
    """Check all nodes of the cluster to which the driver has connected, and show warnings.

    Args:
        config: configuration of the run.
        progress: terminal output.

    Raises:
        ConfigError: as `check_machine`.
    """
    if config.trainer.ray_address is None:
        return
    from tidemill_trainer.doctor.survey import Survey

    with progress.waiting("checking the nodes"), Survey(config.trainer.run_dir) as survey:
        survey.inspect(config.model.path, config.trainer.checkpoint_dir)
    enforce(survey.findings, progress)


def enforce(findings: Iterable[Finding], progress: Progress) -> None:
    """Show warnings.

    Raises:
        ConfigError: there are errors; the message has a line for each.
    """
    errors: list[str] = []
    for finding in findings:
        if finding.is_error:
            errors.append(str(finding))
        else:
            progress.warn(str(finding))
    if errors:
        raise ConfigError("\n".join(errors))
