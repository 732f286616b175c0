"""The comparison of recorded terminal sessions with real output (tests/docs/sessions.py) finds what differs."""

from pathlib import Path

import pytest

from tests.docs.sessions import first_difference, masked, recorded_sessions

OUTPUT = """\
starting 2 processes
starting 2 processes: 10 s
step 1/60 | reward 0.25 | ev - | 3.2s (gen 1.0)

step 2/60 | reward 0.50 | ev 0.1 | 3.1s (gen 1.1)
policy exported: runs/quickstart/export/hf
"""


@pytest.mark.parametrize(
    "recorded",
    [
        OUTPUT.splitlines(),
        ["starting 2 processes", "...", "policy exported: runs/quickstart/export/hf"],
        ["...", "step 60/60 | reward 0.5 | ev 0 | 1.2s (gen 2.0)", "policy exported: runs/quickstart/export/hf"],  # the second such line
        ["...", "step 7/60 | reward 0.125 | ev -0.3 | 1.2s (gen 2.0)", "..."],
        ["starting 3 processes", "starting 3 processes: 20 s", "starting 3 processes: 30 s", "..."],
    ],
)
def test_the_same_but_for_numbers_and_elisions(recorded: list[str]) -> None:
    assert first_difference(recorded, OUTPUT) is None


@pytest.mark.parametrize(
    ("recorded", "found"),
    [
        (["starting 2 processes", "policy exported: runs/quickstart/export/hf"], "policy exported: runs/quickstart/export/hf"),
        (["...", "policy exported: runs/quickstart/export/hf", "...", "starting 2 processes"], "starting # processes"),
        (["...", "step 1/60 | reward 0.25 | 3.2s (gen 1.0)", "..."], "step #/# | reward # | #s (gen #)"),
        (["starting 2 processes"], "end of the output, instead of: step #/# | reward # | ev # | #s (gen #)"),
        (["...", "policy exported: runs/quickstart/export"], "policy exported: runs/quickstart/export"),
    ],
)
def test_what_differs_is_named(recorded: list[str], found: str) -> None:
    assert first_difference(recorded, OUTPUT) == found


def test_numbers_are_masked_and_names_are_not() -> None:
    assert masked("  acc 0.245 -> 0.770 [0.730, 0.810], kl 1.0e-05, H -") == "acc # -> # [#, #], kl #, H #"
    assert masked("a lower-case --flag of run.dir") == "a lower-case --flag of run.dir"


def test_sessions_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n```console\n$ make x\na\n\n$ make y\nb\nc\n```\n```\nmake z\n```\n")
    assert recorded_sessions(page) == {"make x": ["a"], "make y": ["b", "c"]}
