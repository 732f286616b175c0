"""When a decimal stands for a number that it does not equal: as its rounding, or as what floating-point arithmetic printed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

MIN_DECIMALS = 6
MIN_SIGNIFICANT = 4
"""A decimal number stands for the value that rounds to it if it has so many decimals and significant digits."""
PRINTED_DECIMALS = 10
PRINTED_NOISE = Fraction(1, 10**9)
"""Relative difference that floating-point arithmetic leaves in a result of so many decimals."""


def is_rounding(scaled: Fraction, places: int, value: Any, value_places: int = 0) -> bool:
    """Whether a decimal with so many places, times ``10**places``, stands for ``value``, times the same.

    It does if the value rounds to it (and has no fewer places itself, if it is a decimal) and it is precise enough; or if both are the
    same to 9 digits and it has the 10 places or more that floating-point arithmetic prints.
    """
    apart = abs(value - scaled)
    if places >= PRINTED_DECIMALS and apart <= PRINTED_NOISE * abs(scaled):
        return True
    finer = value_places == 0 or value_places > places
    return bool(finer and places >= MIN_DECIMALS and abs(scaled) >= 10 ** (MIN_SIGNIFICANT - 1) and 2 * apart <= 1)
