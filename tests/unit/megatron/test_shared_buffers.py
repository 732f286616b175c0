"""Device memory that Megatron-Core keeps between passes: rotary tables and the buffers of sequence parallelism's gathers."""

from __future__ import annotations

from dataclasses import replace

import torch

from vapo_mcore.config.schema import ModelConfig, ParallelConfig
from vapo_mcore.megatron.host import import_megatron, megatron_scope
from vapo_mcore.megatron.model import build_chunks
from vapo_mcore.megatron.offload import Residency
from vapo_mcore.megatron.rope import RotaryTable
from vapo_mcore.planning.catalog import find_architecture
from vapo_mcore.planning.measure import META, pipeline_rank


def test_one_rotary_table_holds_the_angles_of_every_length() -> None:
    import_megatron()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    with megatron_scope():
        rotary = RotaryEmbedding(kv_channels=8, rotary_percent=1.0, rotary_base=10000)
        table = RotaryTable(rotary.get_emb)
        for length, longest in ((5, 5), (3, 5), (9, 9), (9, 9), (2, 9)):
            found = table(length, packed_seq=True)
            assert torch.equal(found, rotary(length, packed_seq=True))
            assert found.untyped_storage().nbytes() == longest * 8 * 4


def test_models_use_it() -> None:
    arch = replace(find_architecture("qwen2.5-0.5b"), num_layers=1)
    with pipeline_rank(ParallelConfig(), 0) as parallel:
        (chunk,) = build_chunks("policy", arch, ModelConfig(path="unused"), parallel, device=META)
        with megatron_scope(META):
            tables = {chunk.rotary_pos_emb(length, packed_seq=True).untyped_storage()._cdata for length in (64, 3, 17)}
    assert len(tables) == 1


def test_entering_a_stage_frees_the_gather_buffers() -> None:
    import_megatron()
    from megatron.core import parallel_state

    Residency(enabled=True).enter("generate")  # before there are process groups
    parallel_state._set_global_memory_buffer()
    try:
        buffers = parallel_state.get_global_memory_buffer()
        for enabled, left in ((False, 1), (True, 0)):
            with megatron_scope():
                buffers.get_tensor((4, 8), torch.float32, "mpu")
            Residency(enabled=enabled).enter("generate")
            assert len(buffers.buffer) == left
    finally:
        parallel_state.destroy_global_memory_buffer()
