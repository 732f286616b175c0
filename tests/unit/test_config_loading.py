"""Files, ``extends:``, overrides and the reporting of faults."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.torchrun import ROOT
from tests.unit.config_helpers import faults_of, load, write_base, write_child, write_model
from vapo_mcore.config import load_config
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.config.families import FAMILIES
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.config.schema import FileSource, ReasoningGymSource


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path)


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    config = load(tmp_path)
    a = config.algorithm
    assert (a.advantage.estimator, a.advantage.gamma, a.advantage.lambda_critic) == ("gae", 1.0, 1.0)
    assert (a.advantage.lambda_policy.kind, a.advantage.lambda_policy.alpha) == ("length_adaptive", 0.05)
    assert (a.policy_loss.clip_low, a.policy_loss.clip_high, a.policy_loss.aggregation) == (0.2, 0.28, "token")
    assert (a.positive_lm.coef, a.kl.place, a.advantage.whiten, a.value_loss.clip) == (0.1, "off", "batch", None)
    assert (config.policy.optimizer.lr, config.critic.optimizer.lr) == (1e-6, 2e-6)
    assert config.critic.value_pretraining.max_steps == 50
    assert (config.eval.temperature, config.eval.top_p) == (1.0, 0.7)
    assert (config.uses_critic, config.uses_reference, config.max_sequence_length) == (True, False, 224)


def test_a_given_critic_optimizer_keeps_the_critics_learning_rate(tmp_path: Path) -> None:
    assert load(tmp_path, "critic.optimizer.weight_decay=0.0").critic.optimizer.lr == 2e-6


def test_derived_values(tmp_path: Path) -> None:
    parallel = load(tmp_path, "parallel.world_size=4", "parallel.tensor_model_parallel_size=2").parallel
    assert (parallel.data_parallel_size, parallel.sequence_parallel) == (2, True)
    config = load(tmp_path, "parallel.world_size=2", "parallel.context_parallel_size=2")
    assert (config.parallel.data_parallel_size, config.parallel.sequence_parallel) == (1, False)
    assert (config.parallel.sequence_multiple, config.parallel.microbatch_multiple) == (4, 4)
    assert (config.batch.responses_per_step, config.batch.updates_per_step) == (128, 2)
    assert config.rollout_tensor_parallel_size == 1


def test_sources(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.data.train == (FileSource(kind="file", path=f"{tmp_path}/train.jsonl", name="train", verifier="math"),)
    assert config.data.eval == (ReasoningGymSource(kind="reasoning_gym", task="chain_sum", name="chain_sum", size=10),)


def test_config_is_frozen(tmp_path: Path) -> None:
    config = load(tmp_path)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def test_resolved_yaml_loads_back_to_the_same_config(tmp_path: Path) -> None:
    for overrides in (
        [],
        ["algorithm.advantage.estimator=grpo"],
        ["algorithm.advantage.lambda_policy.kind=sigmoid", "rollout.engine=transformers", "data.eval=[]"],
        [
            "critic.value_pretraining.until={value_loss_below: 0.1, max_steps: 30}",
            "reward.overlong={cache: 32}",
            "data.prompt_suffix='off'",
        ],
    ):
        config = load(tmp_path, *overrides)
        (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
        again = load_config(tmp_path / "resolved.yaml")
        assert dump_yaml(again) == dump_yaml(config)
        assert again == config
    assert "critic:" not in dump_yaml(load(tmp_path, "algorithm.advantage.estimator=grpo"))
    assert "critic:" in dump_yaml(load(tmp_path))


# --- extends ----------------------------------------------------------------------------------------------------------


def test_extends_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "one.yaml").write_text("extends: ../base.yaml\nseed: 1\nbatch: {prompts_per_step: 8}\npolicy: {epochs: 2}\n")
    (tmp_path / "two.yaml").write_text("seed: 2\ndata: {eval: []}\n")
    (tmp_path / "last.yaml").write_text("extends: [sub/one.yaml, two.yaml]\nbatch: {mini_batch_size: 32}\n")
    config = load_config(tmp_path / "last.yaml")
    assert (config.seed, config.policy.epochs, config.data.eval) == (2, 2, ())
    assert (config.batch.prompts_per_step, config.batch.responses_per_prompt, config.batch.mini_batch_size) == (8, 8, 32)


def test_the_same_parent_twice_is_no_cycle(tmp_path: Path) -> None:
    for name in ("left", "right"):
        write_child(tmp_path, "", f"{name}.yaml")
    (tmp_path / "both.yaml").write_text("extends: [left.yaml, right.yaml]\n")
    assert load_config(tmp_path / "both.yaml") == load(tmp_path)


def test_cycle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    (fault,) = faults_of(tmp_path, file="a.yaml")
    assert fault.endswith("extends itself in a cycle: a.yaml -> b.yaml -> a.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("extends: nowhere.yaml", "nowhere.yaml: no such configuration file"),
        ("extends: 3", "extends: 3 must be"),
        ("extends: {a: b}", "must be the path of a YAML file, or a list of them"),
        ("[1, 2]", "contains a list, expected a mapping"),
        ("hello", "contains the single value 'hello', expected a mapping"),
        ("extends: null", "extends: null must be"),
        ("a: [1", "not valid YAML: line"),
    ],
)
def test_unreadable_files(text: str, expected: str, tmp_path: Path) -> None:
    """Nothing is said about keys that the unreadable file may hold."""
    (tmp_path / "bad.yaml").write_text(text)
    (fault,) = faults_of(tmp_path, file="bad.yaml")
    assert expected in fault
    (tmp_path / "child.yaml").write_text("extends: bad.yaml\nsed: 3\npolicy: {epochs: 0}\n")
    faults = faults_of(tmp_path, file="child.yaml")
    assert expected in faults[0]
    assert [fault.split(":")[0] for fault in faults[1:]] == ["policy.epochs", "sed"]


def test_missing_file_and_folder_and_binary(tmp_path: Path) -> None:
    assert faults_of(tmp_path, file="none.yaml") == [f"{tmp_path}/none.yaml: no such configuration file"]
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot be read" in faults_of(tmp_path, file="folder.yaml")[0]
    (tmp_path / "latin.yaml").write_bytes("run: {dir: é}".encode("latin-1"))
    assert "cannot be read: not UTF-8 (byte 0xe9 at position 11)" in faults_of(tmp_path, file="latin.yaml")[0]


def test_empty_file_lists_what_is_required(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert faults_of(tmp_path, file="empty.yaml") == [f"{key}: is required" for key in ("run", "model", "batch", "data", "rollout")]


# --- overrides --------------------------------------------------------------------------------------------------------


def test_overrides_of_any_depth(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "seed=7",
        "policy.optimizer.lr=1e-5",
        "data.eval.0.size=20",
        "data.eval.0.options={min_terms: 3}",
        f"data.train.1={{kind: file, path: {tmp_path}/train.jsonl, name: again, verifier: exact}}",
        "data.train.0.fields.prompt=question",
        "reward.scale.target=[0, 5]",
        "data.prompt_suffix=a=b",
        "algorithm.policy_loss.dual_clip=3",
        "algorithm.policy_loss.dual_clip=null",
        "run.tensorboard=true",
    )
    assert (config.seed, config.policy.optimizer.lr, config.data.prompt_suffix) == (7, 1e-5, "a=b")
    assert isinstance(config.data.eval[0], ReasoningGymSource)
    assert (config.data.eval[0].size, config.data.eval[0].options) == (20, {"min_terms": 3})
    assert [source.name for source in config.data.train] == ["train", "again"]
    assert isinstance(config.data.train[0], FileSource)
    assert config.data.train[0].fields.prompt == "question"
    assert config.reward.scale is not None
    assert config.reward.scale.target == (0, 5)
    assert (config.algorithm.policy_loss.dual_clip, config.run.tensorboard) == (None, True)


def test_an_index_may_stand_in_brackets(tmp_path: Path) -> None:
    added = f"{{kind: file, path: {tmp_path}/train.jsonl, name: again, verifier: exact}}"
    config = load(tmp_path, f"data.train[1]={added}", "data.train[0].fields.prompt=question", "reward.scale.target=[0, 5]")
    assert config == load(tmp_path, f"data.train.1={added}", "data.train.0.fields.prompt=question", "reward.scale.target=[0, 5]")
    assert config.data.train[0].fields.prompt == "question"  # type: ignore[union-attr]


@pytest.mark.parametrize(("typed", "value"), [("007", 7), ("012", 12), ("+5", 5), ("0x1f", 31)])
def test_numbers_are_those_of_yaml_1_2(typed: str, value: int, tmp_path: Path) -> None:
    assert load(tmp_path, f"seed={typed}").seed == value


def test_null_resets_what_cannot_be_null(tmp_path: Path) -> None:
    write_child(tmp_path, "critic: {epochs: 3}\nparallel: {data_parallel_size: null}\n")
    assert load_config(tmp_path / "child.yaml").critic.epochs == 3
    assert load_config(tmp_path / "child.yaml", ["critic=null"]).critic.epochs == 1
    assert faults_of(tmp_path, "run.steps=null") == ["run.steps: is required"]
    write_child(tmp_path, "eval: {every_steps: 3}\nalgorithm: {kl: {place: loss, coef: 0.1}}\n")
    config = load_config(tmp_path / "child.yaml", ["data.eval=null", "algorithm.kl.place=null"])  # switches off what goes with them
    assert (config.data.eval, config.eval.every_steps, config.algorithm.kl.place) == ((), 0, "off")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "'seed': an override must have the form key.path=value"),
        ("=3", "an override must have the form key.path=value"),
        ("a..b=3", "an override must have the form key.path=value"),
        ("seed=[1", "seed: value '[1': not valid YAML"),
        ("data.train.5.path=x", "data.train.5.path: '5' is not an index of a list of 1"),
        ("data.train.x=1", "data.train.x: 'x' is not an index of a list of 1"),
        ("data.train.0.path.deep=1", "data.train.0.path.deep: 'deep' cannot be set inside the value"),
        ("extends=x.yaml", "extends: cannot be overridden"),
        ("sed=3", "sed: unknown key; did you mean 'seed'?"),
        ("policy.optimiser.lr=3", "policy.optimiser: unknown key; did you mean 'optimizer'?"),
        ("clip_high=0.3", "clip_high: unknown key; did you mean 'algorithm.policy_loss.clip_high'?"),
        ("data.train.0.verifyer=x", "data.train.0.verifyer: unknown key; did you mean 'verifier'?"),
        ("data.eval.0.fields.prompt=x", "data.eval.0.fields: unknown key; known here: kind, task, name, size, seed, weight, options"),
        ("seed=1.5", "seed: 1.5 must be a whole number"),
        ("run.dir=007", "run.dir: 7 must be text; quotes make it text, as in '\"007\"'"),
        ("seed='7'", "seed: '7' must be a whole number; quotes make it text: write 7"),
        ("seed=1_000", "seed: '1_000' must be a whole number; YAML 1.2 numbers have no '_': write 1000"),
        ("policy.optimizer.lr=1_0e-6", "policy.optimizer.lr: '1_0e-6' must be a number; YAML 1.2 numbers have no '_': write 10e-6"),
        ("data.train[5].path=x", "data.train[5].path: '5' is not an index of a list of 1"),
        ("data.train[x].path=x", "'data.train[x].path=x': an index in brackets must be a whole number after a key"),
        ("data.train[-1].path=x", "an index in brackets must be a whole number after a key, as in data.train[0].path"),
        ("data.train[0]path=x", "an index in brackets must be a whole number after a key"),
        ("[0].path=x", "an index in brackets must be a whole number after a key"),
        ("seed=true", "seed: true must be a whole number"),
        ("policy.optimizer.lr=fast", "policy.optimizer.lr: 'fast' must be a number"),
        ("policy.optimizer.lr=.nan", "policy.optimizer.lr: nan must be"),
        ("data.shuffle=yes", "data.shuffle: 'yes' must be true or false"),
        ("policy=3", "policy: 3 must be a mapping"),
        ("data.train=[]", "data.train: [] must be a list with at least 1 entry"),
        ("data.train=3", "data.train: 3 must be a list"),
        ("data.train.0.kind=fil", "data.train.0: unknown kind 'fil'; kind must be 'file' or 'reasoning_gym' or 'custom'"),
        ("model.dtype=float16", "model.dtype: 'float16' must be 'float32' or 'bfloat16'; did you mean"),
        ("rollout.temperature=0", "rollout.temperature: 0 must be >= 0.01"),
        ("algorithm.advantage.lambda_policy.alpha=0", "algorithm.advantage.lambda_policy.alpha: 0 must be > 0"),
        ("algorithm.policy_loss.clip_low=1", "algorithm.policy_loss.clip_low: 1 must be < 1"),
        ("algorithm.policy_loss.dual_clip=1", "algorithm.policy_loss.dual_clip: 1 must be > 1"),
        ("algorithm.advantage.gamma=1.01", "algorithm.advantage.gamma: 1.01 must be <= 1"),
        ("data.eval.0.name=a/b", "data.eval.0.name: 'a/b' must be a name: letters, digits"),
        ("data.train=[x]", "data.train.0: 'x' must be a mapping"),
        ("data.train={}", "data.train: {} must be a list"),
        ("data.train.0.path=null", "data.train.0.path: null must be text"),
        ("data.train.0.kind=null", "data.train.0: unknown kind null; kind must be 'file' or 'reasoning_gym' or 'custom'"),
        ("data=null", "data: is required"),
        ("reward.overlong={}", "reward.overlong.cache: is required"),
        ("reward.scale={source: [0, 1, 2]}", "reward.scale.source: [0, 1, 2] must be a list with at most 2 entries"),
        ("reward.scale={source: [0]}", "reward.scale.source.1: is missing in the list"),
        ("run.dir=''", "run.dir: '' is not a path"),
        ("run.steps=2147483648", "run.steps: 2147483648 must be < 2147483648"),
        ("seed=9223372036854775808", "seed: 9223372036854775808 must be < 9223372036854775808"),
        ("parallel.timeout_minutes=1e300", "parallel.timeout_minutes: 1e+300 must be <= 100000"),
        ("data.train.0.verifier=mth", "data.train.0.verifier: unknown verifier 'mth': did you mean 'math'? built-in: math, "),
        ("data.train.0.verifier=os.system", "data.train.0.verifier: unknown verifier 'os.system': built-in: math, "),
        ("eval.temperature=0.001", "eval.temperature: 0.001 must be 0 (greedy) or at least 0.01"),
        ("algorithm.kl={place: [reward, loss], coef: 0.1}", "algorithm.kl.place: ['reward', 'loss'] must be 'off', 'reward' or 'loss'"),
        ("run.wandb={project: a/b:c}", "'a/b:c' has / :: W&B takes projects of 1 to 128 characters without / \\ # ? % :"),
        (f"run.wandb={{project: {'p' * 129}}}", "is of 129 characters: W&B takes projects of 1 to 128"),
        ("run.wandb={project: ''}", "is of 0 characters: W&B takes projects of 1 to 128"),
    ],
)
def test_faulty_settings(override: str, expected: str, tmp_path: Path) -> None:
    faults = faults_of(tmp_path, override)
    assert len(faults) == 1, faults
    assert expected in faults[0]


def test_all_faults_are_reported_together(tmp_path: Path) -> None:
    write_child(
        tmp_path,
        """
