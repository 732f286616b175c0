"""Run the checks on all ranks, print the table, and write certificate and page."""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vapo_mcore import heartbeat
from vapo_mcore.certify import certificate as certificates
from vapo_mcore.certify.against import differences
from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.memory import release_free_memory
from vapo_mcore.certify.names import BUILT_IN
from vapo_mcore.certify.page import FILE_NAME as PAGE_NAME
from vapo_mcore.certify.page import PREVIOUS_NAME as PREVIOUS_PAGE_NAME
from vapo_mcore.certify.page import build_page
from vapo_mcore.certify.record import VERDICTS, CheckRecord, Measurement, NotApplicable, exit_code, fails, not_applicable
from vapo_mcore.certify.table import lines_of, summary
from vapo_mcore.collectives import all_gather_objects, broadcast_object, fail_together
from vapo_mcore.config.schema import Config
from vapo_mcore.errors import ConfigError, VapoError
from vapo_mcore.extensions.loading import describe, load_function
from vapo_mcore.launch.watchdog import Watchdog
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.records.console import Console
from vapo_mcore.trainer.main import configure_logging, ending_together, seed_everything

Check = Callable[[Bench], Sequence[Measurement]]


@dataclass(frozen=True)
class CertifyOptions:
    """``checks``: names of built-in checks and import paths; ``against``: file of an older certificate; ``output``: folder to write."""

    checks: tuple[str, ...]
    against: str | None
    output: str


def run_certify(config: Config, options: CertifyOptions) -> int:
    """Certify in this process, one of ``parallel.world_size``. Returns the exit code, the same on all ranks."""
    configure_logging()
    parallel = initialize_parallel(config.parallel)
    with ending_together():
        records = certify(config, parallel, options)
    return exit_code(records)


def certify(config: Config, parallel: ParallelContext, options: CertifyOptions) -> list[CheckRecord]:
    """Run the checks in existing process groups. Returns their records, the same on all ranks; rank 0 writes and prints.

    Before the first check, raises ConfigError for an output that cannot be written, an older certificate that cannot be read, or a
    user-defined check that cannot be imported.
    """
    console = Console(enabled=parallel.rank == 0)
    output = Path(options.output)
    limit = None if config.faults.hang_minutes is None else 60 * config.faults.hang_minutes
    with ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(limit, rank=parallel.rank, world_size=parallel.world_size))
        with fail_together():
            functions = {name: load(name) for name in options.checks}
            old = None if options.against is None else certificates.read(options.against)
        with fail_together():  # after all ranks have read the old certificate, which prepare() may move
            if parallel.rank == 0:
                prepare(output)
                watchdog.clear(str(output))
        with fail_together():
            watchdog.attach(str(output))
        console.print(_headline(config, options))
        bench = Bench(config, parallel, console, stack, output / ".scratch")
        records: list[CheckRecord] = []
        machine = _machine(parallel)
        for name, function in functions.items():
            with console.waiting(f"check {name}"):
                records.append(_run(bench, name, function))
            for line in lines_of(records[-1]):
                console.print(line)
            with fail_together():  # after each check, so that a crash in a later one keeps the measurements
                if parallel.rank == 0:
                    made = certificates.make(config, records, machine)
                    path = certificates.write(made, output, partial=len(records) < len(functions))
        found = [] if old is None else differences(old, config, records)
        with fail_together():
            if parallel.rank == 0:
                page = build_page(certificates.read(path), records, found if old is not None else None)
                (output / PAGE_NAME).write_text(page, encoding="utf-8")
        bench.forget_models()  # unlocks their page-locked memory; after an error the device may refuse it
    if old is not None:
        console.print(f"compared with {options.against} of {old.made}:")
        for number, sentence in enumerate(found):
            console.print(f"  {'first: ' if number == 0 else ''}{sentence}")
        if not found:
            console.print("  nothing differs")
    console.print(summary(records))
    if parallel.rank == 0:
        console.print(f"written: {path}, {output / PAGE_NAME}")
    return records


