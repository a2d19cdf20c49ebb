"""Model files that are cut, damaged or hostile end in a ModelFileError: no crash, no hang, no memory filled."""

import json
import random
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.gguf_header import read_header
from engine.loader import ModelFileError
from engine.runner import load
from tests.engine.model_files import convert_to_gguf, random_model

SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_to_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", random_model("Qwen3", head_dim=8, **SMALL))


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    random_model("Qwen3", head_dim=8, **SMALL).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, whole_folder: Path) -> Path:
    """A copy to damage."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((whole_folder / name).read_bytes())
    return tmp_path


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Every test here handles kilobytes."""
    memory, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000, "more than 100 MB"
    assert time.process_time() - start < 20


def test_the_undamaged_files_load(whole_gguf: Path, whole_folder: Path) -> None:
    assert load(whole_gguf, "float32").config.num_layers == load(whole_folder, "float32").config.num_layers == 2


def test_gguf_cut_anywhere(tmp_path: Path, whole_gguf: Path) -> None:
    whole = whole_gguf.read_bytes()
    last = max(read_header(whole_gguf).tensors.values(), key=lambda tensor: tensor.offset)
    end = last.offset + 4 * last.shape[0] * (last.shape[1] if len(last.shape) > 1 else 1)
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 3000, 13), *range(3000, end, 997), end - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf: not a complete GGUF file"):
            load(path, "float32")


def test_gguf_with_any_byte_changed(tmp_path: Path, whole_gguf: Path) -> None:
    """In the header, where every byte means something: it loads or it is refused."""
    whole = whole_gguf.read_bytes()
    header_end = min(tensor.offset for tensor in read_header(whole_gguf).tensors.values())
    generator, path, refused = random.Random(4), tmp_path / "changed.gguf", 0
    for _ in range(400):
        changed = bytearray(whole)
        changed[generator.randrange(header_end)] = generator.choice([0, 1, 0x7F, 0xFF, generator.randrange(256)])
        path.write_bytes(changed)
        try:
            load(path, "float32")
        except ModelFileError as error:
            refused += 1
            assert "changed.gguf" in str(error)
    assert refused > 100


def patched(data: bytes, after: bytes, offset: int, code: str, value: int) -> bytes:
    """`value` packed as `code`, `offset` bytes behind the first `after`."""
    at = data.index(after) + len(after) + offset
    return data[:at] + struct.pack("<" + code, value) + data[at + struct.calcsize("<" + code) :]


HUGE = 1 << 62
HOSTILE = {
    "tensor count": (b"GGUF", 4, "Q", HUGE),
    "field count": (b"GGUF", 12, "Q", HUGE),
    "key length": (b"GGUF", 20, "Q", HUGE),
    "text length": (b"general.architecture", 4, "Q", HUGE),
    "dimensions": (b"token_embd.weight", 0, "I", 0xFFFFFFFF),
    "no dimensions": (b"token_embd.weight", 0, "I", 0),
    "rows": (b"token_embd.weight", 12, "Q", HUGE),
    "no columns": (b"token_embd.weight", 4, "Q", 0),
    "offset": (b"token_embd.weight", 24, "Q", HUGE),
    "type": (b"token_embd.weight", 20, "I", 12345),
    "layers": (b"qwen3.block_count", 4, "I", 0xFFFFFFFF),
    "heads": (b"qwen3.attention.head_count", 4, "I", 0),
    "head size": (b"qwen3.attention.key_length", 4, "I", 0x7FFFFFFE),
    "context": (b"qwen3.context_length", 4, "I", 0xFFFFFFFF),
    "kind of value": (b"qwen3.block_count", 0, "I", 99),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_numbers_in_a_gguf_header(tmp_path: Path, whole_gguf: Path, what: str) -> None:
    (tmp_path / "hostile.gguf").write_bytes(patched(whole_gguf.read_bytes(), *HOSTILE[what]))
    with pytest.raises(ModelFileError, match=r"hostile\.gguf"):
        load(tmp_path / "hostile.gguf", "float32")


def test_arrays_within_arrays(tmp_path: Path) -> None:
    deep = b"".join(struct.pack("<IQ", 9, 1) for _ in range(100_000))
    key = b"general.tags"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 9) + deep
    (tmp_path / "deep.gguf").write_bytes(header)
    with pytest.raises(ModelFileError, match="more than 4 deep"):
        load(tmp_path / "deep.gguf", "float32")


def test_an_array_longer_than_the_file(tmp_path: Path) -> None:
    for item in (0, 6, 8, 9):
        key = b"general.tags"
        header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
        header += struct.pack("<IIQ", 9, item, 1 << 40) + bytes(1000)
        (tmp_path / "long.gguf").write_bytes(header)
        with pytest.raises(ModelFileError, match="damaged"):
            load(tmp_path / "long.gguf", "float32")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (b"qwen3.attention.key_length", b"qwen3.attention.head_count", "'qwen3.attention.head_count' is there twice"),
        (b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight", "two tensors have the same name"),
    ],
)
def test_names_that_are_there_twice(tmp_path: Path, whole_gguf: Path, before: bytes, after: bytes, words: str) -> None:
    (tmp_path / "twice.gguf").write_bytes(whole_gguf.read_bytes().replace(before, after))
    with pytest.raises(ModelFileError, match=words):
        load(tmp_path / "twice.gguf", "float32")


