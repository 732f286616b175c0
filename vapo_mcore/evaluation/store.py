"""Store the responses of an evaluation on disk, so that a killed evaluation continues where it stopped.

<output>/responses.jsonl   one record per response, in the order of the evaluation
<output>/progress.jsonl    the identity of the evaluation, then one line per complete chunk

The records of a chunk are on disk before its line in ``progress.jsonl``. After a kill, records behind the last complete chunk are truncated
and the chunk starts over: its batches, and with them the last bits of log-probs, are those of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vapo_mcore.errors import ConfigError
from vapo_mcore.evaluation.statistics import Record

RESPONSES, PROGRESS = "responses.jsonl", "progress.jsonl"
RECORDS = 2
"""Format version of the records; an evaluation with another version cannot be continued."""


@dataclass(frozen=True)
class Chunk:
    """A complete part of the evaluation: its end in ``responses.jsonl``, in bytes, and its seconds by phase."""

    end: int
    seconds: dict[str, float]


class ResponseStore:
    """Appends chunks of records. Only one process may use it."""

    def __init__(self, folder: Path, chunks: list[Chunk]) -> None:
        self.folder = folder
        self.chunks = chunks

    @classmethod
    def open(cls, folder: str | Path, identity: dict[str, Any], *, clean: bool) -> ResponseStore:
        """Open the store of an evaluation with the same ``identity`` (plain JSON values), or create one.

        Raises:
            ConfigError: the folder holds other files, another evaluation (the message names the differences) or damaged files, or
                cannot be written.
        """
        folder = Path(folder)
        try:
            if clean and (folder / PROGRESS).is_file():
                shutil.rmtree(folder)
            if folder.is_dir() and any(folder.iterdir()):
                return cls(folder, _continued(folder, identity))
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RESPONSES).touch()
            _append(folder / PROGRESS, json.dumps({"evaluation": identity}) + "\n")
        except OSError as error:
            raise ConfigError(f"--output {str(folder)!r} cannot be used: {error.strerror or error}") from error
        return cls(folder, [])

    def append(self, records: Sequence[Record], seconds: dict[str, float]) -> None:
        """Append a complete chunk. Raises ConfigError if it cannot be written."""
        text = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        try:
            end = _append(self.folder / RESPONSES, text)
            _append(self.folder / PROGRESS, json.dumps({"chunk": len(self.chunks), "end": end, "seconds": seconds}) + "\n")
        except OSError as error:
            raise ConfigError(f"{self.folder / RESPONSES} cannot be written: {error.strerror or error}") from error
        self.chunks.append(Chunk(end, seconds))

    def records(self) -> list[dict[str, Any]]:
        """Return all records of complete chunks, in order."""
        with open(self.folder / RESPONSES, encoding="utf-8", errors="surrogatepass") as lines:
            return [json.loads(line) for line in lines]


def _append(path: Path, text: str) -> int:
    """Append, fsync, and return the file's new size. Keeps lone surrogates, which a broken tokenizer may decode to."""
    with open(path, "ab") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _continued(folder: Path, identity: dict[str, Any]) -> list[Chunk]:
    if not (folder / PROGRESS).is_file():
        raise ConfigError(f"--output {str(folder)!r} holds files that are not an evaluation; nothing was touched, give another folder")
    lines = (folder / PROGRESS).read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):  # written incompletely
        lines.pop()
    if not lines:  # killed before anything was evaluated
        (folder / PROGRESS).write_text(json.dumps({"evaluation": identity}) + "\n", encoding="utf-8")
        lines = (folder / PROGRESS).read_bytes().splitlines(keepends=True)
    try:
        before, *entries = [json.loads(line) for line in lines]
        chunks = [Chunk(int(entry["end"]), entry["seconds"]) for entry in entries]
        before = before["evaluation"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / PROGRESS} is damaged ({error!r}); give another --output, or --clean to start again") from error
    changed = [key for key in sorted(before.keys() | identity.keys()) if before.get(key) != identity.get(key)]
    if changed:
        shown = "; ".join(f"{key} was {_short(before.get(key))}, now it is {_short(identity.get(key))}" for key in changed)
        raise ConfigError(f"--output {str(folder)!r} holds another evaluation: {shown}. Give another folder, or --clean to start again")
    end = chunks[-1].end if chunks else 0
    responses = folder / RESPONSES
    size = responses.stat().st_size if responses.is_file() else -1
    if size < end:
        raise ConfigError(f"{responses} is shorter than {PROGRESS} says; give another --output, or --clean to start again")
    if size < 0:
        responses.touch()
    os.truncate(responses, end)
    (folder / PROGRESS).write_bytes(b"".join(lines))
    return chunks


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
