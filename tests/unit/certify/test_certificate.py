"""Verdicts and exit codes, certificates on disk, what keeps one from certifying a run, and comparisons with an older one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.torchrun import ROOT
from tests.unit.config_helpers import BASE, write_base, write_model_config
from vapo_mcore.certify import certificate as certificates
from vapo_mcore.certify import runner, tolerances
from vapo_mcore.certify.against import differences
from vapo_mcore.certify.names import BUILT_IN, chosen_checks
from vapo_mcore.certify.record import CheckRecord, Verdict, exit_code, fails, holds, not_applicable, warns
from vapo_mcore.certify.table import lines_of, summary
from vapo_mcore.cli import main
from vapo_mcore.config import Config, load_config
from vapo_mcore.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    write_model_config(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (tmp_path / "base.yaml").write_text(BASE.format(folder=tmp_path))
    return tmp_path


def config_of(folder: Path, *settings: str) -> Config:
    return load_config(folder / "base.yaml", ["run.certify=true", *settings], check_paths=False)


def all_checks(**verdicts: Verdict) -> list[CheckRecord]:
    make = {
        "holds": holds("x", "1"),
        "fails": fails("x", "2 of 3"),
        "warning": warns("x", "?"),
        "not applicable": not_applicable("x", "no"),
    }
    return [CheckRecord(name, [make[verdicts.get(name, "holds")]]) for name in BUILT_IN]


def certify(folder: Path, config: Config, records: list[CheckRecord]) -> Path:
    output = Path(certificates.default_folder(config.run.dir))
    output.mkdir(exist_ok=True)
    return certificates.write(certificates.make(config, records, {"world_size": 1}), output)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (("holds", "not applicable"), 0),
        (("holds", "warning"), 1),
        (("holds", "warning", "fails"), 2),
        (("not applicable",), 1),  # nothing was measured: nothing is certified
        (("not applicable", "information"), 0),
        (("information", "warning"), 1),
        ((), 1),
    ],
)
def test_exit_codes(verdicts: tuple[Verdict, ...], code: int) -> None:
    records = [CheckRecord(str(number), [replace(holds("x", ""), verdict=verdict)]) for number, verdict in enumerate(verdicts)]
    assert exit_code(records) == code
    assert f"exit code {code}" in summary(records)


def test_the_table_shows_remedies_of_what_does_not_hold() -> None:
    record = CheckRecord("engine", [holds("a", "1", "<= 2"), fails("b", "3", "<= 2", "mend it"), not_applicable("c", "there is none")])
    assert record.verdict == "fails"
    text = "\n".join(lines_of(record))
    assert re.search(r"fails +b: 3 \[<= 2\]\n +remedy: mend it\n", text)
    assert "c: because there is none" in text


def test_a_tolerance_is_compared_with_its_limit_and_nan_fails() -> None:
    assert tolerances.judge("x", 9e-5, "trainer/mean", "float32", remedy="r").verdict == "holds"
    assert tolerances.judge("x", 1.1e-4, "trainer/mean", "float32", remedy="r").remedy == "r"
    assert tolerances.judge("x", 1.1e-4, "trainer/mean", "float32", remedy="r", factor=2.0).verdict == "holds"
    assert tolerances.judge("x", float("nan"), "trainer/mean", "float32", remedy="r").verdict == "fails"
    assert tolerances.judge("x", 0.98, "trainer/top1", "float32", remedy="r", factor=9.0).verdict == "fails"


def test_the_page_shows_all_tolerances() -> None:
    text = (ROOT / "docs/certify.md").read_text()
    assert "\n".join(tolerances.markdown()) in text, "run: python -m vapo_mcore.certify.tolerances, and copy the table"
    assert all(f"`{name}`" in text for name in BUILT_IN)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["engin"], "--checks engin: unknown; did you mean 'engine'?"),
        (["engine", "a b:c d"], "--checks a b:c d: 'a b:c d' must be a reference to custom code"),
        ([","], "--checks is empty; there are "),
    ],
)
def test_unknown_checks_are_refused(given: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen_checks(given)
    assert says in str(refused.value)
    assert chosen_checks(["engine, folder", "engine", "own.module:check"]) == ["engine", "folder", "own.module:check"]
    assert chosen_checks(None) == list(BUILT_IN)


def test_a_run_that_requires_a_certificate_needs_a_whole_one(folder: Path) -> None:
    config = config_of(folder)
    with pytest.raises(ConfigError, match="but there is no certificate"):
        certificates.require_certificate(config)
    certify(folder, config, all_checks(critic="not applicable", folder="warning"))
    certificates.require_certificate(config)
    certificates.require_certificate(config_of(folder, "run.steps=9", "eval.every_steps=2"))
    certify(folder, config, all_checks()[1:])
    with pytest.raises(ConfigError, match=f"the check '{next(iter(BUILT_IN))}' was not run"):
        certificates.require_certificate(config)
    certify(folder, config, all_checks(engine="fails"))
    with pytest.raises(ConfigError, match="the check 'engine' fails: x: 2 of 3"):
        certificates.require_certificate(config)
    certificates.require_certificate(config_of(folder, "run.certify=false"))


def test_settings_and_versions_that_changed_since_are_named(folder: Path) -> None:
    config = config_of(folder)
    path = certify(folder, config, all_checks())
    with pytest.raises(ConfigError) as refused:
        certificates.require_certificate(config_of(folder, "rollout.temperature=0.7", "model.dtype=bfloat16"))
    assert "setting changed since: model.dtype: 'float32' -> 'bfloat16'" in str(refused.value)
    assert "setting changed since: rollout.temperature: 1.0 -> 0.7" in str(refused.value)
    content = json.loads(path.read_text())
    content["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"version changed since: torch 1\.0 -> "):
        certificates.require_certificate(config)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"format": 1, "made": "", "versions": {}, "mach', "is not JSON"),
        ("\udcff", "is not JSON"),
        ("[]", "it has no format"),
        ('{"format": 7}', "has format 7, this version reads 1"),
        ('{"format": 1}', "is damaged"),
        (
            '{"format": 1, "made": "", "versions": {}, "machine": {}, "config": "", "checks": {"engine": {"verdict": "passed"}}}',
            "is damaged",
        ),
    ],
)
def test_a_certificate_that_cannot_be_read_is_an_error(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "old.json"
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError) as refused:
        certificates.read(path)
    assert says in str(refused.value) and str(path) in str(refused.value)


def test_a_folder_and_a_certificate_of_another_program_are_errors(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        certificates.read(tmp_path)
    path = certify(folder, config_of(folder), all_checks())
    content = json.loads(path.read_text())
    for name, value in (("config", "a: [1"), ("config", "- 1"), ("versions", {"torch": 2}), ("more", 1), ("checks", [])):
        path.write_text(json.dumps({**content, name: value}))
        with pytest.raises(ConfigError, match="is damaged"):
            certificates.read(path)
    engine = content["checks"]["engine"]
    for change in ({"measurements": []}, {"verdict": "fails"}, {"measurements": [{**engine["measurements"][0], "verdict": "fails"}]}):
        path.write_text(json.dumps({**content, "checks": {"engine": {**engine, **change}}}))
        with pytest.raises(ConfigError, match="is damaged"):
            certificates.read(path)
    del content["machine"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"is damaged: TypeError: .* 'machine'"):
        certificates.read(path)


def test_a_user_s_check_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def check(bench):\n    return 1\n")
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    for name, says in (
        (f"{tmp_path}/own.py:chekc", "has no function 'chekc'; it defines check"),
        (f"{tmp_path}/broken.py:check", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{tmp_path}/gone.py:check", "no such file"),
        ("no_such_package.checks:check", "cannot be imported: ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError) as refused:
            runner.load(name)
        assert str(refused.value).startswith(f"--checks {name}: ") and says in str(refused.value)
    assert runner.load(f"{tmp_path}/own.py:check")(None) == 1


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output '.*file/certificate' cannot be written: Not a directory"):
        runner.prepare(tmp_path / "file" / "certificate")
    (tmp_path / "sealed").mkdir()
    with pytest.raises(ConfigError, match=r"--output '.*file' cannot be written: File exists"):
        runner.prepare(tmp_path / "file")
    (tmp_path / "sealed" / certificates.FILE_NAME).mkdir()
    with pytest.raises(ConfigError, match=r"--output: .*certificate.json cannot be written: Is a directory"):
        certificates.write(certificates.Certificate("", {}, {}, "", {}), tmp_path / "sealed")
    runner.prepare(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / ".scratch").is_dir()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--checks", "engin"], "--checks engin: unknown; did you mean 'engine'?"),
        (["--against", "{folder}/none.json"], "none.json' cannot be read: No such file or directory"),
        (["model.path={folder}/gone"], "model.path"),
        (["data.train.0.path={folder}/gone.jsonl"], "gone.jsonl"),
    ],
)
def test_the_command_refuses_before_it_starts_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    path = write_base(tmp_path)
    given = [option.replace("{folder}", str(tmp_path)) for option in options]
    assert main(["certify", str(path), "parallel.world_size=2", *given]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_an_older_certificate_is_moved_away_until_the_command_is_done(tmp_path: Path) -> None:
    for name in ("certificate.json", "certificate.html"):
        (tmp_path / name).write_text(f"old {name}")
    runner.prepare(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".scratch", "certificate.previous.html", "certificate.previous.json"]
    assert (tmp_path / "certificate.previous.json").read_text() == "old certificate.json"
    assert (tmp_path / "certificate.previous.html").read_text() == "old certificate.html"


@pytest.mark.parametrize(("launched", "code"), [(0, 0), (1, 1), (2, 2), (75, 2), (76, 2), (137, 2), (130, 130), (143, 143)])
def test_exit_codes_without_a_meaning_here_are_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launched: int, code: int
) -> None:
    """Of ranks that ask for a restart, hang or are killed; an interruption stays one."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("vapo_mcore.launch.local.launch", lambda *given: launched)
    assert main(["certify", str(write_base(tmp_path)), "parallel.world_size=2"]) == code
    assert ("certify ended without a verdict" in capsys.readouterr().err) == (launched in (75, 76, 137))


