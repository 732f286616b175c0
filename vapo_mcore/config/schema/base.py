"""Define the building blocks of all sections: bounded numbers, names, paths, and the base class."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from vapo_mcore.config.references import reference_fault
from vapo_mcore.config.verifiers import verifier_name_fault

# Upper bounds are those of the libraries: 32 bits for sizes, 63 for seeds.
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]


def greedy_or_sampled(temperature: float) -> float:
    if 0 < temperature < 0.01:
        raise ValueError(f"{temperature} must be 0 (greedy) or at least 0.01")
    return temperature


def known_verifier(name: str) -> str:
    fault = verifier_name_fault(name)
    if fault is not None:
        raise ValueError(fault)
    return name


def well_formed_reference(text: str) -> str:
    fault = reference_fault(text)
    if fault is not None:
        raise ValueError(fault)
    return text


def possible_path(path: str) -> str:
    if not path or "\0" in path:
        raise ValueError(f"{path!r} is not a path")
    return path


SamplingTemperature = Annotated[float, Field(ge=0.01, le=2)]  # range that the rollout engines accept
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Path = Annotated[str, AfterValidator(possible_path)]
Reference = Annotated[str, AfterValidator(well_formed_reference)]  # reference to a user-defined function
Interval = Annotated[tuple[float, float], Field(strict=False)]

Estimator = Literal["gae", "grpo", "grpo_process", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "custom"]
GROUP_ESTIMATORS = ("grpo", "grpo_process", "dr_grpo", "rloo")


class Section(BaseModel):
    """Base of all sections: immutable, without unknown keys, implicit conversions (a number in quotes is an error) or NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
