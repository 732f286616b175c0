"""The trainer's policy into the rollout engine: wake its weights, stream HF tensors in buckets, wake its KV cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from vapo_mcore.collectives import all_gather_objects, fail_together
from vapo_mcore.errors import RolloutError
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.rollout.base import EngineState, RolloutEngine, SyncReport
from vapo_mcore.rollout.weight_stream import listed
from vapo_mcore.weights.checksums import tensor_checksum
from vapo_mcore.weights.export import Exporter


class WeightSync:
    """Keeps the exporter (its manifest is exchanged once) and moves the engine through its states."""

    def __init__(self, policy: MegatronModel, engine: RolloutEngine, *, verify: bool) -> None:
        self.exporter = Exporter(policy.chunks, policy.architecture, policy.parallel, role="policy")
        self.engine = engine
        self.verify = verify

    def make_ready(self, after_loading: Callable[[], None]) -> SyncReport:
        """Give the sleeping engine the policy's present weights; a collective. It can generate afterwards.

        ``after_loading`` is called before the engine takes memory for its KV cache: the policy can leave the device there.

        With ``verify`` the checksums of all tensors as the loader received them must be those of a second export of the policy,
        made after loading, and the same on all ranks (every rank is given the full tensors), and the engine's own parameters, where it
        keeps them readable, must have the values of that export. Raises RolloutError if they do not.
        """
        self.engine.wake_weights()
        report = self.engine.update_weights(self.exporter.buckets(), self.exporter.names, checksum=tensor_checksum if self.verify else None)
        if report.checksums is not None:
            policy, unlike = {}, []
            for bucket in self.exporter.buckets():
                for name, tensor in bucket:
                    policy[name] = tensor_checksum(tensor)
                    if self.engine.holds(name, tensor) is False:
                        unlike.append(name)
                del bucket, tensor  # before the next one is made
            self._compare(report.checksums, policy, unlike)
        after_loading()
        self.engine.wake_kv_cache()
        return report

    def put_to_sleep(self) -> None:
        """Free the engine's memory for training; its weights are about to be replaced."""
        if self.engine.state not in (EngineState.ASLEEP, EngineState.BROKEN):
            self.engine.sleep()

    def end_for_good(self) -> None:
        """Free the engine's memory where nothing is generated any more; a collective. One that is broken on any rank is ended on all."""
        if any(all_gather_objects(self.engine.state is EngineState.BROKEN)):
            self.engine.discard()
        else:
            self.put_to_sleep()

    @staticmethod
    def _compare(received: dict[str, str], policy: dict[str, str], unlike: list[str]) -> None:
        """Raise on all ranks what is wrong on any of them; a collective."""
        with fail_together():
            different = sorted(name for name in received.keys() | policy.keys() if received.get(name) != policy.get(name))
            if different:
                raise RolloutError(f"weight sync: the loader received other values than the policy has, in {listed(different)}")
            if unlike:
                raise RolloutError(f"weight sync: the rollout engine holds other values than it was given, in {listed(unlike)}")
        text = "\n".join(f"{name} {value}" for name, value in sorted(received.items()))
        digests = all_gather_objects(hashlib.sha256(text.encode()).hexdigest())
        ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if ranks:
            raise RolloutError(f"weight sync: ranks {ranks} received other weights than rank 0 (checksums of the tensors differ)")
