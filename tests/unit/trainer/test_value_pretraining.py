"""Value pretraining ends after its steps, or when thresholds have held for a window, at max_steps at the latest."""

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
    assert "held for 2 steps" in end.describe()


def test_max_steps_bounds_it():
    settings = ValuePretrainingConfig(until=UntilConfig(value_loss_below=0.1, window=2, max_steps=4))
    number, end = steps_until_end(settings, [(1.0, 0.0)] * 9)
    assert number == 4
    assert "not held" in end.describe()
