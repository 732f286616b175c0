"""Rollout: responses sampled by vLLM in the training processes, or by transformers where vLLM is not installed.

Importing this package imports neither vLLM nor transformers; that happens when an engine is built.
"""
