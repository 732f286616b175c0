"""Define the configuration as frozen pydantic models: every key with its type, default and range.

``rules/`` checks rules over several keys, ``applicability.py`` declares keys without effect, and ``loading.py`` reads YAML files,
``extends:`` and overrides. Load a configuration with ``vapo_mcore.config.load_config``: constructing a ``Config`` directly runs only the
field checks. ``null`` for a key that cannot be null means "not given": its default applies.

Defaults follow the VAPO paper (arXiv:2504.05118, section 5.1). The paper does not state weight decay (here 0.1), betas (0.9, 0.999), eps
(1e-8), clip_grad (1.0), warm-up (10 rollouts) and whitening (over the batch).
"""

from __future__ import annotations

from pydantic import Field

from vapo_mcore.config.schema.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    CustomEstimatorConfig,
    EntropyConfig,
    ImportanceCorrectionConfig,
    KlConfig,
    LambdaConfig,
    LossTermConfig,
    PolicyLossConfig,
    PositiveLmConfig,
    ProcessConfig,
    SelfImitationConfig,
    ValueLossConfig,
)
from vapo_mcore.config.schema.base import GROUP_ESTIMATORS, Estimator, Section, Seed
from vapo_mcore.config.schema.checkpoint import CheckpointConfig
from vapo_mcore.config.schema.data import CustomSource, DataConfig, EvalConfig, FieldsConfig, FileSource, ReasoningGymSource, Source
from vapo_mcore.config.schema.diagnosis import DiagnosisConfig
from vapo_mcore.config.schema.faults import FaultsConfig, LossSpikeConfig
from vapo_mcore.config.schema.rollout import (
    DynamicSamplingConfig,
    EnvironmentConfig,
    HorizonConfig,
    OverlongConfig,
    RewardConfig,
    RewardScaleConfig,
    RolloutConfig,
    VllmConfig,
)
from vapo_mcore.config.schema.run import (
    BatchConfig,
    BestExportConfig,
    ExportConfig,
    ModelConfig,
    ParallelConfig,
    RouterConfig,
    RunConfig,
    WandbConfig,
)
from vapo_mcore.config.schema.training import (
    CriticConfig,
    CriticOptimizerConfig,
    CriticParallelConfig,
    OptimizerConfig,
    PolicyConfig,
    ProbeConfig,
    UntilConfig,
    ValuePretrainingConfig,
)

__all__ = [
    "GROUP_ESTIMATORS",
    "AdvantageConfig",
    "AlgorithmConfig",
    "BatchConfig",
    "BestExportConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "CriticOptimizerConfig",
    "CriticParallelConfig",
    "CustomEstimatorConfig",
    "CustomSource",
    "DataConfig",
    "DiagnosisConfig",
    "DynamicSamplingConfig",
    "EntropyConfig",
    "EnvironmentConfig",
    "Estimator",
    "EvalConfig",
    "ExportConfig",
    "FaultsConfig",
    "FieldsConfig",
    "FileSource",
    "HorizonConfig",
    "ImportanceCorrectionConfig",
    "KlConfig",
    "LambdaConfig",
    "LossSpikeConfig",
    "LossTermConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "ParallelConfig",
    "PolicyConfig",
    "PolicyLossConfig",
    "PositiveLmConfig",
    "ProbeConfig",
    "ProcessConfig",
    "ReasoningGymSource",
    "RewardConfig",
    "RewardScaleConfig",
    "RolloutConfig",
    "RouterConfig",
    "RunConfig",
    "Section",
    "SelfImitationConfig",
    "Source",
    "UntilConfig",
    "ValueLossConfig",
    "ValuePretrainingConfig",
    "VllmConfig",
    "WandbConfig",
]


class Config(Section):
    """The whole configuration of a run."""

    seed: Seed = 1234  # seeds sampling, prompt order, mini-batches and new heads
    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    batch: BatchConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    policy: PolicyConfig = PolicyConfig()
    critic: CriticConfig = CriticConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    diagnosis: DiagnosisConfig = DiagnosisConfig()
    faults: FaultsConfig = FaultsConfig()

    @property
    def uses_critic(self) -> bool:
        """Return whether the run has a critic. Without one, ``critic`` holds unused defaults."""
        return self.algorithm.advantage.uses_critic

    @property
    def critic_parallel(self) -> ParallelConfig:
        """The critic's layout: ``critic.parallel`` over the run's ranks, or the policy's."""
        own = self.critic.parallel
        if own is None:
            return self.parallel
        return ParallelConfig(world_size=self.parallel.world_size, timeout_minutes=self.parallel.timeout_minutes, **own.model_dump())

    @property
    def layouts_differ(self) -> bool:
        """Whether there is a critic with another layout than the policy's."""
        return self.uses_critic and self.critic_parallel != self.parallel

    def parallel_of(self, role: str) -> ParallelConfig:
        """The layout of a model: ``policy`` or ``critic``."""
        return self.critic_parallel if role == "critic" else self.parallel

    @property
    def critic_updates_per_step(self) -> int:
        """Optimizer steps of the critic on one full rollout."""
        return self.critic.updates_per_rollout or self.batch.updates_per_step * self.critic.epochs

    @property
    def uses_reference(self) -> bool:
        return self.algorithm.kl.place != "off"

    @property
    def rollout_tensor_parallel_size(self) -> int:
        return self.rollout.tensor_parallel_size or self.parallel.tensor_model_parallel_size

    @property
    def max_sequence_length(self) -> int:
        """Longest prompt plus longest response in tokens, including an environment's observations."""
        environment = self.rollout.environment
        observations = (environment.max_turns - 1) * environment.max_observation_length if environment is not None else 0
        return self.data.max_prompt_length + self.rollout.max_response_length + observations
