"""``vapo-mcore certify``: measure, before a recipe runs, whether trainer, rollout engine, critic, graders and machine agree."""
