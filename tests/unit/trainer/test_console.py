"""The line of a step: what was measured, a dash for what is undefined, nothing for what the mode does not have."""

import io
import sys

from vapo_mcore.records.console import Console, format_step

ROW = {
    "step": 3,
    "stage": "rl",
    "reward/mean": 0.25,
    "accuracy/mean": 0.625,
    "response/length_mean": 41.25,
    "policy/entropy": 1.5,
    "policy/approx_kl": 1.5e-4,
    "policy/clip_frac_high": 0.01,
    "policy/clip_frac_low": 0.002,
    "policy/grad_norm": 0.5,
    "critic/loss": 0.0625,
    "critic/explained_variance": 0.59,  # of targets that contain the values: flatters
    "critic/explained_variance_mc": None,
    "critic/grad_norm": 2.0,
    "tokens/per_second": 1234.5,
    "time/step": 4.0,
    "time/generate": 2.5,
    "time/critic_update": 0.5,
}


def test_a_step_is_one_line():
    line = format_step(ROW, 60)
    assert "\n" not in line
    for part in ("step 3/60", "reward 0.250", "len 41.2", "H 1.500", "kl 1.5e-04", "clip+ 0.010", "vloss 0.0625", "ev -", "tok/s 1234"):
        assert part in line
    assert line.endswith("4.0s (gen 2.5 critic 0.5)")


def test_without_a_critic_nothing_is_said_of_it():
    row = {name: value for name, value in ROW.items() if not name.startswith("critic/")}
    assert not any(label in format_step(row, 60) for label in ("vloss", "ev", "|gV|"))


def test_no_progress_bar_and_no_escape_sequences_off_a_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console = Console(enabled=True)
    console.start_progress("training", 2)
    console.print("[bold]not markup[/bold]")
    console.advance()
    console.stop_progress()
    assert stream.getvalue() == "[bold]not markup[/bold]\n"


def test_other_ranks_print_nothing(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console = Console(enabled=False)
    console.start_progress("training", 2)
    console.print("x")
    assert stream.getvalue() == ""
