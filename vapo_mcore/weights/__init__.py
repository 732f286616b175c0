"""Hugging Face weights in and out of Megatron-Core: mapping rules, streaming readers and writers, loading, export.

The same declarative rules (``families.py``) serve loading, export, weight sync with the rollout engine and the offline
conversion tools. ``rules`` and ``families`` are pure; ``reader`` and ``writer`` know files; ``loader`` and ``export`` know
Megatron models.
"""