def load(name: str) -> Check:
    """Return the function of a check. Raises ConfigError if a user-defined check cannot be imported."""
    if name in BUILT_IN:
        return importlib.import_module(f"vapo_mcore.certify.checks.{name}").run  # type: ignore[no-any-return]
    try:
        return load_function(name)
    except ConfigError as error:
        raise ConfigError(f"--checks {name}: {error}") from error


def prepare(output: Path) -> None:
    """Create the output folder with an empty folder for files of the checks, and rename an older certificate and its page.

    So the folder has no certificate until this command has finished. Raises ConfigError if the folder cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(output / ".scratch", ignore_errors=True)
        (output / ".scratch").mkdir()
        (output / certificates.PARTIAL_NAME).unlink(missing_ok=True)
        for name, previous in ((certificates.FILE_NAME, certificates.PREVIOUS_NAME), (PAGE_NAME, PREVIOUS_PAGE_NAME)):
            if (output / name).is_file():
                (output / name).replace(output / previous)
    except OSError as error:
        raise ConfigError(f"--output {str(output)!r} cannot be written: {error.strerror}") from error


def _run(bench: Bench, name: str, function: Check) -> CheckRecord:
    """Run one check on all ranks. A VapoError becomes a finding; if ranks differ, the most severe verdict of each measurement counts."""
    begin = time.perf_counter()
    bench.begin_check()
    seed_everything(bench.config.seed)
    heartbeat.at_step(f"certify {name}")
    try:
        mine = _measurements(function(bench))
    except NotApplicable as reason:
        mine = [not_applicable(name, str(reason))]
    except VapoError as error:
        mine = [fails(name, f"could not be measured: {error}", remedy="solve what the message says, then certify again")]
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, ImportError) as error:
        if name in BUILT_IN:
            raise
        mine = [fails(name, f"the check raised {describe(error)}", remedy="fix the check")]
    release_free_memory()
    by_rank = all_gather_objects(mine)
    details = broadcast_object(bench.details)
    return CheckRecord(name, _merged(by_rank), details, time.perf_counter() - begin)


def _measurements(result: Any) -> list[Measurement]:
    """Return a check's result as a list of measurements; a user-defined check may return a single one."""
    found = [result] if isinstance(result, Measurement) else result
    if not isinstance(found, list | tuple) or not found or not all(isinstance(entry, Measurement) for entry in found):
        raise TypeError(f"it returned {type(result).__name__}: a check returns a Measurement or a list of them")
    odd = next((entry.verdict for entry in found if entry.verdict not in VERDICTS), None)
    if odd is not None:
        raise ValueError(f"it returned the verdict {odd!r}; there are {', '.join(VERDICTS)}")
    return list(found)


def _merged(by_rank: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """Merge the ranks' measurements: for each name, rank 0's or a more severe one, which names its rank."""
    merged = {entry.what: entry for entry in by_rank[0]}
    for rank, measurements in enumerate(by_rank[1:], 1):
        for entry in measurements:
            known = merged.get(entry.what)
            if known is None or VERDICTS.index(entry.verdict) > VERDICTS.index(known.verdict):
                merged[entry.what] = replace(entry, measured=f"rank {rank}: {entry.measured}")
    return list(merged.values())


def _machine(parallel: ParallelContext) -> dict[str, Any]:
    """Return devices and layout, for the certificate."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "world_size": parallel.world_size,
        "devices": sorted(set(all_gather_objects(device))),
        "backend": torch.distributed.get_backend(),
    }


def _headline(config: Config, options: CertifyOptions) -> str:
    p = config.parallel
    return (
        f"vapo-mcore certify: {config.model.path} ({config.model.dtype}), rollout by {config.rollout.engine}; {p.world_size} "
        f"process{'' if p.world_size == 1 else 'es'} = tensor {p.tensor_model_parallel_size} x pipeline {p.pipeline_model_parallel_size} x "
        f"context {p.context_parallel_size} x data {p.data_parallel_size}; checks: {', '.join(options.checks)}"
    )
