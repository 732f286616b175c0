"""Megatron-Core models of policy and critic: building, forward and training steps, optimizer, offloading; on GPUs or on CPU."""
