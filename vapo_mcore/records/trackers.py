"""Where the rows of a run are shown besides ``metrics.jsonl``: TensorBoard, Weights & Biases. Rank 0 only.

A tracker that was asked for and cannot start is an error before a model loads. One that fails later is switched off, said once and
counted (``trackers/failed``): it never stops training. A start, also one after ``--resume``, shows the rows of ``metrics.jsonl`` again,
which was cut to the checkpoint by then; so no step is shown twice, whatever the run that was ended had shown.
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

_SERVER_SECONDS = 20.0  # for the answer of W&B's server before a model loads
_START_SECONDS = 90.0
_FINISH_SECONDS = 30.0  # for what is not uploaded yet when the run ends, which may be because its machine is taken away
logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Gets the rows in order, each once; any exception ends it."""

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        """Show a row; ``number`` counts the rows of ``metrics.jsonl`` from 0."""

    def flush(self) -> None:
        """What was written is to be seen."""

    def close(self) -> None:
        """The run has ended."""


def check_trackers(run: RunConfig) -> None:
    """Raise ConfigError for a tracker that ``run`` requires and that cannot start here."""
    faults = []
    if run.tensorboard and not _is_installed("tensorboard"):
        faults.append(
            "run.tensorboard = true, but the package tensorboard is not installed; in a checkout: pip install -e '.[tracking]', or set "
            "run.tensorboard to null"
        )
    if run.wandb is not None:
        fault = _wandb_fault(run.wandb)
        faults += [fault] if fault is not None else []
    if faults:
        raise ConfigError("\n".join(faults))


class Trackers:
    """The trackers of a run, of which some may have failed."""

    def __init__(self, trackers: Mapping[str, Tracker], shown: Iterable[Mapping[str, Any]] = ()) -> None:
        """``shown``: the rows so far, for a run that was resumed."""
        self._running = dict(trackers)
        self._rows = 0
        self.failed = 0
        for row in shown:
            self.write(row, flush=False)

    def __bool__(self) -> bool:
        """Whether there is, or was, any."""
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
            except Exception as error:  # noqa: BLE001 (any fault of a tracker is its own)
                del self._running[name]
                self.failed += 1
                logger.warning("%s failed and is switched off for the rest of the run: %s: %s", name, type(error).__name__, error)


def start_trackers(config: Config, folder: Path, run_id: str, rows: Callable[[], Iterable[Mapping[str, Any]]]) -> Trackers:
    """The trackers of ``config``, which show ``rows()``, those of a resumed run, at once.

    Raises ConfigError where one that is required cannot start; TensorBoard that is written only when it is installed is left out then.
    """
    started: dict[str, Tracker] = {}
    required = config.run.tensorboard
    if required or (required is None and _is_installed("tensorboard")):
        try:
            started["TensorBoard"] = TensorBoard(folder / "tensorboard")
        except Exception as error:
            if required:
                raise ConfigError(f"run.tensorboard = true, but TensorBoard cannot start: {error}") from error
            logger.warning("TensorBoard cannot start and is left out: %s: %s", type(error).__name__, error)
    if config.run.wandb is not None:
        try:
            started["Weights & Biases"] = WeightsAndBiases(config, config.run.wandb, folder, run_id)
        except Exception as error:
            raise ConfigError(f"run.wandb: Weights & Biases cannot start: {type(error).__name__}: {error}") from error
    return Trackers(started, rows() if started else ())


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by name, its step among them; those of value pretraining, whose steps count apart, under their stage."""
    stage = row.get("stage", "rl")
    prefix = "" if stage == "rl" else f"{stage}/"
    return {prefix + name: value for name, value in row.items() if isinstance(value, int | float) and not isinstance(value, bool)}


class TensorBoard:
    """Scalars by step. The files of an earlier start are replaced.

    Not by ``purge_step``, which would drop all tags from a step on: steps of value pretraining and of training both count from 1.
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
    """One W&B run, which has the id of the run directory: a resumed run goes on in it.

    W&B wants steps that only grow, so its step is the number of the row; ``step`` and ``value_pretraining/step`` are metrics. Online, rows
    that the server has already are not sent again. Offline there is one folder, ``wandb/offline-run-*``, which is written anew.
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
        self._known = self._run.starting_step  # rows that the server has

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        if number >= self._known:
            self._run.log(_numbers(row), step=number, commit=True)

    def flush(self) -> None:
        """Nothing to do: another process takes what is logged."""

    def close(self) -> None:
        self._run.finish()


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _wandb_server() -> str:
    """W&B's, or the one of ``WANDB_BASE_URL``."""
    import wandb

    return str(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url).rstrip("/")


def _wandb_fault(settings: WandbConfig) -> str | None:
    """Why W&B cannot start: the package, the key, the server."""
    if not _is_installed("wandb"):
        return (
            "run.wandb is given, but the package wandb is not installed; in a checkout: pip install -e '.[wandb]', or set run.wandb to null"
        )
    if settings.mode == "offline":
        return None
    key = os.environ.get(settings.api_key_variable)
    if not key:
        return (
            f"run.wandb: the environment variable {settings.api_key_variable} (run.wandb.api_key_variable) is not set; it must hold the "
            "API key, or use mode: offline"
        )
    server = _wandb_server()
    query = json.dumps({"query": "query Viewer { viewer { id } }"}).encode()
    login = base64.b64encode(f"api:{key}".encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {login}"}
    refused = f"run.wandb: {server} does not take the API key in {settings.api_key_variable}"
    try:
        request = urllib.request.Request(f"{server}/graphql", query, headers)
        with urllib.request.urlopen(request, timeout=_SERVER_SECONDS) as answer:
            content = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        answered = f"run.wandb: {server} answers with {error.code} {error.reason}; try again later, or use mode: offline"
        return refused if error.code in (401, 403) else answered
    except (OSError, ValueError, http.client.HTTPException) as error:  # also an address that is none, and a server of another kind
        reason = " ".join(str(getattr(error, "reason", error)).split())
        return f"run.wandb: {server} cannot be reached from here ({reason}); use mode: offline and `wandb sync` later"
    data = content.get("data") if isinstance(content, dict) else None
    return None if isinstance(data, dict) and data.get("viewer") else refused
