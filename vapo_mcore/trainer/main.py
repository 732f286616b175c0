"""Build everything a training run needs, run it, and close it. Cheap checks come first, so that errors appear before a model loads."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vapo_mcore.checkpoint.changes import compare_configs
from vapo_mcore.checkpoint.resume import (
    Checkpoint,
    ResumeOptions,
    choose,
    leave_newer,
    load_models,
    load_parts,
    load_state,
    restore_random,
)
from vapo_mcore.checkpoint.saver import Checkpointer
from vapo_mcore.checkpoint_files import remove_leftovers
from vapo_mcore.collectives import all_gather_objects, broadcast_object, fail_together, lost_a_peer, world
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.config.schema import Config
from vapo_mcore.data.chat_template import chat_tokenizer
from vapo_mcore.data.prompts import PromptDataset, load_prompts, overlaps
from vapo_mcore.data.tokenizer import unknown_token_ids
from vapo_mcore.errors import EXIT_REQUEUE, CheckpointError, ConfigError, DataError, RunStopped, TrainingError
from vapo_mcore.experience.evaluator import Evaluator
from vapo_mcore.experience.extension_checks import check_extensions
from vapo_mcore.experience.open_responses import OpenResponses
from vapo_mcore.experience.sampling import ResponseSampler
from vapo_mcore.launch.local import become_stoppable
from vapo_mcore.launch.ranks import SIBLINGS
from vapo_mcore.launch.signals import StopSignals
from vapo_mcore.launch.watchdog import Watchdog
from vapo_mcore.megatron.host import HAS_CUDA
from vapo_mcore.megatron.model import DTYPES
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.planning.host_memory import check_host_memory
from vapo_mcore.records.console import Console
from vapo_mcore.records.run_dir import RunDirectory, check_position, check_run_directory, finished_steps, holds_run
from vapo_mcore.records.run_lock import RunLock
from vapo_mcore.records.trackers import check_trackers
from vapo_mcore.rewards import VerifierPool, check_verifier_names
from vapo_mcore.rewards.region import AnswerRegion
from vapo_mcore.rollout.base import RolloutEngine
from vapo_mcore.rollout.factory import build_rollout_engine
from vapo_mcore.rollout.multi_turn import MultiTurn, ObservationFormat
from vapo_mcore.rollout.recovery import EngineRecovery
from vapo_mcore.rollout.stopping import StopTexts, described, end_of_turn_texts, stop_ids
from vapo_mcore.trainer.critic_probe import CriticProbe, probe_prompts
from vapo_mcore.trainer.loop import TrainingLoop
from vapo_mcore.trainer.models import build_models
from vapo_mcore.trainer.step import OPEN_RESPONSES, StepRunner
from vapo_mcore.weights.sync import WeightSync

_SECONDS_UNTIL_TERMINATED = 30.0


def run_training(config: Config, *, clean: bool, resume: ResumeOptions | None = None) -> int:
    """Train a configuration in this process, one of ``parallel.world_size``. Returns the exit code 0.

    Raises VapoError for errors that the user can fix and RunStopped when all ranks stop together. Any other exception ends this process
    without waiting for other ranks, which may be blocked in a collective; torchrun then terminates them.
    """
    configure_logging()
    parallel = initialize_parallel(config.parallel)
    with ending_together():
        train(config, parallel, clean=clean, resume=resume)
    return 0


@contextmanager
def ending_together() -> Iterator[None]:
    """Meet all ranks in a barrier and destroy the process group. If a rank is lost, the others wait until torchrun terminates them."""
    stopped: RunStopped | None = None
    try:
        try:
            yield
        except RunStopped as request:
            stopped = request
        dist.barrier()
        SIBLINGS.stop()
    except RuntimeError as error:
        if not lost_a_peer(error):
            raise
        # The failed rank prints the message. torchrun is about to terminate this one, which has nothing to save.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_SECONDS_UNTIL_TERMINATED)
        raise TrainingError(f"lost the connection to another rank, and the launcher did not terminate this one: {error}") from error
    dist.destroy_process_group()
    if stopped is not None:
        raise stopped


def train(config: Config, parallel: ParallelContext, *, clean: bool, resume: ResumeOptions | None = None) -> None:
    """Train in existing process groups. Closes everything it opened, also on an error.

    With ``resume`` the run continues from a checkpoint in ``run.dir``; without a checkpoint there it starts, and prints that it does.
    """
    seed_everything(config.seed)
    limit = None if config.faults.hang_minutes is None else 60 * config.faults.hang_minutes
    with ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(limit, rank=parallel.rank, world_size=parallel.world_size))
        console = Console(enabled=parallel.rank == 0)
        stack.callback(console.stop_progress)
        locked = _check_run_directory(config, parallel, clean, resume is not None, stack, console)
        console.print(_headline(config))
        past = None if resume is None else _find_past(config, resume, console)
        tokenizer, prompts, held_out = _load_data(config)
        with fail_together():
            probed = probe_prompts(config, prompts, held_out)
        multi_turn = build_multi_turn(config, tokenizer)
        _print_data(prompts, held_out, console)
        if past is not None and resume is not None:
            _continue_data(prompts, past, restart=resume.restart_data, console=console)
        region = AnswerRegion.of(config, tokenizer)
        console.print(described(stop_ids(config, tokenizer), tokenizer, StopTexts.of(config, tokenizer)))
        console.print(region.describe())
        with console.waiting("starting the rollout engine"):
            engine = build_engine(config, parallel, tokenizer, training=True)
        with console.waiting("starting the graders"):
            verifiers = start_verifiers(config, engine.is_replica_leader, stack, _verifiers(prompts, held_out))
        with console.waiting("building the models"):
            models = build_models(config, parallel, console.print)
        if past is not None:
            load_models(config, models, past.checkpoint)
        sync = WeightSync(models.policy, engine, models.residency, verify=config.rollout.verify_weights)
        recovery, end_texts = EngineRecovery(engine, sync.run, config.faults.engine_rebuilds), end_of_turn_texts(config, tokenizer)
        sampler = ResponseSampler(engine, verifiers, tokenizer, config.seed, multi_turn, region, end_texts, recovery)
        checkpointer = Checkpointer(config, parallel, models, console.print, resumed=None if past is None else past.checkpoint.manifest)
        stack.callback(checkpointer.close)
        trainer = StepRunner(
            config,
            parallel,
            models,
            sampler,
            sync,
            prompts.next_batch,
            probe=CriticProbe(config, probed, models.critic.parallel, sampler) if probed and models.critic is not None else None,
            open_responses=None if config.rollout.horizon is None else build_open_responses(config, engine, tokenizer, prompts),
            before_sync=checkpointer.snapshot_if_due,
        )
        trainer.state.register("prompts", prompts)
        evaluator = Evaluator(config, held_out.items) if held_out is not None else None
        run = TrainingLoop(config, trainer, evaluator, console, checkpointer)
        if past is not None:
            _load_state(trainer, past, prompts, restart=resume is not None and resume.restart_data, console=console)
        fresh = (clean or resume is not None) and locked
        run_dir = _open_run_directory(config, parallel, past, engine, stack, watchdog, console, fresh=fresh, locked=locked)
        if past is not None:
            restore_random(past.checkpoint, parallel.rank)
        stack.enter_context(StopSignals(lambda name: trainer.stop_requests.request(name, exit_code=EXIT_REQUEUE), console.print))
        become_stoppable()
        run.execute(run_dir)


@dataclass(frozen=True)
class _Past:
    """The state that a resumed run continues from."""

    checkpoint: Checkpoint
    state: Mapping[str, Any]


def _check_run_directory(config: Config, parallel: ParallelContext, clean: bool, resume: bool, stack: ExitStack, console: Console) -> bool:
    """Check run directory and host memory. Returns whether rank 0 locked an existing run; a new run is locked when it is created."""
    taken = False
    with fail_together():
        if parallel.rank == 0:
            check_run_directory(config.run.dir, clean=clean, resume=resume)
            check_trackers(config.run)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            check_host_memory(config, processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), cuda=HAS_CUDA)
        if parallel.rank == 0 and holds_run(config.run.dir):
            stack.enter_context(RunLock(config.run.dir, console.print))
            taken = True
    return taken


def _find_past(config: Config, resume: ResumeOptions, console: Console) -> _Past | None:
    """Find the checkpoint to continue from and check that the configuration may continue it."""
    checkpoint = choose(config.run.dir, resume.checkpoint, console.print)
    if checkpoint is None:
        steps = broadcast_object(finished_steps(config.run.dir))
        if steps is not None:
            raise ConfigError(
                f"run.dir: the run in {config.run.dir!r} is finished ({steps} steps) and has no checkpoint to continue from "
                "(checkpoint.at_end saves the last step); choose another run.dir, or delete this run and start again with --clean"
            )
        console.print(f"nothing to resume: {config.run.dir} has no checkpoint; starting from the beginning")
        return None
    with fail_together():
        compare_configs(config, checkpoint.path, allow=resume.allow_config_change, say=console.print)
    manifest = checkpoint.manifest
    console.print(
        f"resuming from {checkpoint.path}: after step {manifest.step} ({manifest.stage}), saved by vapo-mcore {manifest.package_version}"
    )
    state = load_state(checkpoint)
    with fail_together():
        if world()[0] == 0:
            check_position(config.run.dir, state["files"]["metrics_bytes"])
    return _Past(checkpoint, state)


def _continue_data(prompts: PromptDataset, past: _Past, *, restart: bool, console: Console) -> None:
    """Continue the order of the training prompts from the checkpoint, or restart it with ``--restart-data``."""
    if restart:
        console.print("training prompts: restarted (--restart-data)")
        return
    try:
        prompts.load_state_dict(past.state["objects"]["prompts"])
    except DataError as error:
        raise DataError(f"{error}; use the run's data, or restart the prompts with --restart-data") from error


def configure_logging() -> None:
    """Log warnings of this package, and only errors of other libraries."""
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("vapo_mcore").setLevel(logging.WARNING)
    # Silence resource_tracker: after a rank is terminated it always reports the graders' locks.
    given = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (given, "ignore:resource_tracker:UserWarning")))


def seed_everything(seed: int) -> None:
    """Seed the global RNGs that libraries use implicitly; sampling, shuffling and initial heads derive their own seeds."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _open_run_directory(
    config: Config,
    parallel: ParallelContext,
    past: _Past | None,
    engine: RolloutEngine,
    stack: ExitStack,
    watchdog: Watchdog,
    console: Console,
    *,
    fresh: bool,
    locked: bool,
) -> RunDirectory | None:
    """Create the run directory, or rewind it to the checkpoint, and open its writers, on rank 0. Returns None on other ranks.

    Call it last: a start that fails earlier leaves nothing behind, and a resume that fails earlier leaves the run unchanged.
    """
    run_dir = None
    yaml = dump_yaml(config)
    with fail_together():
        if parallel.rank == 0:
            if past is None:
                run_dir = RunDirectory.create(config.run.dir, clean=fresh, config_yaml=yaml)
            else:
                leave_newer(config.run.dir, past.checkpoint, console.print)
                run_dir = RunDirectory.resume(config.run.dir, **past.state["files"], config_yaml=yaml)
            if not locked:
                stack.enter_context(RunLock(config.run.dir, console.print))
            remove_leftovers(config.run.dir)
            stack.callback(run_dir.close)
            run_dir.start_trackers(config)
            watchdog.clear(config.run.dir)
    with fail_together():
        watchdog.attach(config.run.dir)
    if run_dir is not None:
        run_dir.write_engine(engine.settings())
    return run_dir


