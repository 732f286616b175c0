"""Commands about training and what a run leaves: the quickstart, the tutorial, extensions, the critic, checkpoints, processes."""

from __future__ import annotations

from tests.docs import looks
from tests.docs.command import Command

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
SMALL_RECIPE = {
    "small.yaml": "extends: examples/configs/quickstart.yaml\n"
    "run: {dir: runs/small, steps: 1}\n"
    "batch: {prompts_per_step: 4, responses_per_prompt: 4, mini_batch_size: 8}\n"
    "critic: {value_pretraining: {steps: 1}}\n"
    "eval: {max_prompts: 8}\n"
}

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
    Command(
        "make nightly",
        add="--dry-run",
        why="it takes hours",
        says=(
            "nightly: test-slow",
            "-m slow",
            "-m pytest tests/docs --dur",
            "-m pytest tests/distributed/test_layouts.py",
            "tests/te_reference -rP",
        ),
    ),
    Command(
        'make nightly NIGHTLY="test-slow test-docs-slow"',
        add="--dry-run",
        why="it takes hours",
        says=(r"nightly: test-slow\n(.*\n)*nightly: test-docs-slow\n",),
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
    *(
        Command(
            f"python tools/make_game_model.py {game}--output models/{model}",
            says=(rf"models/{model}: answers at {nats}\d+ nats",),
            leaves=(f"models/{model}/model.safetensors", f"models/{model}/heldout.jsonl"),
            slow=True,
        )
        for game, model, nats in (
            ("", "tiny_game", r"1\."),
            ("--game maze ", "tiny_maze", r"0\.9"),
            ("--game maze_walk ", "tiny_maze_walk", r"0\.[45]"),
        )
    ),
    # docs/results.md: a mixture on the quickstart's task.
    Command(
        "python tools/make_tiny_model.py --output models/tiny_mixture --experts 8",
        add="--steps 60",
        why="fewer supervised steps, which are enough to run it",
        says=(r"models/tiny_mixture: \S+% of 400 held-out problems right",),
        leaves=("models/tiny_mixture/model.safetensors", "models/tiny_mixture/heldout.jsonl"),
        slow=True,
    ),
    Command(
        "vapo-mcore train examples/configs/quickstart_mixture.yaml",
        add=SMALL,
        why=ONE_STEP,
        says=(HELD_OUT,),
        leaves=("runs/quickstart_mixture/metrics.jsonl", "runs/quickstart_mixture/export/hf/config.json"),
        slow=True,
    ),
    # docs/results.md: rollouts with a horizon.
    *(
        Command(
            f"vapo-mcore train examples/configs/maze_walk_vapo.yaml{options}",
            add=SMALL.replace(" critic.probe.prompts=4", ""),
            why=ONE_STEP,
            leaves=(f"runs/{folder}/metrics.jsonl",),
            slow=True,
        )
        for folder, options in (
            ("maze_walk_vapo", ""),
            (
                "maze_walk_segments",
                " run.dir=runs/maze_walk_segments rollout.horizon.tokens=110 rollout.horizon.train=segments run.steps=28",
            ),
            (
                "maze_walk_completed",
                " run.dir=runs/maze_walk_completed rollout.horizon.tokens=110 rollout.horizon.train=completed "
                "algorithm.policy_loss.importance_correction.kind=token_truncate "
                "algorithm.policy_loss.importance_correction.cap=2.0 run.steps=28",
            ),
        )
    ),
    Command(
        "python tools/plot_run.py runs/maze_walk_vapo runs/maze_walk_segments runs/maze_walk_completed --output docs/maze_walk.png",
        leaves=("docs/maze_walk.png",),
        slow=True,
    ),
    *(
        Command(
            f"vapo-mcore train examples/configs/{name}.yaml",
            add=SMALL,
            why=ONE_STEP,
            says=(HELD_OUT,),
            leaves=(f"runs/{name}/metrics.jsonl", f"runs/{name}/critic_pretrained/hf/config.json"),
            slow=True,
        )
        for name in ("critic_game_vapo", "maze_vapo")
    ),
    *(
        Command(
            f"vapo-mcore train examples/configs/{name}.yaml",
            add=SMALL.replace("critic.value_pretraining.steps=1 critic.probe.prompts=4 ", ""),
            why=ONE_STEP,
            leaves=(f"runs/{name}/metrics.jsonl",),
            slow=True,
        )
        for name in ("critic_game_grpo", "critic_game_dapo", "maze_grpo")
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
]
