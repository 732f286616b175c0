"""Data: reading prompts, ragged rollout batches, packing into micro-batches under a token cap, and Megatron's THD layout."""
