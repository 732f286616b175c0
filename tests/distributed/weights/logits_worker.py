"""Logits of transformers and of Megatron, model folder by model folder: prints "NAME TOKENS LARGEST MEAN AGREEMENT" for each argument."""

from __future__ import annotations

import sys
from pathlib import Path

from vapo_mcore.weights.verify import compare_logits

TEXTS = ["a", "z9", "abc", "the quick brown fox 42", "0123456789 " * 8]

for folder in map(Path, sys.argv[1:]):
    result = compare_logits(folder, folder, TEXTS)
    print(folder.name, result.tokens, result.max_difference, result.mean_difference, result.top1_agreement, flush=True)
