"""The responses on disk: an evaluation killed at any byte goes on at its last complete chunk, another one is refused."""

import json

import pytest

from vapo_mcore.errors import ConfigError
from vapo_mcore.evaluation.store import PROGRESS, RESPONSES, ResponseStore

IDENTITY = {"seed": 1, "prompts": "abc"}
CHUNKS = [[{"id": 1, "text": "ä\n\u2028"}, {"id": 2}], [{"id": 3}], [{"id": 4}, {"id": 5}]]


def written(folder, chunks):
    store = ResponseStore.open(folder, IDENTITY, clean=False)
    for chunk in chunks:
        store.append(chunk, {"total": 1.5})
    return store


def test_what_was_written_is_read(tmp_path):
    store = written(tmp_path / "new" / "e", CHUNKS)
    assert store.records() == [row for chunk in CHUNKS for row in chunk]
    again = ResponseStore.open(tmp_path / "new" / "e", IDENTITY, clean=False)
    assert (again.records(), again.chunks) == (store.records(), store.chunks)


def test_killed_at_any_byte_it_goes_on_at_the_last_complete_chunk(tmp_path):
    whole = written(tmp_path / "whole", CHUNKS)
    responses, progress = ((whole.folder / name).read_bytes() for name in (RESPONSES, PROGRESS))
    ends = [0, *(chunk.end for chunk in whole.chunks)]
    lines = progress.splitlines(keepends=True)
    # The order of writing: progress' head, then for each chunk its records and its line.
    states = [(0, size) for size in range(len(lines[0]) + 1)]
    for number in range(len(CHUNKS)):
        head = len(b"".join(lines[: number + 1]))
        states += [(size, head) for size in range(ends[number], ends[number + 1])]
        states += [(ends[number + 1], head + size) for size in range(len(lines[number + 1]) + 1)]
    for number, (first, second) in enumerate(states):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / RESPONSES).write_bytes(responses[:first])
        (folder / PROGRESS).write_bytes(progress[:second])
        store = ResponseStore.open(folder, IDENTITY, clean=False)
        assert len(store.chunks) == max(0, progress[:second].count(b"\n") - 1)
        for chunk in CHUNKS[len(store.chunks) :]:
            store.append(chunk, {"total": 1.5})
        assert (folder / RESPONSES).read_bytes() == responses
        assert (folder / PROGRESS).read_bytes() == progress


def test_another_evaluation_is_refused_with_what_differs(tmp_path):
    written(tmp_path, CHUNKS[:1])
    with pytest.raises(ConfigError, match=r"holds another evaluation: more was null, now it is true; seed was 1, now it is 2\. Give"):
        ResponseStore.open(tmp_path, {**IDENTITY, "seed": 2, "more": True}, clean=False)
    assert ResponseStore.open(tmp_path, {**IDENTITY, "seed": 2}, clean=True).records() == []


@pytest.mark.parametrize("clean", [False, True])
def test_a_folder_of_other_things_is_never_touched(tmp_path, clean):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files that are not an evaluation; nothing was touched"):
        ResponseStore.open(tmp_path, IDENTITY, clean=clean)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_damage_is_told(tmp_path):
    written(tmp_path, CHUNKS)
    (tmp_path / RESPONSES).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is shorter than progress\.jsonl says"):
        ResponseStore.open(tmp_path, IDENTITY, clean=False)
    (tmp_path / PROGRESS).write_text(json.dumps({"other": 1}) + "\n")
    with pytest.raises(ConfigError, match=r"progress\.jsonl is damaged \(KeyError"):
        ResponseStore.open(tmp_path, IDENTITY, clean=False)


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        ResponseStore.open(tmp_path / "file" / "e", IDENTITY, clean=False)
