"""Value pretraining ends after its steps, when thresholds have held for a window, or when the probe has stopped rising; at max_steps
at the latest."""

import pytest

from vapo_mcore.config.schema import UntilConfig, ValuePretrainingConfig
from vapo_mcore.trainer.value_pretraining import PretrainingEnd


def steps_until_end(settings, rows):
    end = PretrainingEnd(settings)
    for number, (loss, explained) in enumerate(rows, start=1):
        if end.after({"critic/loss": loss, "critic/explained_variance": explained}):
            return number, end
    return None, end


def test_a_fixed_number_of_steps():
    assert steps_until_end(ValuePretrainingConfig(steps=3), [(9.0, None)] * 5)[0] == 3


def test_thresholds_must_hold_for_the_whole_window():
    settings = ValuePretrainingConfig(until=UntilConfig(value_loss_below=0.1, explained_variance_above=0.2, window=2, max_steps=10))
    rows = [(0.05, 0.3), (0.2, 0.3), (0.05, 0.3), (0.05, None), (0.05, 0.25), (0.01, 0.9), (0.01, 0.9)]
    number, end = steps_until_end(settings, rows)
    assert number == 6  # broken by the loss at step 2, by the undefined variance at step 4
    assert "held for 2 consecutive steps" in end.describe()


def test_max_steps_bounds_it():
    settings = ValuePretrainingConfig(until=UntilConfig(value_loss_below=0.1, window=2, max_steps=4))
    number, end = steps_until_end(settings, [(1.0, 0.0)] * 9)
    assert number == 4
    assert "did not hold" in end.describe()


def probe_steps_until_end(until, explained):
    end = PretrainingEnd(ValuePretrainingConfig(until=until))
    for number, value in enumerate(explained, start=1):
        if number == 3:  # a resumed run goes on as if nothing had happened
            state, end = end.state_dict(), PretrainingEnd(ValuePretrainingConfig(until=until))
            end.load_state_dict(state)
        if end.after({"critic/loss": 0.1, "critic/explained_variance": 0.9, "critic/probe_explained_variance": value}):
            return number, end
    return None, end


@pytest.mark.parametrize(
    ("explained", "number"),
    [
        ([0.1, 0.2, 0.3, 0.305, 0.3, 0.309, 0.9], 6),  # rises of less than 0.01 above the best, 0.3, do not count
        ([0.1, 0.2, 0.1, 0.1, 0.22, 0.2, 0.2, 0.2], 8),  # a late rise starts the count again
        ([None, None, None], 3),
        ([-0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4], 10),  # still rising at max_steps
    ],
)
def test_patience_ends_it_once_the_probe_stops_rising(explained, number):
    found, end = probe_steps_until_end(UntilConfig(patience=3, max_steps=10), explained)
    assert found == number
    assert ("did not rise by 0.01 in 3 steps" in end.describe()) == (number < 10)


def test_without_a_least_rise_an_unchanged_probe_is_no_rise():
    found, _ = probe_steps_until_end(UntilConfig(patience=2, min_rise=0.0, max_steps=10), [0.3, 0.30001, 0.30001, 0.30001, 0.4])
    assert found == 4


def test_a_threshold_of_the_probe_reads_the_probe():
    until = UntilConfig(probe_explained_variance_above=0.4, window=2, max_steps=10)
    number, end = probe_steps_until_end(until, [0.5, 0.3, 0.41, 0.42, 0.9])
    assert number == 4 and "held for 2 consecutive steps" in end.describe()
