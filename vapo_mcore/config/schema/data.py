"""Prompts and evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from vapo_mcore.config.schema.base import (
    Fraction,
    Name,
    NonNegativeInt,
    Path,
    PositiveFloat,
    PositiveInt,
    Reference,
    Section,
    Seed,
    greedy_or_sampled,
    known_verifier,
)


class FieldsConfig(Section):
    """Names of the fields of a row. A dotted name refers to a field of a nested object."""

    prompt: str | None = None  # a text or a list of chat messages; null: detected from the column names (data.md)
    answer: str | None = None  # the ground truth, a text or a number; null: detected from the column names
    # Meaning of a ground truth that is a list: any of its answers is right, or all are required; null: such a list is an error.
    answer_list: Literal["any", "all"] | None = None
    id: str | None = None  # null: the row's number
    subsets: tuple[str, ...] = Field(strict=False, default=())  # evaluations also report each value of these fields separately


class FileSource(Section):
    """Prompts with ground truth from a ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` file, or a saved HF dataset."""

    kind: Literal["file"]  # type of the source
    path: Path  # file, or folder written by datasets' save_to_disk; relative to the current directory
    # Name in metrics and prompt ids; default: the file name without its extension.
    name: Name = Field(default_factory=lambda data: data["path"].replace("\\", "/").rsplit("/", 1)[-1].split(".")[0])
    verifier: Annotated[str, AfterValidator(known_verifier)]  # a built-in verifier (verifiers.md), or a reference to a user-defined one
    size: PositiveInt | None = None  # use only this many rows, the first ones; null: all
    weight: PositiveFloat = 1.0  # training sources: passes over this source relative to the others
    fields: FieldsConfig = FieldsConfig()


class ReasoningGymSource(Section):
    """A procedural task of the package reasoning-gym, graded by its own scorer."""

    kind: Literal["reasoning_gym"]  # type of the source
    task: Name  # its name in reasoning-gym
    name: Name = Field(default_factory=lambda data: data["task"])  # name in metrics and prompt ids; default: the task
    size: PositiveInt  # number of problems
    seed: Seed = 0  # seed of the problems
    weight: PositiveFloat = 1.0  # as for files
    options: dict[str, Any] = Field({})  # options of the task


class CustomSource(Section):
    """A user-defined task: a function that returns rows with a prompt and its ground truth (extending.md)."""

    kind: Literal["custom"]  # type of the source
    function: Reference  # package.module:name or path/to/file.py:name; only keyword-only parameters
    name: Name = Field(default_factory=lambda data: data["function"].rpartition(":")[2])  # name in metrics; default: the function
    verifier: Annotated[str, AfterValidator(known_verifier)]  # a built-in verifier (verifiers.md), or a reference to a user-defined one
    size: PositiveInt | None = None  # use only this many rows, the first ones; null: all
    answer_list: Literal["any", "all"] | None = None  # as fields.answer_list of files
    weight: PositiveFloat = 1.0  # as for files
    options: dict[str, Any] = Field({})  # its keyword-only parameters


Source = Annotated[FileSource | ReasoningGymSource | CustomSource, Field(discriminator="kind")]


class DataConfig(Section):
    train: tuple[Source, ...] = Field(strict=False, min_length=1)  # training sources
    eval: tuple[Source, ...] = Field(strict=False, default=())  # evaluation sets; empty: no evaluation
    max_prompt_length: PositiveInt  # tokens, chat template included
    overlong_prompts: Literal["refuse", "drop"] = "refuse"  # refuse to start with longer prompts, or drop and count them
    deduplicate: bool = False  # drop and count training prompts that repeat the text of an earlier one
    shuffle: bool = True  # shuffle each pass over a source; false: keep the file's order
    chat_template: bool | Path = True  # true: the tokenizer's; a file: this Jinja template instead; false: a prompt is plain text
    chat_template_kwargs: dict[str, Any] = Field({})  # further template variables, such as enable_thinking: false
    # Names of control tokens such as <|im_end|> in a row's text: refuse the row, or encode them as plain text.
    control_tokens: Literal["refuse", "plain"] = "refuse"
    system_prompt: str | None = None  # a system message before each prompt
    prompt_suffix: str = ""  # appended to each prompt


class EvalConfig(Section):
    """Evaluation on ``data.eval``: avg@k, pass@k and maj@k of ``samples_per_prompt`` responses to each prompt."""

    every_steps: NonNegativeInt = 0  # RL steps between evaluations; 0: only at start and end
    at_start: bool = True  # evaluate before the first step
    at_end: bool = True  # evaluate after the last step
    samples_per_prompt: PositiveInt = 1  # k
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(greedy_or_sampled)] = 1.0  # 0: greedy
    top_p: Fraction = 0.7  # nucleus of evaluations; training samples from the whole distribution
    max_prompts: PositiveInt | None = None  # use only this many prompts of each set, the first ones; null: all
    # Responses that a rollout replica samples at a time; a killed vapo-mcore eval repeats at most this many.
    responses_per_chunk: PositiveInt = 1024
