"""The command line ``vapo-mcore COMMAND``: parse the arguments, run the checks that do not need torch, and start the command."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from vapo_mcore import __version__
from vapo_mcore.errors import ConfigError, VapoError
from vapo_mcore.interrupts import EXIT_INTERRUPTED, importing, report_interrupted

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config

_OVERRIDES_HELP = "settings that override FILE, with YAML values, e.g. batch.mini_batch_size=64 data.train.0.path=x.jsonl critic=null"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: success. 2: an error that the user can fix; its message was printed. 75: stopped by a signal, with a checkpoint to resume from.
    130: interrupted with Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "RANK" in os.environ:
        from vapo_mcore.launch import ranks

        ranks.end_with_launcher()
        ranks.SIBLINGS.start()
    try:
        try:
            code = _run(_parse(arguments), arguments)
        finally:
            sys.stdout.flush()  # now, since an error at interpreter exit could not be reported
        return code
    except VapoError as error:
        _report(str(error), error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        report_interrupted()
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has exited, for example ``| head``
        _drop_output()
        return 141
    except OSError as error:
        if not _is_stdout_error(error):
            raise
        _drop_output()
        _report(f"cannot write to stdout: {error.strerror}", 2)
        return 2


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    if options.command in ("train", "eval", "replay-step", "pretrain-critic", "certify"):
        from vapo_mcore.launch.allocator import prepare_allocator

        prepare_allocator(os.environ)
    if options.command == "config":
        return _config(options)
    if options.command == "convert":
        from vapo_mcore.weights import command

        return command.run(options)
    if options.command == "plan":
        from vapo_mcore.planning import command as plan

        return plan.run(options)
    if options.command == "launch":
        from vapo_mcore.launch import command as launch

        return launch.run(options)
    if options.command == "data":
        from vapo_mcore.data import command as data_command
        from vapo_mcore.rewards.truths import truth_faults

        return data_command.run(options, truth_faults)
    if options.command == "eval":
        from vapo_mcore.commands import evaluate_command as evaluation

        return evaluation.run(options, arguments, functools.partial(_load_on_every_rank, builds_critic=False))
    if options.command == "replay-step":
        from vapo_mcore.commands import replay_command

        return replay_command.run(options, arguments, _load_on_every_rank)
    if options.command == "pretrain-critic":
        from vapo_mcore.commands import pretrain_critic_command

        return pretrain_critic_command.run(options, arguments, _load_on_every_rank)
    if options.command == "certify":
        from vapo_mcore.certify import command as certify

        return certify.run(options, arguments, _load_on_every_rank)
    if options.command == "watch":
        from vapo_mcore.watch import command as watch

        return watch.run(options)
    if options.command == "doctor":
        from vapo_mcore.doctor import command as doctor

        return doctor.run(options)
    if options.command == "report":
        from vapo_mcore.report import command as report

        return report.run(options)
    return _train(options, arguments)


def _is_stdout_error(error: OSError) -> bool:
    """Return whether ``error`` came from stdout (``> /dev/full``): then another write fails with the same error."""
    if error.filename is not None:
        return False
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as again:
        return again.errno == error.errno
    return False


def _drop_output() -> None:
    """Redirect stdout to /dev/null, so that flushing its buffer at interpreter exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(arguments: list[str]) -> argparse.Namespace:
    description = "Train language models by reinforcement learning (VAPO, PPO, GRPO, DAPO, ...) with Megatron-Core and vLLM."
    parser = argparse.ArgumentParser(prog="vapo-mcore", description=description)
    parser.add_argument("--version", action="version", version=f"vapo-mcore {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    config = commands.add_parser("config", help="check a configuration and print it with all defaults")
    config.add_argument("--skip-paths", action="store_true", help="do not check the model folder and the data files")

    train = commands.add_parser("train", help="train a model; starts all ranks on this machine unless torchrun has started them")
    _add_train_arguments(train)

    configured = [config, train, *_add_configured_commands(commands)]
    _add_other_commands(commands)
    for command in configured:
        command.add_argument("file", metavar="FILE", help="YAML configuration")
        command.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help=_OVERRIDES_HELP)
    options, rest = parser.parse_known_args(arguments)
    _append_rest(parser, options, rest)
    if options.command == "train":
        _require_consistent_resume(parser, options)
    return options


