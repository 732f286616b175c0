"""Whole runs in two processes, one after another: torchrun ... train_worker.py FOLDER [CASE ...]. test_train_step.py reads what
they leave. Each rank also writes down what only it can see (weights before and after, the batch that the policy learned from).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.process_groups import release_groups
from tests.training_setup import HORIZON, TURNS, training_config
from vapo_mcore.checkpoint.resume import ResumeOptions
from vapo_mcore.errors import EXIT_REQUEUE, RunStopped
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer import main as main_module
from vapo_mcore.trainer import step as step_module
from vapo_mcore.trainer.critic_probe import CriticProbe
from vapo_mcore.trainer.loop import TrainingLoop
from vapo_mcore.trainer.main import train
from vapo_mcore.trainer.self_imitation import SelfImitation
from vapo_mcore.trainer.step import StepRunner
from vapo_mcore.weights.checksums import tensor_checksum

FOLDER = Path(sys.argv[1])
TP2 = "parallel.tensor_model_parallel_size=2"
NO_PRETRAINING = "critic.value_pretraining.steps=0"
VLLM = ("rollout.engine=vllm", "rollout.vllm.kv_cache_gib=0.1")
SMALL_PACKS = "batch.max_tokens_per_microbatch=96"  # several a mini-batch on each rank


def run(name: str, *overrides: str) -> None:
    config = training_config(FOLDER, name, *overrides)
    train(config, initialize_parallel(config.parallel), clean=False)


def checksums(model: MegatronModel) -> list[str]:
    return [tensor_checksum(parameter) for chunk in model.chunks for parameter in chunk.parameters()]


@contextmanager
def policy_watched(seen: list[tuple[bool, bool]]) -> Iterator[None]:
    """Notes for each pretraining step whether the policy and the critic changed."""
    original = StepRunner.value_pretraining_step

    def watched(self: StepRunner, number: int) -> Any:
        assert self.models.critic is not None
        before = checksums(self.models.policy), checksums(self.models.critic)
        outcome = original(self, number)
        after = checksums(self.models.policy), checksums(self.models.critic)
        seen.append((before[0] != after[0], before[1] != after[1]))
        return outcome

    with mock.patch.object(StepRunner, "value_pretraining_step", watched):
        yield


def vapo_dp2() -> None:
    seen: list[tuple[bool, bool]] = []
    with policy_watched(seen):
        run("vapo_dp2", "rollout.verify_weights=true", SMALL_PACKS)
    assert seen == [(False, True), (False, True)], seen


def probe() -> None:
    """vapo_dp2 with a probe of the critic; what each rank holds of it goes to a file at each measurement."""
    original = CriticProbe.explained_variance
    seen: list[dict[str, Any]] = []

    def kept(self: CriticProbe, *arguments: Any) -> float | None:
        found = original(self, *arguments)
        assert self.experience is not None
        batch, rows = self.experience.batch, self.experience.batch.rows
        names = ("tokens", "values", "response_mask")
        tensors = {name: batch[name].clone() for name in names} | {"cu_seqlens": batch.cu_seqlens.clone(), "reward": rows.reward.clone()}
        seen.append(tensors | {"found": found, "prompts": list(rows.prompt_id)})
        return found

    with mock.patch.object(CriticProbe, "explained_variance", kept):
        run("probe", "rollout.verify_weights=true", SMALL_PACKS, "critic.probe={prompts: 5, responses_per_prompt: 3, every_steps: 2}")
    torch.save(seen, FOLDER / f"probe_rank{dist.get_rank()}.pt")


def mean_return() -> None:
    run(
        "mean_return",
        "run.steps=0",
        "critic={head_init: zero, head_bias: mean_return, value_pretraining: {steps: 1}}",
        "eval.at_start=false",
    )


def vapo_tp2() -> None:
    run("vapo_tp2", TP2, SMALL_PACKS)


@contextmanager
def batches_kept(prefix: str) -> Iterator[None]:
    """What each rank's policy learns from goes to a file (of the last step), so that a test can redo it with plain torch."""
    original = step_module.update_policy

    def kept(config: Any, model: Any, experience: Any, *more: Any) -> Any:
        batch = experience.batch
        names = ("tokens", "response_mask", "rollout_logprobs", "old_logprobs", "values", "returns", "advantages", "rewards")
        found: dict[str, Any] = {name: batch[name].clone() for name in names}
        columns = ("reward", "verdict", "prompt_length", "response_length", "tool_length", "turns", "step_rewards")
        found |= {"cu_seqlens": batch.cu_seqlens, "row_ids": batch.row_ids}
        found |= {name: getattr(batch.rows, name) for name in columns}
        torch.save(found, FOLDER / f"{prefix}_rank{dist.get_rank()}.pt")
        return original(config, model, experience, *more)

    with mock.patch.object(step_module, "update_policy", kept):
        yield


def one_update_by_hand() -> None:
    """One mini-batch, one update."""
    with batches_kept("batch"):
        run("one_update", SMALL_PACKS, "run.steps=1", "batch.mini_batch_size=16", "critic.head_init=zero", NO_PRETRAINING)