def test_each_thing_that_differs_is_named_alone(folder: Path) -> None:
    """What ``--against`` says where one thing differs: it is the first, and with its verdict the last."""
    config = config_of(folder)
    details = {
        "engine": {"checksums": {"a": "1", "b": "2"}, "logprobs": [[-1.0, -2.0]]},
        "trainer": {"layers_float32": [1e-7, 2e-7], "logprobs": [[-1.0, -2.0]]},
    }

    def records(**changed: object) -> list[CheckRecord]:
        found = all_checks()
        for record in found:
            record.details = dict(details.get(record.check, {}))
            record.details |= {name.split("__")[1]: value for name, value in changed.items() if name.startswith(f"{record.check}__")}
        return found

    old = certificates.make(config, records(), {})
    assert differences(old, config, records()) == []
    for changed, says in (
        ({"engine__checksums": {"a": "1", "b": "9"}}, "tensors: 1 of 2 have other values in the trainer, the first is b"),
        ({"engine__checksums": {"a": "1", "c": "2"}}, "tensors: 2 are in one certificate only, the first is b"),
        (
            {"trainer__layers_float32": [1e-7, 0.5]},
            "layers (float32): layer 1 is the first whose hidden states are further from transformers: 2e-07 -> 0.5",
        ),
        ({"trainer__layers_float32": [1e-7]}, "layers: 2 before, 1 now"),
        ({"trainer__logprobs": [[-1.0, -2.5]]}, "positions: log-prob of the trainer at text 0, token 2: -2.0000 -> -2.5000"),
        ({"engine__logprobs": [[float("nan"), -2.0]]}, "positions: log-prob of the engine at text 0, token 1: -1.0000 -> nan"),
        (
            {"engine__logprobs": [[-1.0]]},
            "positions: the texts of the check 'engine' are not those of the certificate (data or tokenizer changed)",
        ),
    ):
        assert differences(old, config, records(**changed)) == [says]
    without = replace(old, checks={name: check for name, check in old.checks.items() if name != "offload"})
    assert differences(without, config, records()) == ["verdict: offload was not in the certificate, now holds"]


