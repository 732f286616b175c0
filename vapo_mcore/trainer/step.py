"""Run one step: collect and distribute responses, compute log-probs, values and advantages, update critic and policy, sync weights.

``StepRunner`` holds the objects that live as long as the run. A ``StepState`` holds the state of one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from vapo_mcore import heartbeat
from vapo_mcore.checkpoint.state import StateRegistry
from vapo_mcore.checkpoint_files import Stage
from vapo_mcore.collectives import all_gather_objects, gather_objects
from vapo_mcore.config.schema import Config
from vapo_mcore.data.packing import Schedule
from vapo_mcore.data.prompts import Prompt
from vapo_mcore.data.rollout_batch import ENGINE_CHOICES, Rows
from vapo_mcore.diagnosis.monitor import Monitor
from vapo_mcore.errors import StepBroken, TrainingError
from vapo_mcore.experience.bad_batch import BadUpdate, save_bad_batch
from vapo_mcore.experience.batches import Experience, distribute, plan_minibatches
from vapo_mcore.experience.collecting import SamplingCounts, collect
from vapo_mcore.experience.critic_rows import CriticRows
from vapo_mcore.experience.open_responses import OpenResponses
from vapo_mcore.experience.sampling import ResponseSampler, Round, ended_responses
from vapo_mcore.experience.step_dump import StepDump, dump_folder, save_step
from vapo_mcore.experience.token_records import merged, token_columns
from vapo_mcore.megatron.engine import choices_name
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.megatron.roles import Models
from vapo_mcore.records.metric_table import metrics_of
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.records.run_dir import faults_folder
from vapo_mcore.records.timing import PhaseTimer
from vapo_mcore.trainer.advantages import (
    AdvantageEstimator,
    check_experience,
    imitable_rows,
    shaped_rewards,
    skipped_tokens,
    trainable_rows,
)
from vapo_mcore.trainer.bad_updates import UpdateGuard
from vapo_mcore.trainer.critic_probe import CriticProbe
from vapo_mcore.trainer.expert_choices import keep_engine_choices, policy_pass, repeats_choices, repeats_engine
from vapo_mcore.trainer.horizon_metrics import record_cut_weight, record_horizon, values_at_cuts
from vapo_mcore.trainer.self_imitation import SelfImitation
from vapo_mcore.trainer.step_metrics import (
    record_mismatch,
    record_packing,
    record_rows,
    record_sources,
    record_time_and_memory,
    record_values,
)
from vapo_mcore.trainer.step_state import Row, StepOutcome, StepState
from vapo_mcore.trainer.stopping import StopRequests
from vapo_mcore.trainer.updates import StoppedUpdate, update_critic, update_policy
from vapo_mcore.weights.sync import WeightSync

logger = logging.getLogger(__name__)

OPEN_RESPONSES = "open_responses"
"""Name of the state of fixed-horizon rollouts."""

HALTED = 2
"""Exit code of a run stopped by ``diagnosis.halt_on``."""


class StepRunner:
    """Runs RL steps and value-pretraining steps. Every method is a collective over all ranks."""

    def __init__(
        self,
        config: Config,
        parallel: ParallelContext,
        models: Models,
        sampler: ResponseSampler,
        sync: WeightSync,
        next_prompts: Callable[[int], Sequence[Prompt]],
        *,
        probe: CriticProbe | None = None,
        open_responses: OpenResponses | None = None,
        before_sync: Callable[[Stage, int, PhaseTimer], None] | None = None,
    ) -> None:
        """Collective.

        Args:
            probe: measures the critic on held-out prompts.
            open_responses: those of a fixed horizon (``rollout.horizon``); they are part of the state.
            before_sync: called in each step with its stage, number and timer, after the last update and while the rollout engine sleeps.
        """
        self.config = config
        self.parallel = parallel
        self.models = models
        self.sampler = sampler
        self.sync = sync
        self.next_prompts = next_prompts
        self.estimator = AdvantageEstimator(config, parallel.data_parallel_group)
        self.imitation = SelfImitation(config, parallel) if config.algorithm.self_imitation is not None else None
        self.stop_requests = StopRequests()
        self.diagnosis = Monitor(config)
        self._sources = [source.name for source in config.data.train]
        self._table = metrics_of((term.name for term in config.algorithm.loss_terms), self._sources)
        self.guards = {role: UpdateGuard(config.faults) for role in ("policy", "critic")}
        self.state = StateRegistry()
        self.state.register("trainer", self)
        self.state.register("diagnosis", self.diagnosis)
        if self.imitation is not None:
            self.state.register("self_imitation", self.imitation)
        for role, guard in self.guards.items():
            self.state.register(f"update_guard/{role}", guard)
        self.before_sync = before_sync
        self.probe = probe
        self.open_responses = open_responses
        if open_responses is not None:
            self.state.register(OPEN_RESPONSES, open_responses)
        self.rollouts = 0  # over both stages; seeds the sampling and the mini-batch shuffle
        self.dp_rank_of_rank = all_gather_objects(parallel.data_parallel_rank)
        self.critic_rows = CriticRows(config, models, parallel)
        self.segments = config.rollout.trains_segments

    def rl_step(self, number: int) -> StepOutcome:
        """Run one RL step: sample a rollout, update critic and policy on it, and sync the weights."""
        step = self._begin("rl", number)
        probed = self.probe is not None and self.probe.is_due(number)
        experience = self._collect(step, dynamic=self.config.rollout.dynamic_sampling.enabled, probe=probed)
        if experience.minibatches:
            # Running the critic first, then all passes of the policy, moves the fewest bytes with offloading: each part of each model
            # is onloaded and offloaded once. Only a KL penalty in the reward needs the policy's log-probs earlier.
            penalised = self.config.algorithm.kl.place == "reward"
            if penalised:
                self._log_probs(step, experience)
            if self.models.critic is not None:
                self._start_at_mean_return(step, step.of_critic(experience))
                self._values(step, experience)
                if step.ended is not None:
                    self._values(step, step.ended)
            self._advantages_and_critic(step, experience)
            if self.segments:
                self._keep_cut_values(step, experience)
            if probed:
                self._measure_probe(step, "critic/probe_explained_variance")
            if not penalised and not step.updates_stopped:
                self._log_probs(step, experience)
            if not step.updates_stopped:
                self._update_policy(step, experience)
        self._gather_sample_tokens(step, experience)
        if not step.updates_stopped:
            self._imitate(step)
        self._sync(step)
        return self._finish(step)

    def _begin(self, stage: Stage, number: int) -> StepState:
        heartbeat.at_step(f"{stage} {number}")
        return StepState(stage, number, StepMetrics(self._table))

    def _imitate(self, step: StepState) -> None:
        """Run the self-imitation step if one is due. The policy goes first because it is on the device already."""
        if self.imitation is None:
            return
        sample = self.imitation.draw(step.number, self.rollouts)
        if sample is not None:
            self.models.residency.enter("policy_update")
            with step.timer.phase("imitation"):
                made = [self.imitation.imitate(self.models.policy, sample, step.metrics)]
                self.models.residency.mark_changed("policy")
            if self.models.critic is not None and self.imitation.settings.value_coef > 0:
                self.models.residency.enter("critic_update")
                with step.timer.phase("imitation"):
                    made.append(self.imitation.learn_values(self.models.critic, sample, step.metrics))
                    self.models.residency.mark_changed("critic")
            step.metrics.put("imitation/skipped", made.count(False))
        self.imitation.record(self.rollouts, step.metrics)

    def _remember(self, step: StepState, experience: Experience) -> None:
        if self.imitation is not None:
            self.imitation.remember(experience, self.rollouts, pretraining=step.stage == "value_pretraining")

    def _update_policy(self, step: StepState, experience: Experience) -> None:
        self.models.residency.enter("policy_update")
        with step.timer.phase("policy_update"):
            self.estimator.correct_importance(experience, step.metrics)
            self._check(step, experience)
            stopped = update_policy(self.config, self.models.policy, experience, step.metrics, self.guards["policy"], self.rollouts)
            for name in (choices_name("policy"), ENGINE_CHOICES):
                experience.batch.drop(name)
            self.models.residency.mark_changed("policy")
            self._stop_updates(step, experience, "policy", stopped)

    def _update_critic(self, step: StepState, experience: Experience) -> None:
        assert self.models.critic is not None
        self.models.residency.enter("critic_update")
        with step.timer.phase("critic_update"):
            learned = self.critic_rows.with_returns(experience)
            stopped = update_critic(self.config, self.models.critic, learned, step.metrics, self.guards["critic"])
            learned.batch.drop(choices_name("critic"))
            self.models.residency.mark_changed("critic")
            self._stop_updates(step, learned, "critic", stopped)

    def _stop_updates(self, step: StepState, experience: Experience, role: str, stopped: StoppedUpdate | None) -> None:
        """Save the batch, make no further update and stop after this step if too many consecutive updates were skipped."""
        if stopped is None:
            return
        step.updates_stopped = True
        result, guard = stopped.result, self.guards[role]
        why, loss, norm = str(result.skipped), result.metrics["loss"], result.grad_norm
        update = BadUpdate(step.stage, step.number, role, stopped.epoch, stopped.minibatch, why, loss, norm)
        kept = self._keep_batch(step, experience, update, stopped)
        self.stop_requests.request(
            f"{guard.in_a_row} consecutive updates of the {role} were skipped (faults.bad_updates_in_a_row = {guard.limit}), the last one "
            f"because {why} (loss {loss:.4g}, gradient norm {norm:.4g}); models and optimizers keep the state of the last applied update; "
            f"{kept}",
            exit_code=TrainingError.exit_code,
        )
        guard.reset()  # a resumed run counts from zero

    def _gather_sample_tokens(self, step: StepState, experience: Experience) -> None:
        """Gather per-token values of the sampled responses from their owners to rank 0."""
        if not step.samples:
            return
        parallel = self.parallel
        replicas = (parallel.tensor_model_parallel_rank, parallel.pipeline_model_parallel_rank, parallel.context_parallel_rank)
        for source in [experience] if step.ended is None else [experience, step.ended]:
            parts = gather_objects({} if any(replicas) else token_columns(source, step.samples, self.sampler.tokenizer))
            for row, columns in (item for part in parts or [] for item in part.items()):
                step.samples[row]["tokens"] = merged(step.samples[row].get("tokens", {}), columns)

    def _keep_batch(self, step: StepState, experience: Experience, update: BadUpdate, stopped: StoppedUpdate) -> str:
        """Write the batch of a skipped update and the rollout of its step. Returns a sentence with their paths or the failure."""
        folder, failure = faults_folder(self.config.run.dir), None
        model = self.models.critic if update.role == "critic" else self.models.policy
        assert model is not None
        try:
            save_bad_batch(folder, update, experience.rows, experience.batch.row_ids, stopped.microbatches, model.parallel)
        except (OSError, SafetensorError) as error:
            failure = str(error)
        failures = [text for text in all_gather_objects(failure) if text is not None]
        kept = f"cannot write the batch ({failures[0]})" if failures else f"the batch is in {folder / update.folder_name}"
        return f"{kept}; {self._dump(step)}"

    def value_pretraining_step(self, number: int) -> StepOutcome:
        """Run one value-pretraining step: sample from the fixed policy and fit the critic to the Monte-Carlo returns.

        There is no log-prob pass and no policy update.
        """
        assert self.models.critic is not None, "value pretraining needs a critic"
        step = self._begin("value_pretraining", number)
        unsampled = self.probe is not None and self.probe.experience is None
        experience = self._collect(step, dynamic=False, probe=unsampled)
        if unsampled:
            self._measure_probe(step, "critic/probe_explained_variance_before")
        if experience.minibatches:
            self._start_at_mean_return(step, experience)
            self._values(step, experience)
            with step.timer.phase("advantages"):
                # The policy still equals the reference, so the KL penalty in the reward is zero and skipped.
                self.estimator.place_rewards(experience, kl=False)
                self.estimator.returns(experience, monte_carlo=True)
                self._record_values(step, experience)
                self._check(step, experience)
                self._remember(step, experience)
            self._update_critic(step, experience)
        if self.probe is not None:
            self._measure_probe(step, "critic/probe_explained_variance")
        self._gather_sample_tokens(step, experience)
        self._sync(step)
        return self._finish(step)

    def _measure_probe(self, step: StepState, name: str) -> None:
        assert self.probe is not None
        with step.timer.phase("probe"):
            step.metrics.put(name, self.probe.explained_variance(self.models, self.estimator))

    def _collect(self, step: StepState, *, dynamic: bool, probe: bool = False) -> Experience:
        """Sample, grade, shape rewards, plan mini-batches and send tokens to their owners. ``probe``: also sample the critic's probe."""
        config = self.config
        self.rollouts += 1
        if probe:
            assert self.probe is not None
            with step.timer.phase("probe"):
                self.probe.sample(self.models)
        sampled, counts = step.sampled = self._sample(step, dynamic=dynamic)
        if step.stage == "rl" and config.run.dumps_step(step.number):
            self._dump(step)
        with step.timer.phase("exchange"):
            rows = replace(sampled.rows, reward=shaped_rewards(config, sampled.rows))
            plan, experience = self._distribute(sampled, rows, skipped_tokens(config, rows))
            if self.segments and step.stage == "rl":
                ended = ended_responses(sampled)
                rows = rows.select(range(len(ended.rows)))
                if config.rollout.horizon is not None and config.rollout.horizon.critic == "ended":
                    _, step.ended = self._distribute(ended, rows, None)
            keep_engine_choices(experience, self.models.policy, repeats=repeats_engine(config, step.stage))
            shown = {row: record for part in all_gather_objects(sampled.shown) for row, record in part.items()}
        step.samples = {row: record | {"reward": float(rows.reward[row])} for row, record in sorted(shown.items())}
        record_rows(step.metrics, rows, experience.trained_lengths, counts, config.rollout.max_response_length)
        if config.rollout.horizon is not None:
            record_horizon(step.metrics, experience, counts, config)
        record_sources(step.metrics, rows, self._sources)
        rebuilds, restarts = self.sampler.take_recoveries()
        step.metrics.put("sampling/engine_rebuilds", rebuilds)
        step.metrics.put("grading/restarts", restarts)
        ranks, cap = self.parallel.data_parallel_size, config.batch.max_tokens_per_microbatch
        record_packing(step.metrics, experience, plan.owner, ranks, cap)
        return experience

    def _distribute(self, sampled: Round, rows: Rows, skipped: Tensor | None) -> tuple[Schedule, Experience]:
        """Draw mini-batches of ``rows`` and send the tokens to their owners. ``skipped``: as of ``distribute``."""
        config, parallel, ranks = self.config, self.parallel, self.dp_rank_of_rank
        plan = plan_minibatches(config, self.models.architecture, parallel, rows, self.rollouts)
        positive = imitable_rows(config, rows, skip_overlong=config.algorithm.positive_lm.skip_overlong)
        trainable, whole = trainable_rows(config, rows), self.segments
        experience = distribute(sampled, rows, trainable, positive, plan, parallel, ranks, skipped, whole_positive=whole)
        self.critic_rows.distribute(sampled, experience, self.rollouts)
        return plan, experience

    def _sample(self, step: StepState, *, dynamic: bool) -> tuple[Round, SamplingCounts]:
        """Sample new responses, then put the rollout engine to sleep."""
        found = collect(
            self.config,
            self.sampler,
            self.next_prompts,
            seed_step=self.rollouts,
            timer=step.timer,
            dynamic=dynamic,
            open_responses=self.open_responses if step.stage == "rl" else None,
            experts=repeats_engine(self.config, step.stage),
        )
        self.sync.put_to_sleep()
        return found

    def _dump(self, step: StepState) -> str:
        """Write the step's rollout for ``vapo-mcore replay-step``. Returns a sentence with its path or the failure. Collective."""
        assert step.sampled is not None
        folder = dump_folder(self.config.run.dir, step.stage, step.number)
        if step.dumped:
            return f"its rollout is in {folder}"
        with step.timer.phase("dump"):
            failure = save_step(self.config.run.dir, StepDump(step.stage, step.number, self.rollouts, *step.sampled), self.parallel.rank)
        if failure is None:
            step.dumped = True
            return f"its rollout is in {folder}"
        message = f"cannot write the rollout of step {step.number} to {folder}: {failure}"
        if self.parallel.rank == 0:
            logger.warning("%s", message)
        return message

    def _check(self, step: StepState, experience: Experience) -> None:
        """Run ``check_experience``. If it fails, dump the rollout and raise StepBroken on all ranks."""
        try:
            check_experience(experience)
        except TrainingError as error:
            raise StepBroken(f"{error}\nin step {step.number} ({step.stage}); {self._dump(step)}") from error

    def _log_probs(self, step: StepState, experience: Experience) -> None:
        """Compute the old log-probs (by the trainer, on the micro-batches of the update, or the rollout's) and the reference's."""
        config, rollout = self.config, self.config.rollout
        self.models.residency.enter("logprobs")
        with step.timer.phase("logprobs"):
            microbatches = experience.microbatches()
            if rollout.old_logprobs == "recompute":
                names = ("logprobs", "entropy")
                found = policy_pass(config, self.models.policy, experience, names, step.metrics)
                experience.store("old_logprobs", found["logprobs"])
                experience.store("entropy", found["entropy"])
                step.metrics.add_tokens("policy/entropy", experience.batch["entropy"], experience.mask)
                cap = config.algorithm.policy_loss.importance_correction.cap
                older = rollout.horizon is not None and not self.segments and step.stage == "rl"
                record_mismatch(step.metrics, experience, cap, self.parallel.data_parallel_group, horizon=older)
            else:
                experience.batch["old_logprobs"] = experience.batch["rollout_logprobs"]
            if self.models.reference is not None:
                with self.models.residency.offloaders["policy"].other_params(self.models.reference):
                    found = self.models.policy.forward(microbatches, temperature=rollout.temperature)
                experience.store("ref_logprobs", found["logprobs"])
                self.estimator.record_reference_kl(experience, step.metrics)

    def _values(self, step: StepState, experience: Experience, *, before_update: bool = True) -> None:
        """Compute the critic's values; ``before_update``: its update comes after this pass, and may repeat its choices of experts."""
        assert self.models.critic is not None
        if not experience.minibatches:
            return
        bootstrap = self.config.algorithm.advantage.truncation == "bootstrap" or self.segments
        self.models.residency.enter("values")
        with step.timer.phase("values"):
            names = ("values", "bootstrap_values") if bootstrap else ("values",)
            replays = before_update and repeats_choices(self.config, self.models.critic)
            own = experience.in_critic_layout
            found = self.models.critic.forward(own.microbatches(), outputs=names, record_choices=replays)
            if replays:
                own.store(choices_name("critic"), found[choices_name("critic")])
            self.critic_rows.store_values(experience, found)

    def _record_values(self, step: StepState, experience: Experience) -> None:
        monte_carlo = self.estimator.monte_carlo_returns(experience)
        longest = self.config.rollout.max_response_length
        record_values(step.metrics, experience, monte_carlo, longest, self.parallel.data_parallel_group, self.config.reward.interval)

    def _start_at_mean_return(self, step: StepState, experience: Experience) -> None:
        """In the first rollout, set the bias of a new value head to the mean return of the response tokens, if configured."""
        if (
            not experience.minibatches
            or self.rollouts > 1
            or self.config.critic.head_bias != "mean_return"
            or self.config.critic.init != "policy"
        ):
            return
        assert self.models.critic is not None
        self.models.residency.enter("critic_update")
        with step.timer.phase("values"):
            mean = self.estimator.mean_return(experience)
            if mean is not None:
                self.models.critic.set_value_bias(mean)
                self.models.residency.mark_changed("critic")

    def _advantages_and_critic(self, step: StepState, experience: Experience) -> None:
        """Compute advantages and update the critic. ``values`` chooses values from before or after this step's critic update."""
        estimator, critic, learned = self.estimator, self.models.critic, step.of_critic(experience)
        late = critic is not None and self.config.algorithm.advantage.values == "after_update"
        with step.timer.phase("advantages"):
            estimator.place_rewards(experience)
            if step.ended is not None:
                estimator.place_rewards(step.ended)
            if critic is not None and learned.minibatches:
                estimator.returns(learned)
                self._record_values(step, learned)
            if not late:
                estimator.advantages(experience, step.metrics)
            self._check(step, experience)
            if step.ended is not None:
                self._check(step, step.ended)
            if learned.minibatches:
                self._remember(step, learned)
        if critic is None:
            return
        if learned.minibatches:
            self._update_critic(step, learned)
        if late and not step.updates_stopped:
            self._values(step, experience, before_update=False)
            with step.timer.phase("advantages"):
                estimator.advantages(experience, step.metrics)
                self._check(step, experience)

    def _keep_cut_values(self, step: StepState, experience: Experience) -> None:
        """Keep the values that replaced the rest of cut responses, to compare them with the later returns."""
        lam, gamma = self.estimator.lambdas(experience), self.config.algorithm.advantage.gamma
        record_cut_weight(step.metrics, experience, lam, gamma)
        values = values_at_cuts(experience, self.parallel.data_parallel_group)
        if self.open_responses is not None:  # a replay has none
            self.open_responses.keep_cut_values(values)

    def _sync(self, step: StepState) -> None:
        if self.before_sync is not None:
            self.before_sync(step.stage, step.number, step.timer)
        with step.timer.phase("weight_sync"):
            report = self.sync.run()
        step.metrics.put("weights/tensors", report.names)
        step.metrics.put("weights/bytes", report.bytes)

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": self.rollouts, "critic_updates": self.models.critic_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollouts, self.models.critic_updates = state["rollouts"], state["critic_updates"]

    def _finish(self, step: StepState) -> StepOutcome:
        """Reduce the step's metrics over all ranks, run the diagnosis, and return the outcome."""
        metrics = step.metrics
        metrics.put("step", step.number)
        metrics.put("stage", step.stage)
        for role, model, before in (("policy", self.models.policy, 0), ("critic", self.models.critic, self.models.critic_updates)):
            if model is not None and model.optimizer is not None:
                metrics.put(f"{role}/updates", before + model.optimizer.updates)
        record_time_and_memory(metrics, step.timer)
        row: Row = metrics.reduce(self.parallel.data_parallel_group, self.parallel.device)
        row["tokens/per_second"] = row["tokens/total"] / row["time/step"]
        findings = self.diagnosis.observe(row)
        row["warnings"] = len(findings)
        row |= self.diagnosis.metrics()
        fatal = self.diagnosis.ends_the_run(findings)
        if fatal is not None:
            self.stop_requests.request(f"diagnosis.halt_on: {fatal}", exit_code=HALTED)
        return StepOutcome(row, list(step.samples.values()), [str(finding) for finding in findings if finding.is_due or finding is fatal])
