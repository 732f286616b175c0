"""Decide whether a decimal represents a different number: as its rounding, or as a printed floating-point result."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

MIN_DECIMALS = 6
MIN_SIGNIFICANT = 4
"""A decimal represents values that round to it if it has at least this many decimals and significant digits."""
PRINTED_DECIMALS = 10
PRINTED_NOISE = Fraction(1, 10**9)
"""Relative floating-point error allowed in a result with at least ``PRINTED_DECIMALS`` decimals."""


def is_rounding(scaled: Fraction, places: int, value: Any, value_places: int = 0) -> bool:
    """Return whether a decimal with ``places`` decimals represents a value; both are given multiplied by ``10**places``.

    It does if it is precise enough and the value rounds to it (a decimal value must have more places); or if both agree to 9 digits and
    it has at least 10 places, as printed floating-point results have.
    """
    apart = abs(value - scaled)
    if places >= PRINTED_DECIMALS and apart <= PRINTED_NOISE * abs(scaled):
        return True
    finer = value_places == 0 or value_places > places
    return bool(finer and places >= MIN_DECIMALS and abs(scaled) >= 10 ** (MIN_SIGNIFICANT - 1) and 2 * apart <= 1)
