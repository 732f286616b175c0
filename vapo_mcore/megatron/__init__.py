"""Megatron-Core models for policy and critic: one engine, on CUDA devices or, for development and tests, on CPU."""
