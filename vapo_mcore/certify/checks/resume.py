"""Resume: a step, a checkpoint, a second step; then the checkpoint loaded and the second step again, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.memory import release_free_memory
from vapo_mcore.certify.record import Measurement, fails, holds, warns
from vapo_mcore.certify.state import differing, state_checksums
from vapo_mcore.checkpoint.resume import choose, load_models, load_state, restore_random
from vapo_mcore.checkpoint.saver import Checkpointer
from vapo_mcore.commands.replay import ReplayStepRunner
from vapo_mcore.config.schema import Config
from vapo_mcore.data.rollout_batch import RolloutBatch, gather_rows
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.experience.responses import Response, response_rows
from vapo_mcore.experience.sampling import Round, no_rows
from vapo_mcore.experience.step_dump import StepDump
from vapo_mcore.megatron.roles import Models
from vapo_mcore.rewards import Verdict
from vapo_mcore.rollout.base import Generation, GenerationRequest, Trajectory

PROMPTS, SAMPLES, LENGTH = 2, 2, 24
"""A rollout of drawn token ids (of as many prompts as data-parallel ranks, at least), half of the responses of each prompt called right."""
MOST_PROMPT = 16
"""Tokens of a prompt, at most: three steps are made, and on CPUs their passes take most of the time."""


def run(bench: Bench) -> list[Measurement]:
    """Train on a made-up rollout, in a run directory of the scratch folder. Engine and models are built anew for what comes after."""
    try:
        return _measure(bench)
    finally:
        bench.forget_models()


def _measure(bench: Bench) -> list[Measurement]:
    """Save, load and compare.

    What a part needs is freed before the next one: snapshots of a checkpoint, and what loading one takes, are as large as the models.
    """
    config = _config(bench)
    models, parallel = bench.models, bench.parallel
    bench.forget_engine()
    sampled = _rollout(bench)
    counts = SamplingCounts(rounds=1, prompts_tried=len(sampled.rows) // SAMPLES).with_responses([sampled])
    runner = ReplayStepRunner(config, parallel, models, after_pretraining=True)
    runner.replay(StepDump("rl", 1, 1, sampled, counts))
    saved = state_checksums(models)
    _save(config, bench, runner)
    checkpoint = choose(config.run.dir, None, lambda _: None)
    if checkpoint is None:
        return [fails("checkpoint", "could not be saved", remedy="look at free space and permissions of --output")]
    second = StepDump("rl", 2, 2, sampled, counts)
    first_row = runner.replay(second).row
    first_state = state_checksums(models)
    del runner
    release_free_memory()
    with without_gradients(models):
        load_models(config, models, checkpoint)
    release_free_memory()
    found = [_restored(differing(saved, state_checksums(models)), len(saved))]
    again = ReplayStepRunner(config, parallel, models, load_state(checkpoint)["objects"], after_pretraining=False)
    restore_random(checkpoint, parallel.rank)
    again_row = again.replay(second).row
    found.append(_repeated(differing(first_state, state_checksums(models)), first_row, again_row, found[0]))
    return found


def _save(config: Config, bench: Bench, runner: ReplayStepRunner) -> None:
    """Save a checkpoint of step 1 in the format that most checkpoints of a run have. A collective.

    ``checkpoint.reshardable_every: 1`` gives the other format, for which all optimizer state is gathered first.
    """
    checkpointer = Checkpointer(config, bench.parallel, bench.models, lambda _: None)
    try:
        with without_gradients(bench.models):
            checkpointer.begin("rl", 1)
            checkpointer.commit({"objects": runner.state.state_dict(), "files": {}, "run_id": "certify"}, {})
            checkpointer.wait()
    finally:
        checkpointer.close()
        checkpointer.release()
    del checkpointer
    release_free_memory()


@contextmanager
def without_gradients(models: Models) -> Iterator[None]:
    """Free the memory of the gradients, which no checkpoint has, for a while; they come back as zeros."""
    resident = [offloader for offloader in models.residency.offloaders.values() if "grads" in offloader.resident]
    for offloader in resident:
        offloader.offload({"grads"})
    try:
        yield
    finally:
        for offloader in resident:
            offloader.onload({"grads"})


def _config(bench: Bench) -> Config:
    config = bench.config
    run_settings = config.run.model_copy(update={"dir": str(bench.scratch / "run"), "dump_every_steps": 0, "dump_steps": ()})
    model = config.model
    if model.router.replay == "engine":  # the rollout is made up: no engine chose experts for it
        model = model.model_copy(update={"router": model.router.model_copy(update={"replay": "trainer"})})
    return config.model_copy(update={"run": run_settings, "model": model})


def _rollout(bench: Bench) -> Round:
    """Responses of drawn ids with the trainer's own log-probs, all held by rank 0. A collective."""
    known = sorted(set(range(bench.architecture.vocab_size)) - set(bench.unknown_token_ids))
    length = min(LENGTH, bench.config.rollout.max_response_length)
    generator = torch.Generator().manual_seed(bench.config.seed)
    prompts = [
        replace(prompt, token_ids=prompt.token_ids[-MOST_PROMPT:])
        for prompt in bench.checked_prompts(max(PROMPTS, bench.parallel.data_parallel_size))
    ]
    groups = [group for group in range(len(prompts)) for _ in range(SAMPLES)]
    drawn = [[known[int(i)] for i in torch.randint(len(known), (length,), generator=generator)] for _ in groups]
    sequences = [[*prompts[group].token_ids, *ids] for group, ids in zip(groups, drawn, strict=True)]
    with bench.on_device("logprobs") as models:
        logprobs = models.policy.forward(bench.microbatches(sequences), temperature=bench.config.rollout.temperature)["logprobs"]
    responses = []
    for number, (group, ids) in enumerate(zip(groups, drawn, strict=True)):
        request = GenerationRequest(prompts[group].prompt_id, number % SAMPLES, prompts[group].token_ids, number)
        own = logprobs[number][-length:].cpu().tolist()
        responses.append(Response(prompts[group], Trajectory.of_one_turn(Generation(request, ids, own, "stop")), [""]))
    verdicts = [Verdict(float(number % 2), number % 2 == 1, None, 0.0) for number in range(len(responses))]
    rows = response_rows(groups, responses, verdicts, [() for _ in responses])
    local = no_rows()
    if bench.parallel.rank == 0:
        trajectories = [response.trajectory for response in responses]
        local = RolloutBatch.from_responses(
            rows,
            [response.prompt.token_ids for response in responses],
            [trajectory.token_ids for trajectory in trajectories],
            [trajectory.logprobs for trajectory in trajectories],
            row_ids=torch.arange(len(responses)),
        )
    rows, holder = gather_rows(local)
    return Round(rows, holder, local, {})


