"""The same weights for every peer: one GGUF file as it is, requantised for llama.cpp, in bf16 for the others."""

import subprocess
from pathlib import Path

from benchmarks.peer_install import llama_server, root
from engine.gguf_header import read_header

FILE_TYPES = {2: "q4_0", 3: "q4_1", 7: "q8_0", 15: "q4_k_m"}
"""general.file_type of a GGUF file -> what llama.cpp calls it."""


def quantised(model: str, path: Path) -> dict[str, Path]:
    """GGUF files by quantisation: `path` itself, and q4_1 and q8_0 made from it on first use."""
    own = FILE_TYPES.get(int(read_header(path).fields["general.file_type"]), "as it is")
    files = {own: path}
    for quant in ("q4_1", "q8_0"):
        if quant == own:
            continue
        files[quant] = root() / "models/gguf" / f"{model}-{quant}.gguf"
        if not files[quant].is_file():
            files[quant].parent.mkdir(parents=True, exist_ok=True)
            part = files[quant].with_suffix(".part")
            tool = str(llama_server().with_name("llama-quantize"))
            command = [tool, "--allow-requantize", str(path), str(part), quant.upper()]
            subprocess.run(command, check=True, capture_output=True)
            part.rename(files[quant])
    return files


def folder(model: str, path: Path) -> Path:
    """A Hugging Face folder with the file's weights in bf16 and its tokenizer, made on first use."""
    made = root() / "models" / model
    if not (made / "tokenizer_config.json").is_file():  # the last thing written
        _convert(path, made)
    return made


def _convert(path: Path, made: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    # A model of the same shape that does not remember having been quantised, which it could not be saved with.
    fields = loaded.config.to_dict()
    fields.pop("quantization_config", None)
    plain = type(loaded)(type(loaded.config)(**fields))
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.bfloat16().save_pretrained(made)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(made)


def kv_bytes(path: Path) -> int:
    """Bytes of keys and values for one token, in 16 bits."""
    fields = read_header(path).fields
    name = fields["general.architecture"]
    heads = int(fields[f"{name}.attention.head_count"])
    head_dim = int(fields.get(f"{name}.attention.key_length", int(fields[f"{name}.embedding_length"]) // heads))
    return 2 * 2 * int(fields[f"{name}.block_count"]) * int(fields[f"{name}.attention.head_count_kv"]) * head_dim
