"""Apply the rules after each step: which ones hold, for how many steps, and whether one of them ends the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vapo_mcore.config.schema import Config
from vapo_mcore.config.verifiers import UNGRADED
from vapo_mcore.diagnosis.rules import RULES, Context, Row

REPEATED_EVERY = 10
"""A rule that still holds is printed again after this many steps; its count rises every step."""
COUNT = "diagnosis/"
"""Metrics with this prefix count the steps in which a rule has held."""


@dataclass(frozen=True)
class Finding:
    """A rule that holds after a step. ``in_a_row``: consecutive steps of the stage in which it has held, this one included."""

    name: str
    evidence: str
    means: str
    remedy: str
    in_a_row: int

    @property
    def is_due(self) -> bool:
        """Return whether to print the finding: after its first step, then every ``REPEATED_EVERY`` steps."""
        return (self.in_a_row - 1) % REPEATED_EVERY == 0

    def __str__(self) -> str:
        since = f" (for {self.in_a_row} steps)" if self.in_a_row > 1 else ""
        return f"{self.name}{since}: {self.evidence}: {self.means}. Usual remedy: {self.remedy}"


class Monitor:
    """Applies the configured rules to the rows of a run, in order. Deterministic, and the same on all ranks that see the same rows."""

    def __init__(self, config: Config) -> None:
        settings = config.diagnosis
        self.context = Context.of(config)
        self.halting = settings.halt_on
        self.rules = [(rule, rule.section(settings)) for rule in RULES if rule.section(settings) is not None]
        self._rows: dict[str, list[Row]] = {}  # by stage
        self._in_a_row: dict[str, int] = {}  # by "stage/rule"
        self.counts: dict[str, int] = {}

    def observe(self, row: Row) -> list[Finding]:
        """Read the row of the next step of a stage and return the rules that now hold. Ignores evaluations (step 0)."""
        if row["step"] == 0:
            return []
        stage = row.get("stage", "rl")
        rows = self._rows.setdefault(stage, [])
        rows.append({key: value for key, value in row.items() if key in _READ})
        found = []
        for rule, settings in self.rules:
            if stage != "rl" and not rule.pretraining:
                continue
            evidence = rule.check(rows, settings, self.context)
            key = f"{stage}/{rule.name}"
            self._in_a_row[key] = 0 if evidence is None else self._in_a_row.get(key, 0) + 1
            if evidence is not None:
                self.counts[rule.name] = self.counts.get(rule.name, 0) + 1
                found.append(Finding(rule.name, evidence, rule.means, rule.remedy, self._in_a_row[key]))
        return found

    def metrics(self) -> dict[str, int]:
        """Return ``diagnosis/<rule>``, the number of steps in which each rule has held, for rules that have held."""
        return {COUNT + name: count for name, count in sorted(self.counts.items())}

    def ends_the_run(self, findings: Iterable[Finding]) -> Finding | None:
        """Return the first finding that ``diagnosis.halt_on`` names, else None."""
        return next((finding for finding in findings if finding.name in self.halting), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that the rules read, and their findings so far, as plain values."""
        return {
            "rows": {stage: list(rows) for stage, rows in self._rows.items()},
            "in_a_row": dict(self._in_a_row),
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Keeps earlier findings, even if thresholds have changed since."""
        self._rows = {stage: list(rows) for stage, rows in state["rows"].items()}
        self._in_a_row, self.counts = dict(state["in_a_row"]), dict(state["counts"])


_READ = frozenset(
    {
        "step", "stage", "critic/explained_variance", "critic/explained_variance_mc", "critic/loss", "critic/returns_std",
        "policy/entropy", "response/length_mean", "response/truncated_frac",
        "accuracy/mean", "policy/clip_frac_high", "policy/clip_frac_low", "mismatch/logprob_abs_mean", "policy/approx_kl_first",
        "gae/lambda_zero_frac", "groups/all_right_frac", "groups/all_wrong_frac", "grading/failed", "response/count", "response/missed_end",
        "policy/updates_skipped", "critic/updates_skipped", "policy/updates", "critic/updates", "policy/minibatches_masked",
        "critic/minibatches_masked", "tokens/trained", "policy/experts_busiest_max", "policy/experts_entropy_min", "horizon/open",
        "horizon/cuts_ended", "horizon/cut_value_bias", "horizon/cut_value_bias_se", "horizon/cut_weight", "advantages/std",
        *(f"grading/failed_{cause}" for cause in UNGRADED),
    }
)  # fmt: skip
"""The metrics that rules read. Only these are kept, so that the history of a long run stays small."""
