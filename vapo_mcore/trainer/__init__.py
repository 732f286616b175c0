"""The training loop: sampling, grading, advantages, updates of critic and policy, weight sync, evaluation and records."""
