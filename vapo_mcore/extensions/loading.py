"""Importing what a reference names: ``package.module:name`` or ``path/to/file.py:name``. The one way in which a user's code comes in."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from vapo_mcore.config.references import is_file_reference, reference_fault
from vapo_mcore.errors import ConfigError


def load_function(reference: str) -> Callable[..., Any]:
    """The function that ``reference`` names. Importing runs the module's code, with all rights of the user.

    A file is imported once a process, whatever it is called by, under a name of its own; a relative path starts at the current
    directory.

    Raises:
        ConfigError: the form is wrong, there is no such module, file or function, or the import failed (with the line).
    """
    fault = reference_fault(reference)
    if fault is not None:
        raise ConfigError(fault)
    place, _, name = reference.rpartition(":")
    module = _load_file(Path(place)) if is_file_reference(reference) else _load_module(place)
    function = getattr(module, name, None)
    if function is None:
        defined = sorted(
            key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == module.__name__
        )
        raise ConfigError(f"{place} has no function {name!r}; it defines {', '.join(defined) or 'none'}")
    if not callable(function):
        raise ConfigError(f"{reference} is {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a user's module raises
        raise _import_error(name, error) from error


def _load_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    name = f"vapo_mcore_extension_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not resolved.is_file():
        raise ConfigError(f"no such file: {str(path)!r} (relative paths start at {str(Path.cwd())!r})")
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before its code runs: dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise _import_error(str(path), error) from error
    return module


def _import_error(place: str, error: Exception) -> ConfigError:
    return ConfigError(f"{place} cannot be imported: {describe(error)}")


def describe(error: Exception) -> str:
    """Type and message of an exception of a user's code, with the innermost line of it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = [frame for frame in frames if frame.filename != __file__]
    line = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{line}"
