"""Convert weights between Hugging Face and Megatron-Core: mapping rules, streaming readers and writers, loading, export.

Loading, export, weight sync with the rollout engine and offline conversion all use the same declarative rules (``families.py``).
``rules`` and ``families`` are pure; ``reader`` and ``writer`` handle files; ``loader`` and ``export`` handle Megatron models; ``sync``
sends the policy's weights to the rollout engine.
"""
