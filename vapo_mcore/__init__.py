"""Reinforcement-learning training of language models with VAPO, PPO, GRPO, DAPO and related algorithms.

Megatron-Core trains the policy and the critic, vLLM samples the responses. Importing this package imports neither torch nor Megatron.
"""

__version__ = "0.1.0"
