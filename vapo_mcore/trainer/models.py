"""Build policy, critic and reference model from the configuration and load their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from vapo_mcore.checkpoint.models import fill_chunks, require_intact
from vapo_mcore.checkpoint_files import model_folder, saved_weights
from vapo_mcore.config.architecture import ModelArchitecture, new_critic, read_architecture
from vapo_mcore.config.schema import Config
from vapo_mcore.data.tokenizer import load_tokenizer, unknown_token_ids
from vapo_mcore.errors import ConfigError
from vapo_mcore.megatron.engine import MegatronModel, output_row_norms
from vapo_mcore.megatron.host import HAS_CUDA
from vapo_mcore.megatron.offload import Residency
from vapo_mcore.megatron.parallel import ParallelContext, critic_layout
from vapo_mcore.megatron.roles import Models, build_critic
from vapo_mcore.weights.loader import LoadReport, load_hf_into

Say = Callable[[str], None]


def build_models(config: Config, parallel: ParallelContext, say: Say) -> Models:
    """Build all models of the run and load their weights. Raises CheckpointError or ConfigError for folders that do not match."""
    architecture = read_architecture(config.model.path)
    if config.model.dtype == "float32" and config.model.attention == "te":
        say("warning: model.dtype = float32 with model.attention = te: Transformer Engine multiplies float32 in TF32 (10-bit mantissa)")
    unknown = unknown_token_ids(load_tokenizer(config.model.path), architecture.vocab_size)
    policy = MegatronModel(
        "policy",
        architecture,
        config.model,
        parallel,
        load_weights=lambda chunks: fill_policy(chunks, config, architecture, parallel, say),
        optimizer=config.policy.optimizer,
        warmup_updates=config.policy.optimizer.warmup_rollouts * config.batch.updates_per_step * config.policy.epochs,
        unknown_token_ids=unknown,
    )
    if unknown:
        _report_unknown_ids(policy, unknown, say)
    _report_experts(policy, say)
    residency = Residency(enabled=HAS_CUDA if config.model.offload is None else config.model.offload)
    residency.add(policy)
    reference = None
    if config.uses_reference:
        residency.enter("sync")
        reference = residency.offloaders["policy"].copy_params("reference")
        residency.enter("generate")
    critic = _first_critic(config, architecture, critic_layout(config, parallel), say) if config.uses_critic else None
    if critic is not None:
        residency.add(critic)
    return Models(architecture, policy, critic, reference, residency)


def build_critic_alone(config: Config, parallel: ParallelContext, say: Say) -> Models:
    """Build the critic without a policy, for training it on stored responses. ``parallel``: its layout. ``Models.policy`` is missing."""
    architecture = read_architecture(config.model.path)
    residency = Residency(enabled=False)  # nothing else needs the device
    critic = _first_critic(config, architecture, parallel, say)
    residency.add(critic)
    return Models(architecture, cast(MegatronModel, None), critic, None, residency)


def _report_experts(model: MegatronModel, say: Say) -> None:
    """Print how the experts of a mixture are computed."""
    experts = model.architecture.num_experts
    if experts is None:
        return
    local = experts // model.parallel.expert_model_parallel_size
    how = "one after another (model.attention = te, on GPUs, has grouped matrix products)"
    if model.config.moe_grouped_gemm:
        how = "together, by Transformer Engine's grouped matrix products"
    say(f"{model.role}: {experts} experts a layer, {local} of them on each rank, computed {how}")


def _report_unknown_ids(policy: MegatronModel, unknown: Sequence[int], say: Say) -> None:
    """Print how many token ids are excluded, and warn if some have output rows so large that sampling would draw them."""
    norms = output_row_norms(policy)
    sizes = f"{len(unknown):,} of the model's {norms.numel():,} token ids"
    say(f"model.path: {sizes} are not in the tokenizer: never sampled, and excluded from the softmax of log-probs and entropies")
    known = torch.ones(norms.numel(), dtype=torch.bool)
    known[list(unknown)] = False
    typical = float(norms[known].median())
    large = int((norms[~known] >= typical).sum())
    if large:
        say(
            f"warning: {large:,} of these {len(unknown):,} ids have output rows as large as those of known tokens (norm >= {typical:.3g}, "
            "their median); a system that does not exclude these ids samples them, and they decode to nothing"
        )


def fill_policy(chunks: list[Any], config: Config, architecture: ModelArchitecture, parallel: ParallelContext, say: Say) -> None:
    """Load the initial weights from ``policy.path`` (a checkpoint of an earlier run) if set, else from ``model.path``."""
    if config.policy.path is None:
        load_hf_into(chunks, config.model.path, architecture, parallel, role="policy")
        return
    fill_chunks(chunks, require_intact(config.policy.path, "policy"))
    say(f"policy: weights from {config.policy.path}")


def _first_critic(config: Config, policy: ModelArchitecture, parallel: ParallelContext, say: Say) -> MegatronModel:
    """Build and load the initial critic, with the optimizer settings of value pretraining if that is configured."""
    folder = config.model.path if config.critic.init == "policy" else config.critic.path
    assert folder is not None, "the configuration requires critic.path for this critic.init"
    fresh = config.critic.init == "policy"
    architecture = new_critic(config, policy) if fresh else read_architecture(model_folder(folder, "critic"))
    if architecture.vocab_size != policy.vocab_size:
        raise ConfigError(
            f"critic.path: the critic's vocabulary has {architecture.vocab_size} entries, the policy's {policy.vocab_size}; "
            "both models read the same tokens, so use a critic with the policy's tokenizer"
        )
    reports: list[LoadReport] = []

    def load(chunks: list[Any]) -> None:
        if saved_weights(folder, "critic") is not None:
            fill_chunks(chunks, require_intact(folder, "critic"))
            reports.append(LoadReport(head="from the checkpoint"))
            return
        head_init = config.critic.head_init if config.critic.init == "policy" else None
        reports.append(load_hf_into(chunks, folder, architecture, parallel, role="critic", head_init=head_init, seed=config.seed))

    pretraining = config.critic.value_pretraining
    settings, head_only = config.critic.optimizer, False
    if pretraining.max_steps > 0:
        head_only = pretraining.head_only
        if pretraining.lr is not None:
            settings = settings.model_copy(update={"lr": pretraining.lr})
    critic = build_critic(config, architecture, parallel, load, settings, head_only)
    _report_experts(critic, say)
    for name, reason in reports[0].dropped.items():
        say(f"critic: {name} of {folder} not used: {reason}")
    say(f"critic: trunk from {folder}, value head: {reports[0].head}")
    return critic
