"""``vapo-mcore certify CONFIG``: its options, and what is checked before torch is imported."""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vapo_mcore.certify.names import BUILT_IN, chosen_checks
from vapo_mcore.errors import VapoError
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

    Returns 0 where everything that was measured holds, 1 where there are warnings, 2 where a check fails or no verdict was reached.
    ``load`` reads the configuration that the options name, with further settings.
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
            return _verdict_of(local.launch("vapo_mcore.cli", arguments, config.parallel.world_size), output)
        local.become_single_process()

    with importing():
        from vapo_mcore.certify.runner import CertifyOptions, run_certify

    try:
        code = run_certify(config, CertifyOptions(tuple(checks), options.against, output))
    except BrokenPipeError:
        raise
    except VapoError as error:
        if error.exit_code != VapoError.exit_code:
            raise VapoError(str(error)) from error
        raise
    except Exception as error:  # noqa: BLE001  (Python would exit with 1, which means a warning)
        traceback.print_exc()
        local.report_error(f"certify ended without a verdict: {type(error).__name__}: {error}")
        return 2
    return local.hand_exit_code(code)


def _verdict_of(code: int, output: str) -> int:
    """The launcher's exit code; 2 in place of one that has no meaning here: of a rank that was killed, a hang (76) or a restart (75).

    Interruptions (130) and a SIGTERM to the launcher (143) stay what they are.
    """
    if code in (0, 1, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        return code
    print(f"error: certify ended without a verdict (exit code {code} of its processes): {output} has no certificate", file=sys.stderr)
    return 2
