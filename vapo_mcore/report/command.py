"""``vapo-mcore report RUN [RUN ...]``: define the options and write the report."""

from __future__ import annotations

import argparse
from pathlib import Path

from vapo_mcore.errors import ConfigError

FILE_NAME = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories; several runs share each chart")
    parser.add_argument("--output", metavar="FILE", help=f"HTML file to write (default: RUN/{FILE_NAME}; with several runs ./{FILE_NAME})")
    parser.add_argument("--title", help="title of the page (default: names of the runs)")


def run(options: argparse.Namespace) -> int:
    """Write the page and return 0. Raises DataError for a folder that is not a run, ConfigError if the page cannot be written."""
    from vapo_mcore.report.page import build_page
    from vapo_mcore.report.read import read_runs

    runs = read_runs(options.runs)
    output = Path(options.output or (runs[0].path / FILE_NAME if len(runs) == 1 else FILE_NAME))
    page = build_page(runs, options.title or ", ".join(run.name for run in runs))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8", errors="backslashreplace")  # folder names may be invalid Unicode
    except OSError as error:
        raise ConfigError(f"--output {str(output)!r} cannot be written: {error.strerror}") from error
    shown = str(output).encode("utf-8", "backslashreplace").decode()
    print(f"wrote {shown} ({output.stat().st_size / 1e6:.2f} MB)")
    return 0
