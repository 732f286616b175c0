"""Experience for training: sampling, grading, batches, evaluation."""