def _load_data(config: Config) -> tuple[Any, PromptDataset, PromptDataset | None]:
    """Load tokenizer, training prompts and held-out prompts, and report all errors in all files before a model loads.

    Every rank reads the files, so all ranks have the same prompts and find the same errors.
    """
    with fail_together():
        tokenizer = chat_tokenizer(config.model.path, config.data)
        check_extensions(config, verifiers=False)  # the grading processes load the verifiers
        datasets = load_prompts(config.data, tokenizer, seed=config.seed)
        train, held_out = datasets["train"], datasets.get("eval")
        check_verifier_names(_verifiers(train, held_out))
    for dataset in (train, held_out):
        if dataset is not None and len(set(all_gather_objects(dataset.fingerprint))) > 1:
            raise DataError(
                f"data.{dataset.split}: the prompts differ between ranks; a custom task must return the same prompts on every call"
            )
    return tokenizer, train, held_out


def _print_data(prompts: PromptDataset, held_out: PromptDataset | None, console: Console) -> None:
    """Print the sizes of the datasets, and a warning for each evaluation set that shares prompts with training."""
    for dataset in (prompts, held_out):
        if dataset is not None:
            console.print(dataset.summary)
    for sentence in [] if held_out is None else overlaps(prompts, held_out):
        console.print(f"warning: {sentence}: its score does not measure unseen problems")