def _restored(changed: list[str], count: int) -> Measurement:
    what, tolerance = "weights and optimizer state of a checkpoint", "every bit of what was saved"
    if changed:
        state = sum(" optimizer " in name and "main_param" not in name for name in changed)
        only = " (optimizer state only)" if state == len(changed) else ""
        remedy = (
            "the optimizer's moments are not loaded: a resumed run would continue with different ones"
            if only
            else "the checkpoint does not restore what was saved: a resumed run would continue from a different state"
        )
        return fails(what, f"{len(changed)} of {count} tensors differ{only}, the first is {changed[0]}", tolerance, remedy, len(changed))
    return holds(what, f"{count} tensors are unchanged", tolerance, 0.0)


def _repeated(changed: list[str], first: dict[str, Any], again: dict[str, Any], restored: Measurement) -> Measurement:
    what, tolerance = "the step after a resume", "the same bits as without one, at the same layout"
    metrics = [
        name for name in ("policy/loss", "policy/grad_norm", "critic/loss", "critic/grad_norm") if first.get(name) != again.get(name)
    ]
    if not changed and not metrics:
        return holds(what, f"policy/loss {first.get('policy/loss')}, the same weights and moments", tolerance, 0.0)
    shown = f"{len(changed)} tensors differ{f', the first is {changed[0]}' if changed else ''}; metrics: {', '.join(metrics) or 'equal'}"
    if restored.verdict == "holds":
        remedy = "the state was restored bit for bit, so kernels of this device add up in a varying order; compare with a tolerance"
        return replace(warns(what, shown, tolerance, remedy), value=float(len(changed)))
    return fails(what, shown, tolerance, "a resumed run is another run: see the measurement above", len(changed))
