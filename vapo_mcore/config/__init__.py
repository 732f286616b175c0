"""Load and check the typed configuration: ``load_config(path, overrides) -> Config``. Imports pydantic and yaml only when used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vapo_mcore.config.loading import load_config
    from vapo_mcore.config.schema import Config

__all__ = ["Config", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "Config":
        from vapo_mcore.config.schema import Config

        return Config
    if name == "load_config":
        from vapo_mcore.config.loading import load_config

        return load_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
