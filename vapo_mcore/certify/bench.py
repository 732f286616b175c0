"""What the checks measure on: texts, prepared before the first check, and the parts of a run, each built when a check first asks for it,
the rollout engine before the models."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.certify.memory import release_free_memory
from vapo_mcore.certify.record import NotApplicable
from vapo_mcore.collectives import all_gather_objects, fail_together, world
from vapo_mcore.config.architecture import ModelArchitecture, read_architecture
from vapo_mcore.config.schema import Config
from vapo_mcore.data.chat_template import chat_tokenizer
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.prompts import Prompt, PromptDataset, load_prompts
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.data.tokenizer import load_tokenizer, unknown_token_ids
from vapo_mcore.errors import DataError, VapoError
from vapo_mcore.megatron.model import DTYPES
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.megatron.roles import Models
from vapo_mcore.records.console import Console
from vapo_mcore.rewards import VerifierPool, check_verifier_names
from vapo_mcore.rollout.base import EngineState, RolloutEngine
from vapo_mcore.trainer.main import build_engine, start_verifiers
from vapo_mcore.trainer.models import build_models
from vapo_mcore.weights.sync import WeightSync

MOST_SEQUENCES, MOST_TOKENS = 6, 96
"""Fixed texts that trainer, engine and transformers are compared on, and tokens of each: their full distributions are kept in memory."""
MEETING_SECONDS = 600.0
"""How long a rank waits for the others where a part is built: longer than one works alone between two collectives."""
_T = TypeVar("_T")
_benches = itertools.count()


def meet(key: str, name: str) -> None:
    """Return when all ranks are here. Raises RuntimeError where others ask for another part, or have not come after ``MEETING_SECONDS``: a
    check that asks for ``bench.<name>`` on one rank only would block in its collectives, the other ranks in theirs."""
    rank, size = world()
    if size == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    keys = [f"{key}/{number}" for number in range(size)]
    store.set(keys[rank], name)
    try:
        store.wait(keys, timedelta(seconds=MEETING_SECONDS))
    except dist.DistStoreError:
        missing = [number for number, other in enumerate(keys) if not store.check([other])]
        store.delete_key(keys[rank])
        raise RuntimeError(
            f"rank {rank} asks for bench.{name}, which all ranks build together, but ranks {missing} have not for {MEETING_SECONDS:g} s: "
            "ask for it on every rank, before the part that one rank does alone"
        ) from None
    names = [store.get(other).decode() for other in keys]
    if len(set(names)) > 1:
        raise RuntimeError(f"the ranks ask for different parts of the bench at the same time: {', '.join(names)}")


class Bench:
    """Parts of a run for the checks.

    Making one is a collective, which prepares everything that is no model: ``tokenizer``, ``prompts``, ``sequences`` and the like can be
    read on any rank alone. What is built at first use (``engine``, ``models``, ``sync``, ``verifiers``) all ranks must ask for together,
    which is checked. Other methods are collectives, unless they say otherwise.

    Args:
        scratch: folder for files of a check, on a file system that all ranks see; deleted at the end.
        stack: closes what was opened.
    """

    def __init__(self, config: Config, parallel: ParallelContext, console: Console, stack: ExitStack, scratch: Path) -> None:
        self.config = config
        self.parallel = parallel
        self.console = console
        self.stack = stack
        self.scratch = scratch
        self.details: dict[str, Any] = {}  # of the check that runs
        self._failed: dict[str, VapoError] = {}
        self._number, self._meetings = next(_benches), 0
        stack.callback(lambda: shutil.rmtree(scratch, ignore_errors=True) if parallel.rank == 0 else None)
        self._prepared: dict[str, Any] = {}
        for name, make in (
            ("architecture", self._read_architecture),
            ("tokenizer", self._load_tokenizer),
            ("unknown_token_ids", self._find_unknown_token_ids),
            ("prompts", self._load_prompts),
            ("sequences", self._make_sequences),
        ):
            try:
                self._prepared[name] = make()
            except VapoError as error:
                self._failed[name] = error

    def begin_check(self) -> None:
        """Forget the details of the check before. No collective."""
        self.details = {}

    def _of(self, name: str) -> Any:
        """Return a part prepared earlier; if preparing it failed, raise that error each time."""
        if name in self._failed:
            raise self._failed[name]
        return self._prepared[name]

    def _once(self, name: str, build: Callable[[], _T]) -> _T:
        """Return the result of ``build``, called once; if it raised, raise the same error again."""
        if name in self._failed:
            raise self._failed[name]
        meet(f"certify/{self._number}/{self._meetings}", name)
        self._meetings += 1
        try:
            return build()
        except VapoError as error:
            self._failed[name] = error
            raise

    @property
    def dtype(self) -> str:
        return self.config.model.dtype

    @property
    def architecture(self) -> ModelArchitecture:
        return self._of("architecture")  # type: ignore[no-any-return]

    def _read_architecture(self) -> ModelArchitecture:
        with fail_together():
            return read_architecture(self.config.model.path)

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer with the recipe's chat template."""
        return self._of("tokenizer")

    def _load_tokenizer(self) -> Any:
        with fail_together():
            return chat_tokenizer(self.config.model.path, self.config.data)

    @property
    def unknown_token_ids(self) -> tuple[int, ...]:
        """Ids of the model that its tokenizer lacks."""
        return self._of("unknown_token_ids")  # type: ignore[no-any-return]

    def _find_unknown_token_ids(self) -> tuple[int, ...]:
        with fail_together():
            return unknown_token_ids(load_tokenizer(self.config.model.path), self.architecture.vocab_size)

    @property
    def prompts(self) -> PromptDataset:
        """Return the training prompts."""
        return self._of("prompts")  # type: ignore[no-any-return]

    def _load_prompts(self) -> PromptDataset:
        with fail_together():
            found = load_prompts(self.config.data, self.tokenizer, seed=self.config.seed, splits=("train",))["train"]
            check_verifier_names(sorted({prompt.verifier for prompt in found.items}))
        if len(set(all_gather_objects(found.fingerprint))) > 1:
            raise DataError("data.train: the prompts are not the same on all ranks")
        return found

    @cached_property
    def engine(self) -> RolloutEngine:
        """Return the rollout engine; a new one is asleep."""
        return self._once("engine", lambda: build_engine(self.config, self.parallel, self.tokenizer, training=False))

    @cached_property
    def models(self) -> Models:
        """Policy, critic and reference, off the device where the recipe offloads."""

        def build() -> Models:
            if "engine" not in self._failed:
                try:  # first: vLLM sizes its memory on an empty device
                    _ = self.engine
                except VapoError:
                    self.console.print("note: the rollout engine cannot be built; checks that do not need it continue")
            return build_models(self.config, self.parallel, self.console.print)

        return self._once("models", build)

    @cached_property
    def sync(self) -> WeightSync:
        """Return the weight sync of training, which compares the weights that the engine received with the policy's."""
        return self._once(
            "sync", lambda: WeightSync(self.models.policy, self.ready_to_use(self.engine), self.models.residency, verify=True)
        )

    def forget_models(self) -> None:
        """Let go of models that a check has trained; the next one that asks for them gets new ones. No collective."""
        self.__dict__.pop("sync", None)
        models: Models | None = self.__dict__.pop("models", None)
        if models is not None:
            models.residency.pool.clear()
        del models
        release_free_memory()

    def forget_engine(self) -> None:
        """Shut the rollout engine down for a check that needs its memory; the next one that asks for it gets a new one. A collective."""
        self.__dict__.pop("sync", None)
        engine: RolloutEngine | None = self.__dict__.pop("engine", None)
        if engine is not None:
            engine.discard()
        release_free_memory()

    @cached_property
    def verifiers(self) -> VerifierPool | None:
        """The graders of the recipe's data, as many processes as a replica has in a run; None on ranks other than 0."""
        names = sorted({prompt.verifier for prompt in self.prompts.items})
        return self._once("verifiers", lambda: start_verifiers(self.config, self.parallel.rank == 0, self.stack, names))

    @staticmethod
    def ready_to_use(engine: RolloutEngine) -> RolloutEngine:
        """Raise NotApplicable on all ranks where an earlier check left the engine broken on any."""
        if any(all_gather_objects(engine.state is EngineState.BROKEN)):
            raise NotApplicable("the rollout engine broke in an earlier check")
        return engine

    def sync_weights(self) -> None:
        """Load the policy's current weights into the engine and compare them; the engine can then generate."""
        sync = self.sync
        self.ready_to_use(self.engine)
        sync.put_to_sleep()
        sync.run()

    @contextmanager
    def on_device(self, stage: Any) -> Iterator[Models]:
        """Put a stage's parts of the models on the device, with the engine asleep; move all of them off it at the end."""
        models = self.models
        if "sync" in self.__dict__:
            self.sync.put_to_sleep()
        models.residency.enter(stage)
        try:
            yield models
        finally:
            models.residency.enter("generate")

    # --------------------------------------------------------------------------------------------------------- fixed texts

    @property
    def sequences(self) -> list[list[int]]:
        """Fixed texts as token ids: the first prompts with their ground truth, and ids spread over the vocabulary."""
        return self._of("sequences")  # type: ignore[no-any-return]

    def _make_sequences(self) -> list[list[int]]:
        longest = min(MOST_TOKENS, self.config.max_sequence_length - 1)
        found = []
        try:
            for prompt in self.prompts.items[:MOST_SEQUENCES]:
                answer = self.tokenizer(prompt.ground_truth, add_special_tokens=False)["input_ids"]
                found.append([*prompt.token_ids, *answer[: longest // 2]][-longest:])
        except VapoError as error:
            self.console.print(f"note: texts are drawn token ids, since the data cannot be used: {error}")
        return [ids for ids in found if len(ids) > 1] + self.drawn([longest] * 2)

    def drawn(self, lengths: Sequence[int]) -> list[list[int]]:
        """Sequences of ids spread over the tokenizer's part of the vocabulary. No collective."""
        known = sorted(set(range(self.architecture.vocab_size)) - set(self.unknown_token_ids))
        return [[known[(7919 * (row + 1) * (position + 1)) % len(known)] for position in range(count)] for row, count in enumerate(lengths)]

    def microbatches(
        self,
        sequences: Sequence[Sequence[int]],
        packs: Sequence[Sequence[int]] | None = None,
        parallel: ParallelContext | None = None,
        *,
        shared: bool = False,
    ) -> list[MicroBatch]:
        """The sequences as micro-batches of tokens, the same on all data-parallel ranks; ``packs``: numbers of the sequences in each
        (None: each alone); ``parallel``: of another layout than the recipe's; ``shared``: the data-parallel ranks take packs in turn, as
        many each. Dummies fill up what that and a pipeline schedule need. No collective."""
        parallel = parallel or self.parallel
        chosen = [[number] for number in range(len(sequences))] if packs is None else [list(pack) for pack in packs]
        if shared:
            ranks = parallel.data_parallel_size
            chosen += [[] for _ in range(-len(chosen) % ranks)]
            chosen = chosen[parallel.data_parallel_rank :: ranks]
        group = max(parallel.microbatch_group, parallel.pipeline_model_parallel_size if parallel.microbatch_group > 1 else 1)
        chosen += [[] for _ in range(-len(chosen) % group)]
        return [_microbatch(sequences, numbers, parallel) for numbers in chosen]

    def trainer_distributions(self, texts: Sequence[int] | None = None) -> list[Tensor]:
        """The policy's log-probs on the fixed texts with these numbers (None: on all), float32 [len - 1, vocab_size] each, on the host."""
        sequences = self.sequences if texts is None else [self.sequences[number] for number in texts]
        with self.on_device("logprobs") as models:
            found = models.policy.distributions(self.microbatches(sequences))
        return [part[:-1].cpu() for part in found[: len(sequences)]]

    def checked_prompts(self, count: int) -> list[Prompt]:
        """``count`` training prompts, spread evenly over the data; all of them where there are fewer."""
        items = self.prompts.items
        count = min(count, len(items))
        return [items[number * len(items) // count] for number in range(count)]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def _microbatch(sequences: Sequence[Sequence[int]], numbers: list[int], parallel: ParallelContext) -> MicroBatch:
    layout = ThdLayout(
        [len(sequences[number]) for number in numbers],
        context_parallel_size=parallel.context_parallel_size,
        context_parallel_rank=parallel.context_parallel_rank,
        tensor_parallel_size=parallel.tensor_model_parallel_size,
        device=parallel.device,
    )
    tokens = torch.tensor([token for number in numbers for token in sequences[number]], dtype=torch.int64, device=parallel.device)
    return MicroBatch(layout, torch.tensor(numbers, dtype=torch.int64), {"tokens": tokens})
