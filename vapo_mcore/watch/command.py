"""``vapo-mcore watch RUN``: define the options and run the display. Importing it imports no third-party package."""

from __future__ import annotations

import argparse
import time

from vapo_mcore.errors import ConfigError

_LONGEST_INTERVAL = 86400.0  # a day


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("run", metavar="RUN", help="run directory (run.dir), on this machine or on a file system that it sees")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="interval between updates (2)")


def run(options: argparse.Namespace) -> int:
    """Show the run until it is finished or Ctrl-C is pressed; returns 0.

    Raises ConfigError for a folder without a run and for an invalid interval.
    """
    from rich.console import Console
    from rich.live import Live

    from vapo_mcore.watch.state import RunReader
    from vapo_mcore.watch.view import BARS, PLAIN_BARS, render

    if not 0 < options.interval <= _LONGEST_INTERVAL:  # False for NaN
        raise ConfigError(f"--interval {options.interval:g} must be above 0 and at most {_LONGEST_INTERVAL:g} seconds")
    reader = RunReader(options.run)
    console = Console()
    bars = BARS if console.encoding.startswith("utf") else PLAIN_BARS
    state = reader.read()
    if options.once:
        console.print(render(state, time.time(), bars, console.width))
        return 0
    with Live(render(state, time.time(), bars, console.width), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while state.status != "finished":
            time.sleep(options.interval)
            state = reader.read()
            live.update(render(state, time.time(), bars, console.width), refresh=True)
    return 0
