"""Training checkpoints: asynchronous saving of models, optimizers and state, and resuming a run from one; the best policy's export."""