seed: "1"
bach: {}
parallel: {world_size: 3, tensor_model_parallel_size: 2}
batch: {mini_batch_size: 999}
algorithm: {policy_loss: {clip_low: 1.5}, kl: {coef: 0.1}}
data: {train: [{kind: file, pth: x, verifier: math}]}
model: {path: nowhere}
seed: 2
rollout: {top_p: 0.9}
""",
    )
    faults = faults_of(tmp_path, "policy.epochs=0", "noequals", file="child.yaml")
    where = sorted(fault.split(": ")[0].replace(str(tmp_path), "") for fault in faults)
    assert where == sorted(
        [
            "'noequals'",
            "/child.yaml",
            "algorithm.kl.coef",
            "algorithm.policy_loss.clip_low",
            "bach",
            "batch.mini_batch_size",
            "data.train.0.path",
            "data.train.0.pth",
            "model.path",
            "parallel.world_size",
            "policy.epochs",
            "rollout.top_p",
        ]
    )


def test_missing_paths_are_faults_unless_skipped(tmp_path: Path) -> None:
    settings = ["model.path=nowhere", "data.train.0.path=none.jsonl"]
    faults = faults_of(tmp_path, *settings)
    assert [fault.split(":")[0] for fault in faults] == ["model.path", "data.train.0.path"]
    assert "'nowhere' does not exist" in faults[0]
    assert "no such file: 'none.jsonl'" in faults[1]
    assert load_config(tmp_path / "base.yaml", settings, check_paths=False).model.path == "nowhere"


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "gpt2"}', '{"model_type": "qwen2"}', "", "\xff", "[" * 10_000])
def test_corrupt_model_folder(content: str, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_bytes(content.encode("latin-1"))
    (fault,) = faults_of(tmp_path)
    assert fault.startswith("model.path: ")


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": None}, f"model_type None is not supported (supported: {', '.join(sorted(FAMILIES))})"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5, must be a positive whole number"),
        ({"hidden_size": "64"}, "hidden_size is '64', must be a positive whole number"),
        ({"vocab_size": True}, "vocab_size is True, must be"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be a positive whole number below 10000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 must divide num_attention_heads = 4"),
        ({"head_dim": "x"}, "head_dim is 'x', must be a positive whole number"),
        ({"head_dim": -3}, "head_dim is -3, must be"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings is 'x', must be"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, must be a positive number"),
        ({"rope_parameters": [1]}, "rope_parameters is [1], must be a mapping"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta is 'x', must be a positive number"),
        ({"rope_scaling": {"type": "longrope"}}, "rope scaling type 'longrope' is not supported (supported: default, llama3, yarn)"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling.original_max_position_embeddings is missing"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor is 0.5, must be at least 1"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "rope_scaling.truncate is 'no', must be true or false"),
        ({"rope_scaling": YARN | {"beta_fast": -1}}, "rope_scaling.beta_fast is -1, must be a positive number"),
        ({"rope_scaling": YARN | {"alpha": 2}}, "rope_scaling.alpha is not known for rope scaling type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_parameters.original_max_position_embeddings is missing"),
        ({"use_sliding_window": True, "sliding_window": "x"}, "sliding_window = 'x' smaller than max_position_embeddings = 512"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights are not supported"),
    ],
)
def test_odd_values_in_the_models_config(change: dict[str, object], expected: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", **change)
    (fault,) = faults_of(tmp_path)
    assert fault.startswith("model.path: ")
    assert expected in fault


def test_model_folder_without_weights_or_tokenizer(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).unlink()
    weights, tokenizer = faults_of(tmp_path)
    assert weights.endswith("has no weights: neither model.safetensors nor model.safetensors.index.json")
    assert tokenizer.endswith("has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    (tmp_path / "model" / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is a pickle, which could run code and is not loaded" in faults_of(tmp_path)[0]
    assert load_config(tmp_path / "base.yaml", check_paths=False).model.path


def test_paths_longer_than_the_system_takes(tmp_path: Path) -> None:
    settings = ["model.path=" + "a" * 5000, "data.train.0.path=" + "b" * 5000]
    assert [fault.split(":")[0] for fault in faults_of(tmp_path, *settings)] == ["model.path", "data.train.0.path"]


def test_all_faults_of_the_models_config_are_told(tmp_path: Path) -> None:
    write_model(tmp_path / "model", hidden_size=None, head_dim=0, hidden_act="relu", rope_scaling="yarn")
    (fault,) = faults_of(tmp_path)
    for name in ("hidden_size", "head_dim", "hidden_act", "rope_scaling"):
        assert f"{name} " in fault


def test_what_the_models_config_may_leave_out(tmp_path: Path) -> None:
    write_model(tmp_path / "model", head_dim=None, num_key_value_heads=None, max_position_embeddings=None, sliding_window=16)
    architecture = read_architecture(tmp_path / "model")
    assert (architecture.head_dim, architecture.num_key_value_heads, architecture.max_position_embeddings) == (32, 4, 2048)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    write_model(tmp_path / "model", rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **scaling})
    architecture = read_architecture(tmp_path / "model")
    assert (architecture.rope_theta, architecture.rope_scaling) == (500.0, {"rope_type": "llama3", **scaling})


def test_mixtures_with_dense_layers_are_refused_with_the_reason(tmp_path: Path) -> None:
    mixture: dict[str, object] = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    write_model(tmp_path / "model", **mixture, mlp_only_layers=[0])
    (fault,) = faults_of(tmp_path)
    assert "mixtures of experts with some dense layers (mlp_only_layers, decoder_sparse_step) are not supported" in fault


def test_importing_config_imports_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'vllm', 'numpy'}"
    code = f"import sys, vapo_mcore.config as c; c.load_config, c.Config; print(sorted({heavy} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "[]\n"


def test_a_backbone_of_policy_and_critic_is_refused_with_the_reason(tmp_path: Path) -> None:
    for key in ("critic.shared_backbone", "policy.share_backbone"):
        (fault,) = faults_of(tmp_path, f"{key}=true")
        assert fault.startswith(f"{key}: not available: policy and critic are separate models")
        assert "would change the policy" in fault


def test_an_unknown_environment_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, "rollout.environment.name=calculater")
    assert fault.startswith("rollout.environment.name: unknown environment 'calculater': did you mean 'calculator'?")
    assert load(tmp_path, "rollout.environment={name: 'my_project.games:guess', max_observation_length: 8}").rollout.environment is not None
