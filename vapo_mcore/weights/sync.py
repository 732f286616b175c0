"""Send the policy's weights to the rollout engine: wake its weights, stream HF tensors in buckets, wake its KV cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from vapo_mcore.collectives import all_gather_objects, fail_together
from vapo_mcore.errors import RolloutError
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.offload import Residency
from vapo_mcore.rollout.base import EngineState, RolloutEngine, SyncReport
from vapo_mcore.rollout.weight_stream import listed
from vapo_mcore.weights.checksums import tensor_checksum
from vapo_mcore.weights.export import Exporter


class WeightSync:
    """Streams weights to the rollout engine and moves it between its states. Keeps the exporter: its manifest is exchanged only once."""

    def __init__(self, policy: MegatronModel, engine: RolloutEngine, residency: Residency, *, verify: bool) -> None:
        self.exporter = Exporter(policy.chunks, policy.architecture, policy.parallel, role="policy")
        self.engine = engine
        self.residency = residency
        self.verify = verify

    def run(self) -> SyncReport:
        """Load the policy's weights into the sleeping rollout engine and wake it; the policy leaves the device. Collective."""
        self.residency.enter("sync")
        return self.make_ready(after_loading=lambda: self.residency.enter("generate"))

    def make_ready(self, after_loading: Callable[[], None], *, verify: bool | None = None) -> SyncReport:
        """Load the policy's current weights into the sleeping engine and wake it. Collective.

        ``after_loading`` is called before the engine allocates its KV cache, so that the policy can leave the device.

        With ``verify`` (None: as constructed), a second export of the policy is made after loading. The checksums of all tensors that the
        loader received must equal those of this export and be the same on all ranks (every rank receives the full tensors). The engine's
        parameters, where readable, must equal the exported values. Raises RolloutError on any difference.
        """
        checksum = tensor_checksum if (self.verify if verify is None else verify) else None
        self.engine.wake_weights()
        report = self.engine.update_weights(self.exporter.buckets(), self.exporter.names, checksum=checksum)
        if report.checksums is not None:
            policy, different = {}, []
            for bucket in self.exporter.buckets():
                for name, tensor in bucket:
                    policy[name] = tensor_checksum(tensor)
                    if self.engine.holds(name, tensor) is False:
                        different.append(name)
                del bucket, tensor  # free them before the next bucket is built
            self._compare(report.checksums, policy, different)
        after_loading()
        self.engine.wake_kv_cache()
        return report

    def put_to_sleep(self) -> None:
        """Free the engine's memory for training. Its weights are discarded: the next sync replaces them."""
        if self.engine.state not in (EngineState.ASLEEP, EngineState.BROKEN):
            self.engine.sleep()

    def release(self) -> None:
        """Free the engine's memory before the run ends: discard an engine that is broken on any rank, else let it sleep. Collective."""
        if any(all_gather_objects(self.engine.state is EngineState.BROKEN)):
            self.engine.discard()
        else:
            self.put_to_sleep()

    @staticmethod
    def _compare(received: dict[str, str], policy: dict[str, str], in_engine: list[str]) -> None:
        """Raise RolloutError on all ranks if weights differ on any. ``in_engine``: tensors that differ in the engine. Collective."""
        with fail_together():
            different = sorted(name for name in received.keys() | policy.keys() if received.get(name) != policy.get(name))
            if different:
                raise RolloutError(f"weight sync: the loader received values that differ from the policy's, in {listed(different)}")
            if in_engine:
                raise RolloutError(f"weight sync: the rollout engine's weights differ from those it received, in {listed(in_engine)}")
        text = "\n".join(f"{name} {value}" for name, value in sorted(received.items()))
        digests = all_gather_objects(hashlib.sha256(text.encode()).hexdigest())
        ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if ranks:
            raise RolloutError(f"weight sync: ranks {ranks} received weights that differ from rank 0's (checksums of the tensors differ)")
