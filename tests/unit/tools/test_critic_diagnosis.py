"""The labels, oracles and measures of benchmarks/critic_diagnosis.py, on hand-written texts and on tables worked out by hand."""

from types import ModuleType

import pytest
import torch
from addition_task import Problem, worked_solution

from tests.benchmark_modules import load_benchmark


@pytest.fixture(scope="module")
def diagnosis() -> ModuleType:
    return load_benchmark("critic_diagnosis")


PROBLEM = Problem(start=37, addend=58, times=3)  # 95, 153, 211


def test_a_prompt_is_read_back(diagnosis: ModuleType) -> None:
    assert PROBLEM.prompt == "_/c+58:730;"
    assert diagnosis.read_problem(PROBLEM.prompt) == PROBLEM
    assert diagnosis.read_problem(Problem(5, 10, 14).prompt) == Problem(5, 10, 14)


def test_the_right_solution_is_right_to_its_end_and_not_beyond(diagnosis: ModuleType) -> None:
    solution = worked_solution(PROBLEM)
    assert solution == "a/c+58:590;b/c+58:351;c/c+58:112;\\boxed{211}"
    assert diagnosis.prefix_states(PROBLEM, solution) == [diagnosis.RIGHT] * (len(solution) + 1)
    assert diagnosis.prefix_states(PROBLEM, solution + "1")[-1] == diagnosis.WRONG


def test_text_with_a_wrong_digit_stays_wrong_unless_a_later_total_is_right(diagnosis: ModuleType) -> None:
    text = "a/c+58:690;b/c+58:351;c/c+58:112;\\boxed{210}"  # 96 instead of 95, then right totals, then a wrong box
    states = diagnosis.prefix_states(PROBLEM, text)
    expected = [diagnosis.RIGHT] * 8 + [diagnosis.WRONG] * 14  # from the wrong digit to the end of the next total
    assert states[:22] == expected
    box = text.index("0}")
    assert states[22 : box + 1] == [diagnosis.RECOVERED] * (box + 1 - 22)
    assert states[box + 1 :] == [diagnosis.WRONG] * 2


def test_a_table_of_two_states_explains_what_they_determine(diagnosis: ModuleType) -> None:
    """Returns of 1 with probability 0.8 in one state and 0.2 in the other, equally often: 0.3^2 of the variance 0.25."""
    states = torch.tensor([0] * 1000 + [1] * 1000)
    returns = torch.tensor([1.0] * 800 + [0.0] * 200 + [1.0] * 200 + [0.0] * 800)
    coarse = torch.zeros_like(states)
    values = diagnosis.table(states, coarse, returns, states, coarse, 0.0)
    assert values.unique().tolist() == pytest.approx([0.2, 0.8])
    assert diagnosis.ev(values, returns) == pytest.approx(0.36)


def test_a_state_that_was_not_seen_has_the_mean_of_its_coarse_key(diagnosis: ModuleType) -> None:
    keys, coarse, returns = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    values = diagnosis.table(keys, coarse, returns, torch.tensor([0, 2]), torch.tensor([0, 1]), 2.0)
    # Means of the coarse keys: (2 + 2 x 0.5) / 4 and (0 + 2 x 0.5) / 4; key 0: (2 + 2 x 0.75) / 4.
    assert values.tolist() == pytest.approx([0.875, 0.25])


def test_a_constant_explains_nothing(diagnosis: ModuleType) -> None:
    assert diagnosis.ev(torch.full((4,), 0.3), torch.tensor([0.0, 1.0, 1.0, 0.0])) == 0.0


def test_auc_counts_pairs_within_groups_and_ties_as_half(diagnosis: ModuleType) -> None:
    scores = torch.tensor([0.1, 0.9, 0.5, 0.5, 9.0])
    labels = torch.tensor([0, 1, 1, 0, 0])
    groups = torch.tensor([0, 0, 0, 0, 1])
    # Pairs (positive, negative) of group 0: 0.9 over 0.1 and 0.5, 0.5 over 0.1, 0.5 ties with 0.5. Group 1 has no pair.
    assert diagnosis.auc(scores, labels, groups) == pytest.approx(3.5 / 4)


def test_the_error_of_a_ratio_treats_prompts_as_units(diagnosis: ModuleType) -> None:
    parts, wholes = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    once = diagnosis.ratio_error(parts, wholes, torch.tensor([0, 1]))
    repeated = diagnosis.ratio_error(parts.repeat(9), wholes.repeat(9), torch.tensor([0, 1]).repeat(9))
    assert once == repeated == pytest.approx(0.5**0.5 / 2, abs=1e-4)


def test_a_probe_finds_a_linear_feature(diagnosis: ModuleType) -> None:
    features = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    labels = features[:, 1] > 0.2
    logits = diagnosis.logistic(features[:300], labels[:300], features[300:])
    assert ((logits > 0) == labels[300:]).float().mean() > 0.95
    assert (
        diagnosis.ev(diagnosis.least_squares(features[:300], 2 * features[:300, 0] + 1, features[300:]), features[300:, 0] * 2 + 1) > 0.999
    )
