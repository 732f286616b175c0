"""The algorithm as pure functions on flat tensors: advantages, losses, KL, reward shaping, replay.

The package does not depend on Megatron, vLLM, files or the configuration; it imports torch, numpy and numba only.

Conventions of every function (docs/algorithm.md has the formulas and their sources):

- Per-token tensors are flat ``[total]`` over packed sequences; ``cu_seqlens`` ``[n + 1]`` holds the boundaries.
- Entry t belongs to token t: ``logprobs[t]`` is its log-probability, ``values[t]`` is V(s_t), the critic's output one position
  earlier (already shifted), ``rewards[t]`` is the reward of that token.
- ``mask[t]`` is True where the model sampled the token and is trained on it. Values at masked positions, NaN included, affect
  neither results nor gradients.
- A response is one sequence of the pack. Every function accepts responses without unmasked tokens; they contribute nothing.
"""