def build_multi_turn(config: Config, tokenizer: Any) -> MultiTurn | None:
    """Build the multi-turn loop, or return None without an environment."""
    settings = config.rollout.environment
    multi_turn = None
    with fail_together():
        if settings is not None:
            data = config.data
            observation_format = ObservationFormat.build(
                tokenizer, settings, chat_template=bool(data.chat_template), kwargs=data.chat_template_kwargs
            )
            multi_turn = MultiTurn(settings, observation_format, StopTexts.of(config, tokenizer))
    return multi_turn


def build_open_responses(config: Config, engine: RolloutEngine, tokenizer: Any, prompts: PromptDataset) -> OpenResponses:
    """Build the table of open responses of a run with ``rollout.horizon``."""
    return OpenResponses(
        config,
        replica=engine.replica_index,
        replicas=engine.num_replicas,
        stop_texts=StopTexts.of(config, tokenizer),
        prompts={prompt.prompt_id: prompt for prompt in prompts.items},
    )


def _load_state(trainer: StepRunner, past: _Past, prompts: PromptDataset, *, restart: bool, console: Console) -> None:
    """Load the state of all objects but the prompts, which ``_continue_data`` has loaded, and the tokens of open responses."""
    objects = _objects(trainer, past, restart=restart, console=console)
    trainer.state.load_state_dict(objects | {"prompts": prompts.state_dict()})
    if trainer.open_responses is not None:
        parts = load_parts(past.checkpoint, trainer.open_responses.parts_needed())
        with fail_together():
            trainer.open_responses.load_parts(parts)