def _add_configured_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> list[argparse.ArgumentParser]:
    """Add the commands that take FILE and KEY=VALUE, without these arguments; returns their parsers."""
    from vapo_mcore.commands import evaluate_command as evaluating

    evaluation = commands.add_parser("eval", help="evaluate a checkpoint on the evaluation sets of a configuration")
    evaluating.add_arguments(evaluation)

    from vapo_mcore.launch import command as launching

    launch = commands.add_parser("launch", help="start a run with nemo-run, on Slurm or on this machine")
    launching.add_arguments(launch)

    from vapo_mcore.certify import command as certifying

    certify = commands.add_parser("certify", help="measure whether trainer, engine, critic, graders and machine agree, before a run")
    certifying.add_arguments(certify)

    from vapo_mcore.commands import pretrain_critic_command

    pretraining = commands.add_parser("pretrain-critic", help="train a critic on scored responses from disk, without policy and engine")
    pretrain_critic_command.add_arguments(pretraining)

    from vapo_mcore.planning import command as planning

    plan = commands.add_parser("plan", help="estimate a run's memory per rank, time and GPU-hours, and suggest changes if it does not fit")
    planning.add_arguments(plan)
    return [evaluation, launch, certify, pretraining, plan]


def _add_other_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands that need no configuration, with all their arguments."""
    from vapo_mcore.data import command as data

    data.add_arguments(commands.add_parser("data", help="check and show data files"))

    from vapo_mcore.weights import command as convert

    convert.add_arguments(commands.add_parser("convert", help="convert checkpoints between Hugging Face and Megatron, and compare them"))

    from vapo_mcore.doctor import command as doctor

    doctor.add_arguments(commands.add_parser("doctor", help="check whether this machine, or a group of nodes, can run a recipe"))

    from vapo_mcore.watch import command as watching

    watching.add_arguments(commands.add_parser("watch", help="show a running job live in the terminal, from its run directory"))

    from vapo_mcore.report import command as reporting

    reporting.add_arguments(commands.add_parser("report", help="write an HTML report of one or several runs"))

    from vapo_mcore.commands import replay_command

    replay = commands.add_parser("replay-step", help="repeat a step of a run from its dumped rollout and compare the metrics")
    replay_command.add_arguments(replay)


def _add_train_arguments(train: argparse.ArgumentParser) -> None:
    train.add_argument("--dry-run", action="store_true", help="check everything that needs no model, then stop")
    train.add_argument("--clean", action="store_true", help="delete the run in run.dir before starting")
    train.add_argument("--resume", action="store_true", help="continue the run in run.dir; start it if it has no checkpoint yet")
    train.add_argument("--resume-from", metavar="NAME", help="continue from this checkpoint of run.dir (a folder in checkpoints/)")
    train.add_argument("--allow-config-change", action="store_true", help="resume even if settings that affect training have changed")
    train.add_argument("--restart-data", action="store_true", help="resume, but restart the training prompts from the beginning")


def _require_consistent_resume(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set ``options.resume`` if a checkpoint is named; end with a usage error if options of ``train`` contradict each other."""
    options.resume = options.resume or options.resume_from is not None
    if options.resume and options.clean:
        parser.error("--resume continues a run, --clean deletes it: use only one of them")
    if not options.resume and (options.allow_config_change or options.restart_data):
        parser.error("--allow-config-change and --restart-data need --resume")


