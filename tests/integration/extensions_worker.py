"""The example's four extensions on a tiny model, in one process, with two ways of packing: extensions_worker.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from tests.torchrun import ROOT
from vapo_mcore.config import Config, load_config
from vapo_mcore.launch.local import become_single_process
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer.main import train

FOLDER = Path(sys.argv[1])
EXAMPLE = ROOT / "examples" / "extensions" / "arithmetic.py"
LONG_PROMPT = 11


def with_extensions(name: str, *overrides: str) -> Config:
    """The tiny run with the algorithm and the tasks of examples/configs/extensions.yaml."""
    document = yaml.safe_load((FOLDER / "base.yaml").read_text(encoding="utf-8"))
    example = (ROOT / "examples" / "configs" / "extensions.yaml").read_text(encoding="utf-8")
    settings = yaml.safe_load(example.replace(str(EXAMPLE.relative_to(ROOT)), str(EXAMPLE)))
    document["data"] |= settings["data"] | {"max_prompt_length": LONG_PROMPT}
    document["algorithm"] = settings["algorithm"]
    del document["critic"]
    path = FOLDER / "extensions.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_config(
        path,
        [f"run.dir={FOLDER / name}", "parallel.world_size=1", "policy.epochs=2", "eval.at_end=false", "eval.max_prompts=8", *overrides],
    )


if __name__ == "__main__":
    become_single_process()
    for name, cap in (("large_packs", 400), ("small_packs", 56)):
        config = with_extensions(name, f"batch.max_tokens_per_microbatch={cap}")
        train(config, initialize_parallel(config.parallel), clean=False)
