"""HF -> Megatron distributed checkpoint -> HF is bit-identical; damaged and hostile checkpoints are refused; nothing half-written."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.weights.models import FAMILIES, hf_config, read_safetensors
from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights import command, convert, distcp
from vapo_mcore.weights.convert import hf_to_megatron, megatron_to_hf
from vapo_mcore.weights.distcp import DistributedCheckpointReader, DistributedCheckpointWriter
from vapo_mcore.weights.verify import check_own_checksums, compare

Folder = Callable[[str], Path]


@pytest.mark.parametrize("model", FAMILIES)
def test_round_trip_is_bit_identical(model: str, hf_folder: Folder, tmp_path: Path) -> None:
    source = hf_folder(model)
    expected = read_safetensors(source)
    report = hf_to_megatron(source, tmp_path / "megatron")
    assert report.tensors == len(expected)
    assert report.num_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert compare(source, tmp_path / "megatron").equal
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", max_shard_bytes=20_000)
    back = read_safetensors(tmp_path / "hf")
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in expected.items())
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert check_own_checksums(tmp_path / "hf").equal
    assert check_own_checksums(tmp_path / "megatron").equal


def test_layers_are_stacked_and_the_vocabulary_padded(hf_folder: Folder, tmp_path: Path) -> None:
    """The global tensors that ``dist_checkpointing`` expects: keys and shapes written down by hand for the qwen3_moe model."""
    hf_to_megatron(hf_folder("qwen3_moe"), tmp_path / "out", vocab_multiple=64)
    reader = DistributedCheckpointReader(tmp_path / "out")
    assert {key: reader.shape(key) for key in reader.keys} == {
        "embedding.word_embeddings.weight": (128, 32),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (3, 32),
        "decoder.layers.self_attention.linear_qkv.weight": (3, 96, 32),
        "decoder.layers.self_attention.linear_proj.weight": (3, 32, 64),
        "decoder.layers.self_attention.q_layernorm.weight": (3, 8),
        "decoder.layers.self_attention.k_layernorm.weight": (3, 8),
        "decoder.layers.pre_mlp_layernorm.weight": (3, 32),
        "decoder.layers.mlp.router.weight": (3, 4, 32),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (3, 4, 32, 32),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": (3, 4, 32, 16),
        "decoder.final_layernorm.weight": (32,),
        "output_layer.weight": (128, 32),
    }
    assert not reader.read("output_layer.weight", (101, 0), (27, 32)).any()
    gate = read_safetensors(hf_folder("qwen3_moe"))["model.layers.2.mlp.experts.3.gate_proj.weight"]
    assert torch.equal(reader.read("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 3, 0, 0), (1, 1, 16, 32))[0, 0], gate)


def test_type_of_the_weights(hf_folder: Folder, tmp_path: Path) -> None:
    hf_to_megatron(hf_folder("qwen2"), tmp_path / "wide", dtype=torch.float32)
    megatron_to_hf(tmp_path / "wide", tmp_path / "narrow", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "wide" / "hf" / "config.json").read_text())["dtype"] == "float32"
    assert compare(hf_folder("qwen2"), tmp_path / "wide").equal
    assert all(tensor.dtype == torch.bfloat16 for tensor in read_safetensors(tmp_path / "narrow").values())
    assert compare(hf_folder("qwen2"), tmp_path / "narrow").equal


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_critics(kind: str, tmp_path: Path) -> None:
    import transformers

    config = hf_config("qwen2")
    config.num_labels = 1
    torch.manual_seed(4)
    hf = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    hf.save_pretrained(tmp_path / "source")
    assert hf_to_megatron(tmp_path / "source", tmp_path / "megatron").role == "critic"
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    back = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert type(back).__name__ == "Qwen2ForTokenClassification"
    assert torch.equal(back.score.weight, hf.score.weight)
    assert torch.equal(back.model.layers[1].mlp.up_proj.weight, hf.model.layers[1].mlp.up_proj.weight)
    assert compare(tmp_path / "source", tmp_path / "back").equal


def test_comparison_finds_one_changed_number(hf_folder: Folder, tmp_path: Path) -> None:
    hf_to_megatron(hf_folder("qwen3"), tmp_path / "megatron")
    tensors = read_safetensors(hf_folder("qwen3"))
    changed = tensors["model.layers.1.self_attn.q_norm.weight"].clone()
    changed[3] += 1
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed" / "config.json").write_bytes((hf_folder("qwen3") / "config.json").read_bytes())
    save_file({**tensors, "model.layers.1.self_attn.q_norm.weight": changed}, tmp_path / "changed" / "model.safetensors")
    result = compare(tmp_path / "megatron", tmp_path / "changed")
    assert list(result.differences) == ["model.layers.1.self_attn.q_norm.weight"]
    assert "1 of 8 numbers differ" in result.differences["model.layers.1.self_attn.q_norm.weight"]
    other = compare(hf_folder("qwen2"), hf_folder("llama"))
    assert other.differences["model.layers.0.self_attn.q_proj.bias"] == "is in only one of the models"


class TestDamage:
    @pytest.fixture
    def megatron(self, hf_folder: Folder, tmp_path: Path) -> Path:
        hf_to_megatron(hf_folder("llama"), tmp_path / "megatron")
        return tmp_path / "megatron"

    def test_flipped_bit(self, megatron: Path, hf_folder: Folder) -> None:
        file = megatron / "__0_0.distcp"
        raw = bytearray(file.read_bytes())
        name = "model.layers.1.mlp.up_proj.weight"
        tensor = read_safetensors(hf_folder("llama"))[name]
        raw[raw.index(tensor.view(torch.uint8).numpy().tobytes()) + 5] ^= 1
        file.write_bytes(raw)
        assert list(check_own_checksums(megatron).differences) == [name]
        assert list(compare(hf_folder("llama"), megatron).differences) == [name]

    def test_truncated(self, megatron: Path, tmp_path: Path) -> None:
        file = megatron / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(CheckpointError, match=r"__0_0.distcp is truncated"):
            megatron_to_hf(megatron, tmp_path / "out")
        file.unlink()
        with pytest.raises(CheckpointError, match=r"__0_0.distcp does not exist"):
            megatron_to_hf(megatron, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_pickle_that_runs_code(self, megatron: Path, tmp_path: Path) -> None:
        class Attack:
            def __reduce__(self) -> Any:
                return (exec, (f"open({str(tmp_path / 'owned')!r}, 'w')",))

        (megatron / ".metadata").write_bytes(pickle.dumps(Attack()))
        with pytest.raises(CheckpointError, match=r"refers to builtins.exec, which is not part of the format"):
            megatron_to_hf(megatron, tmp_path / "out")
        assert not (tmp_path / "owned").exists()

    @pytest.mark.parametrize("trick", ["../evil.distcp", "/etc/passwd"])
    def test_paths_outside(self, megatron: Path, trick: str, tmp_path: Path) -> None:
        metadata = pickle.loads((megatron / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            object.__setattr__(info, "relative_path", trick)
        (megatron / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match="only plain file names inside the folder"):
            megatron_to_hf(megatron, tmp_path / "out")

    def test_wrong_config(self, megatron: Path, tmp_path: Path) -> None:
        config = json.loads((megatron / "hf" / "config.json").read_text())
        (megatron / "hf" / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
        with pytest.raises(CheckpointError, match=r"linear_qkv.weight has shape \[3, 96, 32\], expected \[3, 128, 32\]"):
            megatron_to_hf(megatron, tmp_path / "out")
        (megatron / "hf" / "config.json").write_text(json.dumps({**config, "model_type": "qwen2", "num_hidden_layers": 4}))
        with pytest.raises(CheckpointError, match=r"missing: decoder.layers.0.self_attention.linear_qkv.bias"):
            megatron_to_hf(megatron, tmp_path / "out")

    def test_missing_chunk(self, tmp_path: Path) -> None:
        with DistributedCheckpointWriter(tmp_path) as out:
            out.add("a", torch.ones(2, 3), (4, 3), (0, 0))
        reader = DistributedCheckpointReader(tmp_path)
        assert torch.equal(reader.read("a", (1, 1), (1, 2)), torch.ones(1, 2))
        with pytest.raises(CheckpointError, match="a is incomplete at offset"):
            reader.read("a", (1, 0), (2, 3))

    def test_not_finite(self, hf_folder: Folder, tmp_path: Path) -> None:
        tensors = read_safetensors(hf_folder("llama"))
        tensors["model.norm.weight"][0] = float("inf")
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "config.json").write_bytes((hf_folder("llama") / "config.json").read_bytes())
        save_file(tensors, tmp_path / "bad" / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"NaN or infinite weights in model.norm.weight"):
            hf_to_megatron(tmp_path / "bad", tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


def test_regions_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distcp, "_FILE_BYTES", 3000)  # several data files
    full = torch.arange(3 * 8 * 6.0).reshape(3, 8, 6)
    with DistributedCheckpointWriter(tmp_path) as out:
        for layer in range(3):
            for row, column in ((0, 0), (0, 2), (4, 0), (4, 2)):
                width = 2 if column == 0 else 4
                out.add("w", full[layer, row : row + 4, column : column + width], full.shape, (layer, row, column))
    assert len(list(tmp_path.glob("*.distcp"))) > 2
    reader = DistributedCheckpointReader(tmp_path)
    assert torch.equal(reader.read("w", (0, 0, 0), (3, 8, 6)), full)
    assert torch.equal(reader.read("w", (1, 3, 1), (2, 4, 4)), full[1:3, 3:7, 1:5])


class TestCommand:
    def test_all_actions(self, hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source, megatron, back = str(hf_folder("qwen2")), str(tmp_path / "m"), str(tmp_path / "hf")
        assert command.main(["hf-to-megatron", source, megatron, "--dtype", "float32"]) == 0
        assert command.main(["megatron-to-hf", megatron, back, "--max-shard-size", "1MB"]) == 0
        assert command.main(["verify", source, back]) == 0
        assert command.main(["verify", back]) == 0
        assert command.main(["inspect", megatron, "--tensors"]) == 0
        shown = capsys.readouterr().out
        assert "Megatron distributed checkpoint, policy, qwen2" in shown
        assert f"{len(read_safetensors(Path(source)))} tensors, equal" in shown
        assert command.main(["verify", source, str(hf_folder("qwen2_tied"))]) == 1
        assert "NOT equal" in capsys.readouterr().out

    def test_faults_are_explained(self, hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
        source = str(hf_folder("qwen2"))
        for arguments, message in (
            (["hf-to-megatron", source, str(tmp_path / "there")], "already exists"),
            (["hf-to-megatron", str(tmp_path / "nowhere"), str(tmp_path / "out")], "does not exist"),
            (["megatron-to-hf", source, str(tmp_path / "out")], "is not a Megatron distributed checkpoint"),
            (["hf-to-megatron", source, str(tmp_path / "out"), "--vocab-multiple", "0"], "must be at least 1"),
            (["verify", source], "checksums.json cannot be read"),
            (["verify", "--logits", source, source, "--text", str(tmp_path / "latin.txt")], "cannot be read as UTF-8 text"),
            (["verify", "--logits", source, source, "--text", str(tmp_path / "none.txt")], "cannot be read as UTF-8 text"),
        ):
            assert command.main(arguments) == 2
            assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(("text", "size"), [("5GB", 5_000_000_000), ("1.5kb", 1500), ("2 MiB", 2 << 20), ("700", 700), ("9b", 9)])
    def test_sizes(self, text: str, size: int) -> None:
        assert command._size(text) == size

    def test_help_does_not_import_torch(self) -> None:
        code = "import sys; from vapo_mcore.weights import command; command.main(['--help'])"
        check = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); exec({code!r})"
        result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
        assert result.stdout.rstrip().endswith("False"), result.stderr


def test_a_broken_conversion_leaves_nothing(hf_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "copy_companions", fail)
    with pytest.raises(KeyboardInterrupt):
        hf_to_megatron(hf_folder("llama"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
