"""Prompts, ragged rollout batches, packing under a token cap, and the THD layout that Megatron sees."""
