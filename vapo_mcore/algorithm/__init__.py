"""The algorithm as pure functions on flat tensors: advantages, losses, KL, reward shaping, replay.

Nothing here knows of Megatron, vLLM, files or the configuration; the only imports are torch, numpy and numba.

Conventions of every function (docs/algorithm.md has the formulas and their sources):

- per-token tensors are flat ``[total]`` over packed sequences; ``cu_seqlens`` ``[n + 1]`` holds the boundaries;
- entry t is about token t: ``logprobs[t]`` is its log-probability, ``values[t]`` is V(s_t), the critic's output one position
  earlier (already shifted), ``rewards[t]`` is what that token earned;
- ``mask[t]`` is True where the token was sampled by the model and is trained on. What stands at a masked position, NaN
  included, has no influence on any result or gradient;
- a response is one sequence of the pack; a response without unmasked tokens is allowed everywhere and does nothing.
"""