def _objects(trainer: StepRunner, past: _Past, *, restart: bool, console: Console) -> dict[str, Any]:
    """Return the saved state of the trainer's objects, with the open responses that this configuration continues.

    Raises CheckpointError if there are some and it continues none.
    """
    found = dict(past.state["objects"])
    saved, name = found.pop(OPEN_RESPONSES, None), OPEN_RESPONSES
    count = 0 if saved is None else len(saved["responses"])
    if restart and count:
        console.print(f"open responses: {count} dropped (--restart-data)")
    if trainer.open_responses is not None:
        empty = trainer.open_responses.state_dict()  # where the saved run had no horizon
        return found | {name: empty if saved is None else saved | ({"responses": []} if restart else {})}
    if count and not restart:
        raise CheckpointError(
            f"{past.checkpoint.path} has {count} open responses, which only a run with rollout.horizon can continue; give the run's "
            "rollout.horizon, or drop them, and restart the prompts, with --restart-data"
        )
    return found


def _verifiers(*datasets: PromptDataset | None) -> list[str]:
    return sorted({prompt.verifier for dataset in datasets if dataset is not None for prompt in dataset.items})


def build_engine(config: Config, parallel: ParallelContext, tokenizer: Any, *, training: bool) -> RolloutEngine:
    """Build the rollout engine. Call it before the models are built: engine errors appear early, and vLLM profiles an empty device.

    Only for ``training`` can it return choices of experts.
    """
    architecture = read_architecture(config.model.path)
    return build_rollout_engine(
        config.rollout,
        config.model.path,
        DTYPES[config.model.dtype],
        tensor_parallel_size=config.rollout_tensor_parallel_size,
        max_model_len=config.max_sequence_length,
        rank=parallel.rank,
        world_size=parallel.world_size,
        seed=config.seed,
        stop_ids=stop_ids(config, tokenizer),
        stop_texts=StopTexts.of(config, tokenizer),
        unknown_token_ids=unknown_token_ids(tokenizer, architecture.vocab_size),
        expert_choices=architecture.expert_choices if training and config.model.router.replay == "engine" else None,
    )


def start_verifiers(config: Config, leads: bool, stack: ExitStack, verifiers: list[str]) -> VerifierPool | None:
    """Start the grading processes where this rank leads a rollout replica and import the data's verifiers in them."""
    pool = None
    with fail_together():
        if leads:
            pool = stack.enter_context(_verifier_pool(config))
            environment = config.rollout.environment
            pool.load(verifiers, [environment.name] if environment is not None else [])
    return pool


def _verifier_pool(config: Config) -> VerifierPool:
    """Create the pool. Scores range over ``reward.scale.source``, by default 0 to 1; the highest score means "correct"."""
    scores = (0.0, 1.0) if config.reward.scale is None else config.reward.scale.source
    return VerifierPool(
        config.reward.workers,
        config.reward.timeout_seconds,
        threshold=scores[1],
        score_range=scores,
        restarts=config.faults.grader_restarts,
    )


def _headline(config: Config) -> str:
    p, b, estimator = config.parallel, config.batch, config.algorithm.advantage.estimator
    critic = f" (critic: {config.critic_parallel.degrees_text})" if config.layouts_differ else ""
    return (
        f"vapo-mcore: {config.model.path} ({config.model.dtype}), {estimator}, rollout by {config.rollout.engine}; "
        f"{p.world_size} process{'' if p.world_size == 1 else 'es'} = {p.degrees_text}{critic}; "
        f"{b.prompts_per_step} prompts x {b.responses_per_prompt} responses a step; run directory {config.run.dir}"
    )
