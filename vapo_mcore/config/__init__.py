"""Load and check the typed configuration: ``load_config(path, overrides) -> Config``. Imports pydantic and yaml only when used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vapo_mcore.config.loading import config_from_dict, load_config
    from vapo_mcore.config.schema import Config

__all__ = ["Config", "config_from_dict", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "Config":
        from vapo_mcore.config.schema import Config

        return Config
    if name in ("load_config", "config_from_dict"):
        from vapo_mcore.config import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
