"""The built-in checks by name, and what ``--checks`` may name. Nothing from elsewhere is imported here."""

from __future__ import annotations

from difflib import get_close_matches

from vapo_mcore.config.references import reference_fault
from vapo_mcore.errors import ConfigError

BUILT_IN = {
    "machine": "machine: the doctor's findings on each node, plan's verdict on the recipe",
    "folder": "model folder: config, tokenizer, chat template and stop tokens belong together",
    "trainer": "trainer against transformers: log-probs of the whole vocabulary, hidden states by layer",
    "engine": "rollout engine against trainer: weights, sampled log-probs, full distributions, before and after a change of weights",
    "invariance": "step: the same loss and gradient norm whatever the packing and the layout; importance ratios follow the log-probs",
    "offload": "offload: ten cycles keep every bit and leave no bytes behind",
    "critic": "critic: head round trip, values of transformers, head-only training, packing",
    "graders": "graders: labelled answers, the recipe's own truths",
    "rates": "rates: tokens/s, weight sync, offloading and all-reduce, compared with what plan assumes, as --rate options for it",
    "resume": "resume: a step after a checkpoint is loaded has the bits of the step without one",
}
"""In the order in which they run: ``resume`` trains the models, so it is the last one that uses them."""


def chosen_checks(texts: list[str] | None) -> list[str]:
    """Return the names given with ``--checks`` (comma-separated, repeatable) without repeats; None gives all built-in checks.

    Raises ConfigError for names that are neither built-in nor an import path.
    """
    if texts is None:
        return list(BUILT_IN)
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    faults = []
    for name in names:
        if name in BUILT_IN:
            continue
        if ":" in name:
            fault = reference_fault(name)
            if fault is not None:
                faults.append(f"--checks {name}: {fault}")
            continue
        near = get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        faults.append(f"--checks {name}: unknown; {hint}there are {', '.join(BUILT_IN)}, and your own as package.module:function")
    if faults:
        raise ConfigError("\n".join(faults))
    if not names:
        raise ConfigError(f"--checks is empty; there are {', '.join(BUILT_IN)}")
    return list(dict.fromkeys(names))
