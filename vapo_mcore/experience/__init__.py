"""Sample and grade responses, and prepare them for training: packed batches, evaluation, step dumps."""
