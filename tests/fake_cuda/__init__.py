"""A CUDA device without a GPU: real numbers on the CPU, in tensors that say they are on ``cuda:N`` and must be treated accordingly.

``install()``, before anything imports Megatron-Core or this package, makes ``torch.cuda.is_available()`` true. Every Python branch for CUDA
then runs, ours and Megatron-Core's. The device raises where CUDA would, or where CUDA would silently give wrong numbers:

======================================  ==============================================================================================
operators on mixed devices              also ``torch.stack``, ``torch.cat`` of 0-dimensional host tensors; only element-wise operators
                                        take those (``modes.py``)
other devices of the node               a tensor on ``cuda:1`` in the process of ``cuda:0`` (``LOCAL_RANK``)
order                                   reading or overwriting what another stream, an asynchronous copy or an asynchronous collective
                                        may still be writing or reading; memory freed while another stream uses it (``order.py``)
released memory                         operators on tensors whose storage is emptied (offloaded models)
page-locked memory                      overlapping registration, freed without unregistration, unregistered while copies run; a failed
                                        registration leaves an error that the next kernel raises until it is fetched (``runtime.py``)
random numbers                          a host generator for a device tensor and the other way round; host RNG state set on the device
NCCL                                    collectives of host tensors (``collectives.py``); gloo does the work
fork                                    use of the device in a forked child of a process that has used it
======================================  ==============================================================================================

It counts: allocated bytes and their peak (``torch.cuda.memory_allocated()`` and friends; ``live()`` lists who holds them) and
synchronisations between host and device (``SYNCS``).

A whole command runs on it as ``python -m tests.fake_cuda vapo_mcore.cli train FILE rollout.engine=transformers`` (a module or a script,
then its arguments; from the root of the repository); tests use ``fake_cuda=True`` of ``tests/forks.py``. A command that starts its ranks
itself starts them without the device: start them with ``torchrun -m tests.fake_cuda ...``.

It has no kernels of its own: what calls a library's CUDA kernels (Transformer Engine, Triton, vLLM) cannot run on it. Neither does it
know time: rates on it mean nothing.
"""

from __future__ import annotations

from tests.fake_cuda.faults import FAULTS, SYNCS, FakeCudaError, counted_syncs
from tests.fake_cuda.memory import live
from tests.fake_cuda.runtime import install

__all__ = ["FAULTS", "SYNCS", "FakeCudaError", "counted_syncs", "install", "live"]
