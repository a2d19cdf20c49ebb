"""The header reader agrees with the gguf package, and a damaged file is an error wherever it is damaged."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.gguf_header import GgufError, read_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A GGUF file with every kind of field and two tensors."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -2_000_000_000)
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_string("a.text", "é你🎉")
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.floats", [1.5, 2.5])
    writer.add_array("a.texts", ["", "▁x", "🎉"])
    writer.add_tensor("first.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_fields_and_tensors_are_those_the_gguf_package_reads(file: Path) -> None:
    header, reference = read_header(file), gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert header.fields == fields and len(fields) == 16
    assert list(header.tensors) == ["first.weight", "second"]
    for tensor in reference.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape) and info.type == tensor.tensor_type
        assert info.offset == tensor.data_offset
    assert header.tensors["first.weight"].shape == (3, 2)


def test_a_file_cut_off_anywhere_in_its_header_is_damaged(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    last = whole.index(b"second") + len("second")
    for length in range(8, last):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(GgufError, match=r"cut\.gguf is a damaged GGUF file"):
            read_header(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "does not start with 'GGUF'"),
        (b"PK\x03\x04", "does not start with 'GGUF'"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "version 1 is not supported"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "little-endian"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "damaged"),
    ],
)
def test_what_is_no_gguf_file_is_explained(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(GgufError, match=words):
        read_header(tmp_path / "model.gguf")
