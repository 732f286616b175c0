"""``vapo-mcore eval``: load a checkpoint into a rollout engine, evaluate it on the evaluation sets, and write the results to a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore import heartbeat
from vapo_mcore.collectives import broadcast_object, fail_together
from vapo_mcore.config.schema import Config
from vapo_mcore.data.chat_template import chat_tokenizer
from vapo_mcore.data.prompts import load_prompts
from vapo_mcore.errors import CheckpointError
from vapo_mcore.evaluation.report import JSON_NAME, MARKDOWN_NAME, console_lines, write_report
from vapo_mcore.evaluation.store import RECORDS, ResponseStore
from vapo_mcore.experience.evaluator import Evaluator, evaluation_settings
from vapo_mcore.experience.sampling import ResponseSampler
from vapo_mcore.launch.watchdog import Watchdog
from vapo_mcore.megatron.model import DTYPES
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.records.console import Console
from vapo_mcore.rewards import check_verifier_names
from vapo_mcore.rewards.region import AnswerRegion
from vapo_mcore.rollout.base import Replica, RolloutEngine
from vapo_mcore.rollout.factory import ranks_of_replica
from vapo_mcore.trainer.main import build_engine, build_multi_turn, configure_logging, ending_together, start_verifiers
from vapo_mcore.weights.views import HfView, open_view

_BUCKET_BYTES = 256 << 20


def run_evaluation(config: Config, checkpoint: str, output: str, *, clean: bool) -> int:
    """Evaluate ``checkpoint`` on ``data.eval`` in this process, one of ``parallel.world_size``. Returns the exit code 0.

    ``checkpoint`` is a Hugging Face folder or a Megatron distributed checkpoint; ``config.model.path`` has its architecture and
    tokenizer. Raises VapoError for errors that the user can fix.
    """
    configure_logging()
    parallel = initialize_parallel(config.parallel)
    with ending_together():
        evaluate(config, parallel, checkpoint, output, clean=clean)
    return 0


def evaluate(config: Config, parallel: ParallelContext, checkpoint: str, output: str, *, clean: bool) -> None:
    """Evaluate in existing process groups."""
    console = Console(enabled=parallel.rank == 0)
    limit = None if config.faults.hang_minutes is None else 60 * config.faults.hang_minutes
    with ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(limit, rank=parallel.rank, world_size=parallel.world_size))
        with fail_together():
            view = stack.enter_context(open_view(checkpoint, role="policy", companions=_companions(checkpoint, config)))
            tokenizer = chat_tokenizer(config.model.path, config.data)
            dataset = load_prompts(config.data, tokenizer, seed=config.seed, splits=("eval",))["eval"]
            verifiers = sorted({prompt.verifier for prompt in dataset.items})
            check_verifier_names(verifiers)
        console.print(f"vapo-mcore eval: {checkpoint} ({config.model.dtype}), rollout by {config.rollout.engine}; results in {output}")
        if config.uses_critic and config.critic.parallel is not None:
            console.print("critic.parallel is not used: an evaluation builds no critic")
        console.print(dataset.summary)
        evaluator = Evaluator(config, dataset.items)
        chunks = evaluator.chunks(_replicas(config, parallel))
        store = None
        with fail_together():
            if parallel.rank == 0:
                store = ResponseStore.open(output, _identity(config, parallel, evaluator, view), clean=clean)
                watchdog.clear(output)
        with fail_together():
            watchdog.attach(output)
        done = broadcast_object(0 if store is None else len(store.chunks))
        if done:
            console.print(f"resuming: {done} of {len(chunks)} chunks are done already")
        sampler = None
        if done < len(chunks):
            engine = build_engine(config, parallel, tokenizer, training=False)
            pool = start_verifiers(config, engine.is_replica_leader, stack, verifiers)
            with heartbeat.entering("load"):
                _load(engine, view, DTYPES[config.model.dtype])
            turns, region = build_multi_turn(config, tokenizer), AnswerRegion.of(config, tokenizer)
            sampler = ResponseSampler(engine, pool, tokenizer, config.seed, turns, region)
        evaluation = evaluator.run_stored(sampler, store, done, chunks, console.print)
        if store is not None:
            settings = {"checkpoint": checkpoint, **evaluation_settings(config)}
            title = f"Evaluation of {checkpoint}"
            write_report(
                store.folder, Path(JSON_NAME).stem, title, settings, evaluation.summaries, evaluation.seconds, processes=parallel.world_size
            )
    for line in console_lines(evaluation.summaries):
        console.print(line)
    console.print(f"written: {Path(output) / JSON_NAME}, {Path(output) / MARKDOWN_NAME}")


def _companions(checkpoint: str, config: Config) -> str | None:
    """Return the folder with config and tokenizer for a Megatron checkpoint that has none, else None."""
    return None if Path(checkpoint, "hf").is_dir() else config.model.path


def _replicas(config: Config, parallel: ParallelContext) -> int:
    """Return the number of rollout replicas without building an engine."""
    return Replica.of_rank(parallel.rank, parallel.world_size, ranks_of_replica(config)).count


def _identity(config: Config, parallel: ParallelContext, evaluator: Evaluator, view: HfView) -> dict[str, Any]:
    """Return the settings that must not change when an evaluation is resumed."""
    return {
        "records": RECORDS,
        **evaluation_settings(config),
        "stop": [*config.rollout.stop_token_ids, *config.rollout.stop],
        "answer_region": [config.reward.answer_region, *config.reward.thinking_tags],
        "weights": weights_fingerprint(view.folder),
        "prompts": evaluator.fingerprint(),
        "responses_per_chunk": config.eval.responses_per_chunk,
        "replicas": _replicas(config, parallel),
        "tensor_parallel_size": config.rollout_tensor_parallel_size,
    }


def weights_fingerprint(folder: Path) -> str:
    """Return a digest of the weight files' names, sizes and modification times; hashing the weights themselves would take minutes."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".distcp") or file.name in (".metadata", "config.json"):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _load(engine: RolloutEngine, view: HfView, dtype: torch.dtype) -> None:
    """Load the checkpoint's tensors into the engine the way training's weight sync does."""
    names = [name for entry in view.plan for name in entry.hf_names]
    engine.wake_weights()
    engine.update_weights(_buckets(view, dtype), names)
    engine.wake_kv_cache()
    if dist.is_initialized():
        dist.barrier()


def _buckets(view: HfView, dtype: torch.dtype) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, stored in view.all_tensors():
        heartbeat.alive()
        tensor = stored.to(dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{view.folder}: {name} has values out of range for model.dtype = {str(dtype).removeprefix('torch.')}")
        bucket.append((name, tensor))
        size += tensor.nbytes
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
