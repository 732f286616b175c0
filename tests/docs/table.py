"""Every command of the pages, in the order in which they are run, and how each is run here; ``COMMANDS`` is the table."""

from __future__ import annotations

from tests.docs import other_commands, run_commands

COMMANDS = [*run_commands.COMMANDS, *other_commands.COMMANDS]