def test_metadata_of_the_wrong_kind(tmp_path: Path) -> None:
    model = random_model("Qwen3", head_dim=8, **SMALL)
    for name, value, words in (
        ("attention.head_count_kv", [2, 2], "one whole number"),
        ("rope.freq_base", "high", "one number"),
        ("block_count", 2.5, "one whole number"),
        ("attention.causal", False, "causal models only"),
        ("expert_count", 8, "expert_count is 8, which Farthing does not know"),
        ("rope.scaling.yarn_ext_factor", 0.5, "yarn_ext_factor is 0.5"),
        ("attention.value_length", 4, "differs from the head size 8"),
    ):
        path = tmp_path / "m.gguf"
        convert_to_gguf(path, model, **{name: value})
        with pytest.raises(ModelFileError, match=words):
            load(path, "float32")


def test_a_tensor_that_has_no_place_is_named(tmp_path: Path, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.self_attn\.sinks has no place in a qwen3 model"):
        load(folder, "float32")


def test_safetensors_cut_anywhere(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in [*range(0, 2000, 29), *range(2000, len(whole), 997), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"model\.safetensors: cut short or damaged"):
            load(folder, "float32")


@pytest.mark.parametrize("length", [0, 1, 7, 1 << 20, 1 << 33, (1 << 64) - 1])
def test_hostile_safetensors_headers(folder: Path, length: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with pytest.raises(ModelFileError, match=r"model\.safetensors: cut short or damaged"):
        load(folder, "float32")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "I64", "shape": [16], "data_offsets": [0, 128]}, "type torch.int64: not supported"),
        ({"dtype": "BOOL", "shape": [16], "data_offsets": [0, 16]}, "type torch.bool: not supported"),
        ({"dtype": "NF4", "shape": [16], "data_offsets": [0, 64]}, "cut short or damaged"),
        ({"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 64]}, "cut short or damaged"),
        ({"dtype": "F32", "shape": [16], "data_offsets": [0, 1 << 62]}, "cut short or damaged"),
        ({"dtype": "F32", "shape": [16], "data_offsets": [64, 0]}, "cut short or damaged"),
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}, r"model\.norm\.weight has shape \[4, 4\]"),
    ],
)
def test_hostile_safetensors_entries(folder: Path, entry: dict[str, object], words: str) -> None:
    """One tensor of a shard of its own, so that its offsets are free to be anything."""
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, folder / "rest.safetensors")
    (folder / "model.safetensors").unlink()
    header = json.dumps({"model.norm.weight": entry}).encode()
    size = min(max(entry["data_offsets"]), 128)
    (folder / "norm.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    places = dict.fromkeys(tensors, "rest.safetensors") | {"model.norm.weight": "norm.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelFileError, match=words):
        load(folder, "float32")


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"a": "gone.safetensors"}, r"gone\.safetensors: no such file"),
        ({"a": "../outside.safetensors"}, "is not a safetensors file"),
        ({"a": "/etc/passwd"}, "is not a safetensors file"),
        ({"a": ""}, "is not a safetensors file"),
        ({"a": ".."}, "is not a safetensors file"),
        ({"a": 3}, "must give the file of each tensor"),
        (["a"], "must give the file of each tensor"),
        (None, "must give the file of each tensor"),
        ({}, "is missing"),
    ],
)
def test_shard_indexes_that_cannot_be_right(folder: Path, places: object, words: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelFileError, match=words):
        load(folder, "float32")


def test_a_tensor_in_two_shards(folder: Path) -> None:
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    places = {"a": "copy.safetensors", "b": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelFileError, match="is in two files"):
        load(folder, "float32")


def test_any_configuration_field_with_a_value_of_any_kind(folder: Path) -> None:
    """It loads or it is refused, and the message names the file."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32}
    values = [None, "text", [], [1], {}, {"a": 1}, True, False, 0, -1, 1, 0.5, 1e30, 1 << 70]
    names = [(config, name) for name in config] + [
        (config["rope_parameters"], name) for name in config["rope_parameters"]
    ]
    refused = 0
    for place, name in names:
        before = place[name]
        for value in values:
            place[name] = value
            (folder / "config.json").write_text(json.dumps(config))
            try:
                load(folder, "float32")
            except ModelFileError as error:
                refused += 1
                assert str(folder) in str(error)
        place[name] = before
    assert refused > 150


@pytest.mark.parametrize("text", ["[]", "3", "null", '"{}"', "{", "[" * 100_000, "\udcff"])
def test_configurations_that_are_no_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelFileError, match=r"config\.json: not (valid JSON|a JSON object)"):
        load(folder, "float32")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_sink": 4}, "field attention_sink is 4, which Farthing does not know"),
        ({"sliding_window": 0, "use_sliding_window": True}, "sliding_window is 0"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer type 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "one entry for each of 2 layers"),
        ({"is_causal": False}, "causal models only"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "extrapolation_factor": 2.0}}, "extrapolation_factor is 2.0"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}}, "rope scaling 'mrope' is not supported"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"num_key_value_heads": 3}, "cannot share 3 key-value heads"),
        ({"head_dim": 7}, "odd"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_settings_that_would_change_the_result(folder: Path, changes: dict[str, object], words: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelFileError, match=words):
        load(folder, "float32")


def test_fields_that_change_nothing_are_let_by(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    extra = {"unsloth_version": "2026.1", "torch_dtype": "bfloat16", "use_mrope": False, "some_new_bias": None}
    (folder / "config.json").write_text(json.dumps(config | extra))
    load(folder, "float32")


def test_an_architecture_only_the_gguf_table_knows(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "deepseek2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="architecture 'deepseek2' is not supported"):
        load(tmp_path / "m.gguf", "float32")