def all_wrong() -> None:
    run("all_wrong", NO_PRETRAINING, verifier("wrong"))


def all_wrong_dynamic() -> None:
    run("all_wrong_dynamic", NO_PRETRAINING, verifier("wrong"), "rollout.dynamic_sampling={enabled: true, max_rounds: 3}")


def dynamic_sampling() -> None:
    run("dynamic_sampling", NO_PRETRAINING, "rollout.dynamic_sampling={enabled: true, max_rounds: 2}")


def dying_graders() -> None:
    run("dying_graders", NO_PRETRAINING, verifier("sometimes_dies"))


def critic_free() -> None:
    run("critic_free", "algorithm.advantage.estimator=dr_grpo", "algorithm.kl={place: loss, kind: k3, coef: 0.1}")


def overlong_masked() -> None:
    """Mini-batches of two responses, of which many are cut: some have nothing to train on."""
    run(
        "overlong_masked",
        NO_PRETRAINING,
        "run.steps=1",
        "algorithm.advantage.truncation=mask",
        "rollout.max_response_length=21",
        "batch.mini_batch_size=2",
    )


def after_update_with_epochs() -> None:
    advantage = "{values: after_update, truncation: bootstrap, whiten: minibatch, lambda_policy: {kind: sigmoid}}"
    clip = "algorithm.value_loss.clip=0.2"
    # At a temperature other than 1 the log-prob pass, the loss and the rollout agree only if all of them apply it.
    epochs = ("policy.epochs=2", "critic.epochs=2")
    run("after_update", f"algorithm.advantage={advantage}", clip, *epochs, "rollout.temperature=0.7", TP2)


def rollout_logprobs() -> None:
    run("rollout_logprobs", "rollout.old_logprobs=rollout", NO_PRETRAINING)


def pretraining_job() -> None:
    """Value pretraining alone; each rank notes the critic that it leaves, and the one that a later run begins with."""
    found: dict[str, list[str]] = {}
    saving, building = TrainingLoop._save_critic, main_module.build_models

    def save(self: TrainingLoop) -> None:
        assert self.trainer.models.critic is not None
        found["saved"] = checksums(self.trainer.models.critic)
        saving(self)

    def build(*arguments: Any) -> Any:
        models = building(*arguments)
        found["loaded"] = checksums(models.critic)
        return models

    with mock.patch.object(TrainingLoop, "_save_critic", save):
        run("pretraining_job", "run.steps=0", "critic.value_pretraining={steps: 2, head_only: true, lr: 0.01}", "critic.head=mlp")
    folder = FOLDER / "pretraining_job" / "critic_pretrained" / "hf"
    with mock.patch.object(main_module, "build_models", build):
        run(
            "after_job",
            f"critic={{init: saved, path: {folder}, head: null, head_init: null, value_pretraining: {{steps: 0}}}}",
            "run.steps=1",
        )
    assert found["saved"] == found["loaded"]


def reward_model() -> None:
    """The critic starts from a reward model, its head included; what it values before any update is kept."""
    original = step_module.record_values

    def kept(metrics: Any, experience: Any, *more: Any) -> None:
        batch = experience.batch
        found = {name: batch[name].clone() for name in ("tokens", "response_mask", "values", "returns")} | {"cu_seqlens": batch.cu_seqlens}
        torch.save(found, FOLDER / f"valued_rank{dist.get_rank()}.pt")
        original(metrics, experience, *more)

    with mock.patch.object(step_module, "record_values", kept):
        critic = f"{{init: reward_model, path: {FOLDER / 'reward_model'}, head_init: null, value_pretraining: {{steps: 1}}}}"
        run("from_reward_model", f"critic={critic}", "run.steps=0", "data.eval=[]")


def self_imitation() -> None:
    """The policy hardly moves by itself, so that what is imitated can be worked out with the initial weights."""
    original = SelfImitation.imitate
    settings = "{top_k: 2, batch_size: 6, coef: 0.5, lr: 0.01, value_coef: 2.0}"

    def kept(self: Any, policy: Any, sample: Any, metrics: Any) -> bool:
        path = FOLDER / f"imitated_{name}_rank{dist.get_rank()}.pt"
        if not path.exists():  # of the first step
            torch.save({name: getattr(sample, name) for name in ("tokens", "response_mask", "cu_seqlens", "returns", "rewards")}, path)
        return original(self, policy, sample, metrics)

    for name, layout in (("imitation_dp2", ()), ("imitation_tp2", (TP2,))):
        with mock.patch.object(SelfImitation, "imitate", kept):
            run(
                name,
                *layout,
                NO_PRETRAINING,
                f"algorithm.self_imitation={settings}",
                "policy.optimizer.lr=1e-12",
                "critic={head_init: zero, updates_per_rollout: 3, optimizer: {lr: 1e-12}}",
                "rollout.temperature=0.8",
            )