def _append_rest(parser: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str]) -> None:
    """Append positional arguments that follow an option, which argparse leaves over, to those before it."""
    destinations = {"data": "paths", "report": "runs", "convert": None, "watch": None}
    destination = destinations.get(options.command, "overrides")
    unknown = [argument for argument in rest if destination is None or argument.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if destination is not None:
        setattr(options, destination, getattr(options, destination) + rest)


def _config(options: argparse.Namespace) -> int:
    from vapo_mcore.config.loading import dump_yaml, load_config

    print(dump_yaml(load_config(options.file, options.overrides, check_paths=not options.skip_paths)), end="", flush=True)
    return 0


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    from vapo_mcore.certify.certificate import require_certificate
    from vapo_mcore.launch import local

    config = _load_on_every_rank(options)
    require_certificate(config)
    if options.resume and options.resume_from is None and _is_finished(config):
        return 0
    if options.dry_run or not local.under_torchrun():
        _check_files(config, options)
        if options.dry_run:
            if os.environ.get("RANK", "0") == "0":
                print(_plan(config), flush=True)
            return 0
        if config.parallel.world_size > 1:
            print(f"starting {config.parallel.world_size} processes", flush=True)
            return local.launch("vapo_mcore.cli", arguments, config.parallel.world_size)
        local.become_single_process()

    with importing(), _waiting_on_rank_0("loading the libraries"):
        from vapo_mcore.checkpoint.resume import ResumeOptions
        from vapo_mcore.trainer.main import run_training

    resume = ResumeOptions(options.resume_from, options.allow_config_change, options.restart_data) if options.resume else None
    return run_training(config, clean=options.clean, resume=resume)


def _waiting_on_rank_0(activity: str) -> AbstractContextManager[None]:
    from vapo_mcore.records.console import waiting

    return waiting(activity, functools.partial(print, flush=True)) if os.environ["RANK"] == "0" else nullcontext()


def _is_finished(config: Config) -> bool:
    """Return whether the run in run.dir is finished, and print it."""
    from vapo_mcore.records.run_dir import finished_steps

    steps = finished_steps(config.run.dir)
    if steps is None or steps < config.run.steps:
        return False
    if os.environ.get("RANK", "0") == "0":
        print(f"nothing to resume: the run in {config.run.dir} is finished ({steps} steps)", flush=True)
    return True


def _check_files(config: Config, options: argparse.Namespace) -> None:
    """Check the run directory, all rows of the data, and the headers of the weights. Raises one ConfigError with all errors."""
    from vapo_mcore.checkpoint_files import saved_weights
    from vapo_mcore.config.architecture import read_architecture
    from vapo_mcore.data.chat_template import chat_tokenizer
    from vapo_mcore.data.prompts import check_prompts
    from vapo_mcore.experience.extension_checks import check_extensions
    from vapo_mcore.planning.host_memory import check_host_memory
    from vapo_mcore.records.run_dir import check_run_directory
    from vapo_mcore.records.trackers import check_trackers
    from vapo_mcore.weights.loader import check_folder

    checks: list[tuple[str, Callable[[], None]]] = [
        ("", lambda: check_run_directory(config.run.dir, clean=options.clean, resume=options.resume)),
        ("", lambda: check_trackers(config.run)),
        ("", lambda: check_extensions(config)),
        ("", lambda: check_prompts(config.data, lambda: chat_tokenizer(config.model.path, config.data))),
        ("model.path: ", lambda: check_folder(config.model.path, read_architecture(config.model.path), role="policy")),
    ]
    if config.model.offload:  # null means "if CUDA is available"; each node then checks when its processes start
        checks.append(("", lambda: check_host_memory(config, processes=config.parallel.world_size, cuda=False)))
    if options.resume:
        checks.append(("", lambda: _check_resume(config, options.resume_from, allow_change=options.allow_config_change)))
    critic = config.critic.path if config.uses_critic else None
    if critic is not None and saved_weights(critic, "critic") is None:
        checks.append(("critic.path: ", lambda: check_folder(critic, read_architecture(critic), role="critic")))
    faults = []
    for where, check in checks:
        try:
            check()
        except VapoError as error:
            faults.append(f"{where}{error}")
    if faults:
        raise ConfigError("\n".join(faults))


def _check_resume(config: Config, name: str | None, *, allow_change: bool) -> None:
    """Raise VapoError if ``config`` cannot continue any checkpoint of the run, or not the named one. Does not read weights."""
    from vapo_mcore.checkpoint.changes import compare_configs
    from vapo_mcore.checkpoint_files import list_checkpoints, require_named

    found = list_checkpoints(config.run.dir)
    if name is not None:
        require_named(config.run.dir, name, [path.name for path in found])
        found = [path for path in found if path.name == name]
    refusal: VapoError | None = None
    for path in found:  # report the error of the last, which is the newest
        try:
            compare_configs(config, path, allow=allow_change, say=lambda _: None)
            return
        except VapoError as error:
            refusal = error
    if refusal is not None:
        raise refusal


def _load_on_every_rank(options: argparse.Namespace, settings: Sequence[str] = (), *, builds_critic: bool = True) -> Config:
    """Load the configuration. All ranks find the same errors; only rank 0 reports them, unless a launcher collects them."""
    from vapo_mcore.config import load_config
    from vapo_mcore.launch.local import ERRORS_VARIABLE

    try:
        config = load_config(options.file, [*options.overrides, *settings], builds_critic=builds_critic)
        started = int(os.environ.get("WORLD_SIZE", config.parallel.world_size))
        if started != config.parallel.world_size:
            raise ConfigError(
                f"parallel.world_size = {config.parallel.world_size}, but torchrun started {started} processes; make them equal"
            )
        return config
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0" or ERRORS_VARIABLE in os.environ:
            raise
        time.sleep(2.0)  # torchrun terminates all ranks once one exits: let rank 0 report first
        raise SystemExit(error.exit_code) from error


def _report(message: str, exit_code: int) -> None:
    from vapo_mcore.launch.local import report_error

    report_error(message, exit_code)


def _plan(config: Config) -> str:
    """Summarize what a run of ``config`` would do, for ``--dry-run``."""
    p, b = config.parallel, config.batch
    pretraining = config.critic.value_pretraining.max_steps if config.uses_critic else 0
    critic = f"; critic: {config.critic_parallel.degrees_text}" if config.layouts_differ else ""
    return "\n".join(
        (
            f"configuration is valid; nothing was started (run directory {config.run.dir})",
            f"processes: {p.world_size} = {p.degrees_text}{critic}",
            f"per step: {b.prompts_per_step} prompts x {b.responses_per_prompt} responses = {b.responses_per_step} responses,"
            f" {b.updates_per_step * config.policy.epochs} policy updates in mini-batches of {b.mini_batch_size}",
            f"steps: {pretraining} of value pretraining, then {config.run.steps}",
            f"advantages: {config.algorithm.advantage.estimator}, {'with' if config.uses_critic else 'without'} critic",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
