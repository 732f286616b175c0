"""Rollout engines: sample responses with vLLM inside the training processes, or with transformers on machines without vLLM.

``recovery`` rebuilds an engine that failed. Importing this package imports neither vLLM nor transformers; building an engine does.
"""