def multi_turn() -> None:
    """Turns end with one of some twenty letters; what the environment writes is between bars."""
    environment = (
        "{name: 'tests.integration.environments:letters', max_turns: 3, max_observation_length: 9, format: '|{observation}|', "
        "stop_tokens: [A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, a, b, c, d, e]}"
    )
    with batches_kept("turns"):
        run(
            "multi_turn",
            NO_PRETRAINING,
            f"rollout.environment={environment}",
            "run.steps=1",
            "run.samples_per_step=16",
            "algorithm.advantage.truncation=bootstrap",
            "algorithm.advantage.lambda_policy.alpha=0.2",
            "algorithm.policy_loss.aggregation=sequence",
        )
    dying = environment.replace(":letters", ":sometimes_dies")
    run("dying_environment", NO_PRETRAINING, f"rollout.environment={dying}", "run.steps=1", TP2)


def step_rewards() -> None:
    with batches_kept("steps"):
        run("step_rewards", NO_PRETRAINING, verifier("every_fourth_character"), "run.samples_per_step=16", "run.steps=1")


def process_supervision() -> None:
    run("process_supervision", "algorithm.advantage.estimator=grpo_process", verifier("every_fourth_character"), "run.steps=1")


def stopped_after_two(name: str, *overrides: str) -> None:
    """Stops after step 2, leaves a copy of the run for other processes, and resumes."""
    original = StepRunner.rl_step

    def stopping(self: StepRunner, number: int) -> Any:
        if number == 2:
            self.stop_requests.request("SIGUSR1", exit_code=EXIT_REQUEUE)
        return original(self, number)

    with mock.patch.object(StepRunner, "rl_step", stopping):
        try:
            run(name, *overrides)
        except RunStopped:
            pass
        else:
            raise AssertionError("the run did not stop")
    release_groups()
    if int(os.environ["RANK"]) == 0:
        shutil.copytree(FOLDER / name, FOLDER / f"{name}_for_one")
    config = training_config(FOLDER, name, *overrides)
    train(config, initialize_parallel(config.parallel), clean=False, resume=ResumeOptions())


def horizon() -> None:
    """A horizon as long as the responses against none; short ones, stopped and resumed against whole."""
    horizon_runs("horizon", stopped=True)


def horizon_turns() -> None:
    horizon_runs("horizon_turns", TURNS, modes=("segments",), stopped=True)


def horizon_tp2() -> None:
    """One replica of two ranks."""
    horizon_runs("horizon_tp2", TP2)


def horizon_turns_tp2() -> None:
    horizon_runs("horizon_turns_tp2", TURNS, TP2)


def horizon_vllm() -> None:
    horizon_runs("horizon_vllm", *VLLM, stopped=True)


def horizon_turns_vllm() -> None:
    horizon_runs("horizon_turns_vllm", *VLLM, TURNS, stopped=True)


def horizon_vllm_tp2() -> None:
    horizon_runs("horizon_vllm_tp2", *VLLM, TP2)


def horizon_runs(name: str, *settings: str, modes: Sequence[str] = ("completed", "segments"), stopped: bool = False) -> None:
    """In each mode: no horizon, one as long as the responses, a short one and, with ``stopped``, that one stopped and resumed."""
    given = (*HORIZON, *settings)
    run(f"{name}_none", *given)
    for mode in modes:
        release_groups()
        run(f"{name}_long_{mode}", *given, f"rollout.horizon={{tokens: 24, train: {mode}}}")
        short = f"rollout.horizon={{tokens: 7, in_flight: 20, train: {mode}}}"
        release_groups()
        run(f"{name}_{mode}", *given, short)
        if stopped:
            release_groups()
            stopped_after_two(f"{name}_{mode}_stopped", *given, short)


def saved_critic_head_only() -> None:
    folder = FOLDER / "vapo_dp2" / "critic_pretrained" / "hf"
    critic = f"{{init: saved, path: {folder}, value_pretraining: {{steps: 1, head_only: true, lr: 0.01}}}}"
    run("saved_critic", f"critic={critic}", "critic.head_init=null", "run.steps=1")


def verifier(name: str) -> str:
    return f"data.train.0.verifier=tests.integration.grading:{name}"


CASES: list[Callable[[], None]] = [
    vapo_dp2,
    probe,
    mean_return,
    vapo_tp2,
    one_update_by_hand,
    all_wrong,
    all_wrong_dynamic,
    dynamic_sampling,
    dying_graders,
    critic_free,
    overlong_masked,
    after_update_with_epochs,
    rollout_logprobs,
    saved_critic_head_only,
    pretraining_job,
    reward_model,
    self_imitation,
    step_rewards,
    process_supervision,
    multi_turn,
    horizon,
    horizon_turns,
]
BY_NAME: list[Callable[[], None]] = [
    horizon_tp2,
    horizon_turns_tp2,
    horizon_vllm,
    horizon_vllm_tp2,
    horizon_turns_vllm,
]
"""Cases that only run when named (test_horizon_layouts.py): vLLM keeps the groups of its first engine, so each has a launch."""

if __name__ == "__main__":
    for case in CASES if len(sys.argv) == 2 else [case for case in CASES + BY_NAME if case.__name__ in sys.argv[2:]]:
        case()
        release_groups()
        if dist.get_rank() == 0:
            print(f"case {case.__name__} ok", flush=True)
    dist.destroy_process_group()
