"""``vapo-mcore certify``: whether trainer, rollout engine, critic, graders and machine agree, measured on a recipe before it runs."""
