"""Send the metric rows of a run to TensorBoard and Weights & Biases. Rank 0 only.

A configured tracker that cannot start is an error before a model loads. One that fails later is disabled with one warning and counted
(``trackers/failed``); it never stops training. Every start, also with ``--resume``, sends the rows of ``metrics.jsonl`` again, which is
truncated to the checkpoint by then, so no step appears twice.
"""

from __future__ import annotations

import base64
import http.client
import importlib.util
import json
import logging
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.config.schema import Config, RunConfig, WandbConfig
from vapo_mcore.errors import ConfigError

_SERVER_SECONDS = 20.0  # timeout of W&B's server in the check before a model loads
_START_SECONDS = 90.0
_FINISH_SECONDS = 30.0  # limit for pending uploads at the end; a preempted machine leaves little time
logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receives every row once, in order. Any exception disables it."""

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        """Record a row; ``number`` is its index in ``metrics.jsonl``, from 0."""

    def flush(self) -> None:
        """Flush pending writes."""

    def close(self) -> None:
        """Flush and close; called at the end of the run."""


def check_trackers(run: RunConfig) -> None:
    """Raise ConfigError if a tracker required by ``run`` cannot start."""
    faults = []
    if run.tensorboard and not _is_installed("tensorboard"):
        faults.append(
            "run.tensorboard = true, but the package tensorboard is not installed; run pip install -e '.[tracking]' in a checkout, or set "
            "run.tensorboard to null"
        )
    if run.wandb is not None:
        fault = _wandb_fault(run.wandb)
        faults += [fault] if fault is not None else []
    if faults:
        raise ConfigError("\n".join(faults))


class Trackers:
    """Forwards rows to all trackers of a run and disables those that fail."""

    def __init__(self, trackers: Mapping[str, Tracker], rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """``rows``: earlier rows of a resumed run, written at once."""
        self._running = dict(trackers)
        self._rows = 0
        self.failed = 0
        for row in rows:
            self.write(row, flush=False)

    def __bool__(self) -> bool:
        """Return whether the run has any tracker, running or failed."""
        return bool(self._running) or self.failed > 0

    def write(self, row: Mapping[str, Any], *, flush: bool = True) -> None:
        number = self._rows
        self._rows += 1
        self._each(lambda tracker: tracker.write(number, row))
        if flush:
            self._each(lambda tracker: tracker.flush())

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._running.items()):
            try:
                do(tracker)
            except Exception as error:  # noqa: BLE001 (a failing tracker must not stop training)
                del self._running[name]
                self.failed += 1
                logger.warning("%s failed; disabling it for the rest of the run: %s: %s", name, type(error).__name__, error)


def start_trackers(config: Config, folder: Path, run_id: str, rows: Callable[[], Iterable[Mapping[str, Any]]]) -> Trackers:
    """Start the trackers of ``config`` and write ``rows()``, the earlier rows of a resumed run, to them.

    Raises ConfigError if a required tracker cannot start. With ``run.tensorboard: null`` a failing TensorBoard only warns.
    """
    started: dict[str, Tracker] = {}
    required = config.run.tensorboard
    if required or (required is None and _is_installed("tensorboard")):
        try:
            started["TensorBoard"] = TensorBoard(folder / "tensorboard")
        except Exception as error:
            if required:
                raise ConfigError(f"run.tensorboard = true, but TensorBoard cannot start: {error}") from error
            logger.warning("TensorBoard cannot start; continuing without it: %s: %s", type(error).__name__, error)
    if config.run.wandb is not None:
        try:
            started["Weights & Biases"] = WeightsAndBiases(config, config.run.wandb, folder, run_id)
        except Exception as error:
            raise ConfigError(f"run.wandb: Weights & Biases cannot start: {type(error).__name__}: {error}") from error
    return Trackers(started, rows() if started else ())


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by name, including ``step``. Names of value pretraining get the stage as prefix: it counts separately."""
    stage = row.get("stage", "rl")
    prefix = "" if stage == "rl" else f"{stage}/"
    return {prefix + name: value for name, value in row.items() if isinstance(value, int | float) and not isinstance(value, bool)}


