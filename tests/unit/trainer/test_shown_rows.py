"""Which responses of a step or an evaluation are written with their text."""

import pytest

from vapo_mcore.experience.collecting import shown_rows


@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [(4, 8, {0, 1, 2, 3}), (4, 4, {0, 1, 2, 3}), (8, 4, {0, 2, 4, 6}), (10, 3, {0, 3, 6}), (5, 0, set()), (0, 3, set()), (1, 9, {0})],
)
def test_rows_are_spread_evenly_and_never_fewer_than_there_are(rows: int, count: int, expected: set[int]) -> None:
    assert shown_rows(rows, count) == expected
