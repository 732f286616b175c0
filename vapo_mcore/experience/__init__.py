"""Sample and grade responses, and prepare them for training: packed batches, evaluation, dumps of steps and bad batches."""