class TensorBoard:
    """Writes scalars by step. Replaces the files of an earlier start.

    ``purge_step`` cannot be used instead: it drops all tags from a step on, but value pretraining and training both count from 1.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if folder.exists():
            shutil.rmtree(folder)
        self._writer = SummaryWriter(str(folder))

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        for name, value in _numbers({key: row[key] for key in row if key != "step"}).items():
            self._writer.add_scalar(name, value, row["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes to one W&B run, whose id is that of the run directory, so that a resumed run continues it.

    W&B requires increasing steps, so its step is the row number; ``step`` and ``value_pretraining/step`` are metrics. Online, rows that
    the server has are not sent again. Offline, the folder ``wandb/offline-run-*`` is rewritten.
    """

    def __init__(self, config: Config, settings: WandbConfig, folder: Path, run_id: str) -> None:
        import wandb

        for stale in (folder / "wandb").glob(f"offline-run-*-{run_id}"):
            shutil.rmtree(stale)
        quiet: dict[str, Any] = {"silent": True, "console": "off", "disable_git": True, "save_code": False}
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or folder.resolve().name,
            group=settings.group,
            tags=list(settings.tags),
            mode=settings.mode,
            id=run_id,
            resume="allow" if settings.mode == "online" else None,
            dir=str(folder),
            config=yaml.safe_load(dump_yaml(config)),
            settings=wandb.Settings(
                api_key=os.environ.get(settings.api_key_variable) if settings.mode == "online" else None,
                init_timeout=_START_SECONDS,
                finish_timeout=_FINISH_SECONDS,
                base_url=_wandb_server(),
                reinit="create_new",
                **quiet,
            ),
        )
        self._known = self._run.starting_step  # number of rows that the server has

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        if number >= self._known:
            self._run.log(_numbers(row), step=number, commit=True)

    def flush(self) -> None:
        """Do nothing: W&B's background process sends the rows."""

    def close(self) -> None:
        self._run.finish()


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _wandb_server() -> str:
    """Return the address of W&B's server, or of ``WANDB_BASE_URL`` if set."""
    import wandb

    return str(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url).rstrip("/")


def _wandb_fault(settings: WandbConfig) -> str | None:
    """Return why W&B cannot start (package, API key or server), or None."""
    if not _is_installed("wandb"):
        return (
            "run.wandb is set, but the package wandb is not installed; run pip install -e '.[wandb]' in a checkout, or set run.wandb to "
            "null"
        )
    if settings.mode == "offline":
        return None
    key = os.environ.get(settings.api_key_variable)
    if not key:
        return (
            f"run.wandb: the environment variable {settings.api_key_variable} (run.wandb.api_key_variable) is not set; set it to the API "
            "key, or use mode: offline"
        )
    server = _wandb_server()
    query = json.dumps({"query": "query Viewer { viewer { id } }"}).encode()
    login = base64.b64encode(f"api:{key}".encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
    refused = f"run.wandb: {server} rejects the API key in {settings.api_key_variable}"
    try:
        request = urllib.request.Request(f"{server}/graphql", query, headers)
        with urllib.request.urlopen(request, timeout=_SERVER_SECONDS) as answer:
            content = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        answered = f"run.wandb: {server} responds with {error.code} {error.reason}; try again later, or use mode: offline"
        return refused if error.code in (401, 403) else answered
    except (OSError, ValueError, http.client.HTTPException) as error:  # also a malformed address, or a server that is not W&B's
        reason = " ".join(str(getattr(error, "reason", error)).split())
        return f"run.wandb: cannot reach {server} ({reason}); use mode: offline and `wandb sync` later"
    data = content.get("data") if isinstance(content, dict) else None
    return None if isinstance(data, dict) and data.get("viewer") else refused
