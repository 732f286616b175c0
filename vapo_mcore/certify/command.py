"""``vapo-mcore certify CONFIG``: its options, and what is checked before torch is imported."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vapo_mcore.certify.names import BUILT_IN, chosen_checks
from vapo_mcore.interrupts import importing

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; ``file`` and ``overrides`` are the command line's."""
    names = ",".join(BUILT_IN)
    parser.add_argument("--checks", action="append", metavar="NAMES", help=f"{names} or package.module:function (all built-in ones)")
    parser.add_argument("--against", metavar="FILE", help="an older certificate.json: say what differs from it, the first thing first")
    parser.add_argument("--output", metavar="DIR", help="for certificate.json and certificate.html (default: <run.dir>_certificate)")


def run(options: argparse.Namespace, arguments: list[str], load: Callable[[argparse.Namespace, Sequence[str]], Config]) -> int:
    """Check, start the processes that the recipe's layout needs unless they are there, and certify.

    Returns 0 where everything that was measured holds, 1 where there are warnings, 2 where a check fails. ``load`` reads the configuration
    that the options name, with further settings.
    """
    from vapo_mcore.launch import local

    checks = chosen_checks(options.checks)
    config = load(options, ())

    from vapo_mcore.certify.certificate import default_folder, read

    output = options.output or default_folder(config.run.dir)
    if not local.under_torchrun():
        if options.against is not None:
            read(options.against)
        if config.parallel.world_size > 1:
            return local.launch("vapo_mcore.cli", arguments, config.parallel.world_size)
        local.become_single_process()

    with importing():
        from vapo_mcore.certify.runner import CertifyOptions, run_certify

    code = run_certify(config, CertifyOptions(tuple(checks), options.against, output))
    return local.hand_exit_code(code)
