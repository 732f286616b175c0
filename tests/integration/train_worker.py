"""Whole runs in two processes, one after another in one launch: torchrun ... train_worker.py FOLDER. test_train_step.py reads what
they leave. Each rank also writes down what only it can see (weights before and after, the batch that the policy learned from).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.training_setup import training_config
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer import step as step_module
from vapo_mcore.trainer.main import train
from vapo_mcore.trainer.step import Trainer
from vapo_mcore.weights.checksums import tensor_checksum

FOLDER = Path(sys.argv[1])
TP2 = "parallel.tensor_model_parallel_size=2"
NO_PRETRAINING = "critic.value_pretraining.steps=0"


def run(name: str, *overrides: str) -> None:
    config = training_config(FOLDER, name, *overrides)
    train(config, initialize_parallel(config.parallel), clean=False)


def checksums(model: MegatronModel) -> list[str]:
    return [tensor_checksum(parameter) for chunk in model.chunks for parameter in chunk.parameters()]


@contextmanager
def policy_watched(seen: list[tuple[bool, bool]]) -> Iterator[None]:
    """Notes for each pretraining step whether the policy and the critic changed."""
    original = Trainer.value_pretraining_step

    def watched(self: Trainer, number: int) -> Any:
        assert self.models.critic is not None
        before = checksums(self.models.policy), checksums(self.models.critic)
        outcome = original(self, number)
        after = checksums(self.models.policy), checksums(self.models.critic)
        seen.append((before[0] != after[0], before[1] != after[1]))
        return outcome

    with mock.patch.object(Trainer, "value_pretraining_step", watched):
        yield


def vapo_dp2() -> None:
    seen: list[tuple[bool, bool]] = []
    with policy_watched(seen):
        run("vapo_dp2", "rollout.verify_weights=true")
    assert seen == [(False, True), (False, True)], seen


def vapo_tp2() -> None:
    run("vapo_tp2", TP2)


def one_update_by_hand() -> None:
    """One mini-batch, one update: what went in is kept, so that the test can redo it with plain torch."""
    original = step_module.update_policy

    def kept(config: Any, model: Any, experience: Any, *more: Any) -> Any:
        batch = experience.batch
        names = ("tokens", "response_mask", "rollout_logprobs", "old_logprobs", "values", "returns", "advantages")
        found: dict[str, Any] = {name: batch[name].clone() for name in names}
        found |= {"cu_seqlens": batch.cu_seqlens, "row_ids": batch.row_ids, "reward": batch.rows.reward, "verdict": batch.rows.verdict}
        torch.save(found, FOLDER / f"batch_rank{dist.get_rank()}.pt")
        return original(config, model, experience, *more)

    with mock.patch.object(step_module, "update_policy", kept):
        run("one_update", "run.steps=1", "batch.mini_batch_size=16", "critic.head_init=zero", NO_PRETRAINING)


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


def saved_critic_head_only() -> None:
    folder = FOLDER / "vapo_dp2" / "critic_pretrained" / "hf"
    critic = f"{{init: saved, path: {folder}, value_pretraining: {{steps: 1, head_only: true, lr: 0.01}}}}"
    run("saved_critic", f"critic={critic}", "critic.head_init=null", "run.steps=1")


def verifier(name: str) -> str:
    return f"data.train.0.verifier=tests.integration.grading:{name}"


CASES: list[Callable[[], None]] = [
    vapo_dp2,
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
]

if __name__ == "__main__":
    for case in CASES:
        case()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"case {case.__name__} ok", flush=True)
    dist.destroy_process_group()