def test_differences_come_from_cause_to_effect(folder: Path) -> None:
    config = config_of(folder)
    before = all_checks()
    by_name = {record.check: record for record in before}
    by_name["engine"].details = {"checksums": {"a": "1", "b": "2", "c": "3"}, "logprobs": [[-1.0, -2.0], [-3.0]]}
    by_name["trainer"].details = {"layers_float32": [1e-7, 2e-7, 3e-7], "logprobs": [[-1.0, -2.0], [-3.0]]}
    old = certificates.make(config, before, {})
    assert differences(old, config, before) == []
    after = all_checks(trainer="fails")
    by_name = {record.check: record for record in after}
    by_name["engine"].details = {"checksums": {"a": "1", "b": "9", "c": "9"}, "logprobs": [[-1.0, -2.0], [-3.5]]}
    by_name["trainer"].details = {"layers_float32": [1e-7, 0.2, 0.3], "logprobs": [[-1.0, -2.0], [-3.001]]}
    old = replace(old, versions={**old.versions, "transformers": "4.0"})
    found = differences(old, config_of(folder, "rollout.temperature=0.5"), after)
    assert [sentence.split(":")[0] for sentence in found] == ["version", "setting", "tensors", "layers (float32)", "positions", "verdict"]
    assert "2 of 3 have other values in the trainer, the first is b" in found[2]
    assert "layer 1 is the first" in found[3]
    assert found[4] == "positions: log-prob of the engine at text 1, token 1: -3.0000 -> -3.5000"
    assert found[5] == "verdict: trainer: holds -> fails"
