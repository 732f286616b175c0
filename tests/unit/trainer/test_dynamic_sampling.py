"""Which groups are kept, how many prompts further rounds draw, and that rounds are bounded."""

from vapo_mcore.experience.dynamic_sampling import GroupCollector, is_uniform

T, F = True, False


def test_uniform_by_raw_verdicts_of_graded_responses():
    assert is_uniform([T, T], [T, T])
    assert is_uniform([F, F], [T, T])
    assert not is_uniform([T, F], [T, T])
    assert is_uniform([T, F], [T, F])  # the wrong one was not graded
    assert is_uniform([F, F], [F, F])
    assert is_uniform([T], [T])


def test_all_wrong_data_takes_exactly_the_allowed_rounds():
    collector = GroupCollector(target=4, max_rounds=3)
    draws = []
    while (draw := collector.next_draw()) > 0:
        draws.append(draw)
        collector.add_round([[F, F]] * draw, [[T, T]] * draw)
    assert draws == [4, 4, 4]
    assert collector.exhausted
    assert (collector.tried, collector.all_wrong, collector.all_right, collector.missing) == (12, 12, 0, 4)


def test_full_after_one_round_draws_no_more():
    collector = GroupCollector(target=2, max_rounds=3)
    collector.add_round([[T, F], [F, T]], [[T, T]] * 2)
    assert collector.next_draw() == 0
    assert not collector.exhausted
    assert collector.kept == [(0, 0), (0, 1)]


def test_missing_groups_are_drawn_by_the_acceptance_seen_and_surplus_is_counted():
    collector = GroupCollector(target=4, max_rounds=3)
    collector.add_round([[T, F], [T, T], [F, F], [F, T]], [[T, T]] * 4)
    assert collector.missing == 2
    assert collector.next_draw() == 4  # half were accepted
    collector.add_round([[T, T], [T, F], [F, T], [T, F]], [[T, T]] * 4)
    assert collector.kept == [(0, 0), (0, 3), (1, 1), (1, 2)]
    assert (collector.surplus, collector.all_right, collector.all_wrong) == (1, 2, 1)
    assert collector.next_draw() == 0


def test_a_group_without_a_verdict_is_neither_right_nor_wrong():
    collector = GroupCollector(target=2, max_rounds=1)
    collector.add_round([[F, F], [F, F], [T, F]], [[F, F], [T, F], [T, F]])
    assert (collector.ungraded, collector.all_wrong, collector.all_right, collector.kept) == (1, 1, 1, [])


def test_groups_that_differ_in_partial_credit_only_are_kept_by_their_scores():
    verdicts, graded, scores = (
        [[F, F], [F, F], [T, T], [F, F]],
        [[T, T], [T, T], [T, T], [T, F]],
        [[0.2, 0.7], [0.5, 0.5], [1.0, 1.0], [0.1, 0.9]],
    )
    collector = GroupCollector(target=4, max_rounds=1)
    collector.add_round(verdicts, graded, scores)
    assert collector.kept == [(0, 0)]
    assert (collector.all_wrong, collector.all_right) == (2, 1)
    by_verdict = GroupCollector(target=4, max_rounds=1)
    by_verdict.add_round(verdicts, graded)
    assert by_verdict.kept == []
