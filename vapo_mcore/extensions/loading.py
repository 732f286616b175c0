"""Import of the function that a reference names: ``package.module:name`` or ``path/to/file.py:name``. All user code is loaded here."""

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
    """Return the function that ``reference`` names. The import executes the module's code with the permissions of the user.

    A file is imported once per process, under a unique module name. A relative path is resolved against the current directory.

    Raises:
        ConfigError: ``reference`` is malformed, the module, file, or function does not exist, or the import failed (with the line).
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
    except Exception as error:  # user code may raise any exception
        raise _import_error(name, error) from error


def _load_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    name = f"vapo_mcore_extension_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not resolved.is_file():
        raise ConfigError(f"no such file: {str(path)!r} (relative paths start at {str(Path.cwd())!r})")
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None, "a file name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before the code is executed: dataclasses and pickle look the module up
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
    """Return the type and message of an exception raised in user code, with its innermost file and line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = [frame for frame in frames if frame.filename != __file__]
    line = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{line}"
