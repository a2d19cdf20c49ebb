"""Text to token ids and back, built from a GGUF file's own fields or from a Hugging Face folder's tokenizer.json.

Two kinds of vocabulary are read: byte-level BPE, whose tokens spell bytes with 256 printable characters (GPT-2's
alphabet), and SentencePiece BPE, whose tokens spell a space as `▁` and unknown characters as byte tokens `<0xE4>`.
Either way each token stands for a fixed byte string, so decoding is a concatenation and can be done token by token.
"""

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.gguf_header import read_header

Spelling = Literal["byte-level", "sentencepiece"]

SPACE = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

# tokenizer.ggml.token_type
CONTROL, USER_DEFINED = 3, 4

# Control tokens that end a turn or a text under every template that has them, whatever the metadata calls "eos".
END_NAMES = (
    "</s>",
    "<eos>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|EOT|>",
    "<｜end▁of▁sentence｜>",
)

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre -> how text is cut before merging. Qwen 2 takes digits one by one, Llama 3 up to three at a time.
SPLITS = {
    "qwen2": rf"{WORDS}|\p{{N}}|{REST}",
    "deepseek-r1-qwen": rf"{WORDS}|\p{{N}}|{REST}",
    "llama-bpe": rf"{WORDS}|\p{{N}}{{1,3}}|{REST}",
    "llama3": rf"{WORDS}|\p{{N}}{{1,3}}|{REST}",
}


class TokenizerError(ValueError):
    """The model's tokenizer can't be built; the message names the file and the reason."""


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads."""

    def __init__(
        self,
        backend: Backend,
        spelling: Spelling,
        *,
        special_tokens: Mapping[str, str],
        add_bos: bool,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        """`special_tokens` maps the names that templates use (`bos_token`, `eos_token`, …) to their text."""
        self._backend = backend
        self._mode = _Mode(backend)
        self._byte_level = spelling == "byte-level"
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content.encode() for id, token in added.items()}
        self.control_tokens = {token.content: id for id, token in added.items() if token.special}
        """Text to id of the tokens that structure a prompt. They have no text of their own when decoded."""
        self._control_ids = frozenset(self.control_tokens.values())
        self._control = re.compile(one_of(self.control_tokens))
        self.special_tokens = dict(special_tokens)
        self.bos_id = backend.token_to_id(special_tokens["bos_token"]) if "bos_token" in special_tokens else None
        self.add_bos = add_bos and self.bos_id is not None
        """Whether the model was trained with the BOS token at the start of every text."""
        ends = {self.control_tokens[name] for name in END_NAMES if name in self.control_tokens}
        self.eos_ids = frozenset(ends | set(eos_ids))
        """Every token that ends a turn or a text."""
        self.chat_template = chat_template
        self.tool_template = tool_template
        """The template for conversations with tools, where the model brings one apart."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of `text`, in which control tokens may be written out (`<|im_start|>`).

        With `add_special`, exactly one BOS stands in front if the model wants one. Raises ValueError when `text` can't
        be written as UTF-8 (half of a surrogate pair).
        """
        ids = self._encode(text, control=True)
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of text from outside, none of them a control token: `<|im_end|>` is ten ordinary characters."""
        return self._encode(text, control=False)

    def _encode(self, text: str, *, control: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: half a surrogate pair at {error.start}") from error
        with self._mode.reading(control):
            # As a batch of one: only that lets go of Python's lock, which the step loop needs.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def token_id(self, text: str) -> int | None:
        """The token that is spelled like this as a whole, such as `<think>`; None when there is none."""
        id: int | None = self._backend.token_to_id(text)
        return id

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that a token adds to the text, perhaps only part of a character; empty for control tokens."""
        if token_id in self._control_ids:
            return b""
        if token_id in self._added:
            return self._added[token_id]
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:  # a row that pads the model's vocabulary to a round size
            return b""
        if self._byte_level:
            try:
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                return token.encode()
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE, " ").encode()

    def spell(self, token_id: int) -> bytes:
        """As `token_bytes`, but control tokens are written out."""
        return self._added.get(token_id) or self.token_bytes(token_id)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the tokens, control tokens left out; U+FFFD stands where they do not spell valid UTF-8."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def control_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of each control token written out in `text`, from the left, the longest where several fit."""
        return (match.span() for match in self._control.finditer(text))


def one_of(names: Iterable[str]) -> str:
    """Pattern for the longest of the names that stands here; matches nothing when there are no names.

    A tree of their characters, so that each is read once: a plain list would be tried name by name, and Gemma has
    6,249 control tokens.
    """
    tails: dict[str, list[str]] = {}
    for name in names:
        tails.setdefault(name[:1], []).append(name[1:])
    ends = "" in tails and bool(tails.pop(""))
    branches = [re.escape(first) + (one_of(rest) if any(rest) else "") for first, rest in tails.items()]
    if not branches:
        return "" if ends else r"(?!)"
    if ends:
        return f"(?:{'|'.join(branches)})?"
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


class _Mode:
    """Lets any number of threads encode at once as long as they all want control tokens read, or all want them not.

    The backend has one switch for both, so a thread that wants the other way waits until the running ones are done;
    those that come after it wait behind it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._readers = 0
        self._control: bool | None = None

    @contextmanager
    def reading(self, control: bool) -> Iterator[None]:
        with self._turn, self._changed:
            if control != self._control:
                self._changed.wait_for(lambda: self._readers == 0)
                self._backend.encode_special_tokens = not control
                self._control = control
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()


def load_tokenizer(path: Path) -> Tokenizer:
    """Tokenizer of the model at `path`: a GGUF file, or a folder with tokenizer.json. Raises TokenizerError."""
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Tokenizer:
    fields = read_header(path).fields
    kind = fields.get("tokenizer.ggml.model")
    tokens: list[str] = fields.get("tokenizer.ggml.tokens", [])
    types: list[int] = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    try:
        if kind == "gpt2":
            backend = _byte_level_backend(tokens, fields)
        elif kind == "llama":
            backend, tokens = _sentencepiece_backend(tokens, types, fields)
        else:
            raise TokenizerError(f"tokenizer.ggml.model is {kind!r}; this engine reads 'gpt2' and 'llama'")
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except Exception as error:  # the backend raises plain Exception, e.g. for a merge of a token that is not there
        raise TokenizerError(f"{path}: the vocabulary is damaged: {error}") from error
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i, t in enumerate(types) if t == CONTROL])
    backend.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == USER_DEFINED and token.strip(SPACE)  # runs of spaces are left to the merges
        ]
    )
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in GGUF_SPECIAL.items()}
    ends = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return Tokenizer(
        backend,
        "byte-level" if kind == "gpt2" else "sentencepiece",
        special_tokens={name: tokens[id] for name, id in ids.items() if id is not None},
        add_bos=fields.get("tokenizer.ggml.add_bos_token", kind == "llama" or _is_llama_3(fields)),
        eos_ids=[id for id in ends if id is not None],
        chat_template=fields.get("tokenizer.chat_template"),
        tool_template=fields.get("tokenizer.chat_template.tool_use"),
    )


GGUF_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level_backend(tokens: list[str], fields: Mapping[str, Any]) -> Backend:
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])]
    pre = fields.get("tokenizer.ggml.pre", "default")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)
    cut: pre_tokenizers.PreTokenizer
    if pre in SPLITS:
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"), byte_level])
    elif pre == "smollm":
        cut = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in ("default", "gpt-2"):
        cut = byte_level
    else:
        known = sorted({"default", "gpt-2", "smollm", *SPLITS})
        raise TokenizerError(f"tokenizer.ggml.pre is {pre!r}; this engine knows {', '.join(known)}")
    vocab = {token: id for id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=_is_llama_3(fields)))
    backend.pre_tokenizer = cut
    return backend


def _is_llama_3(fields: Mapping[str, Any]) -> bool:
    """Llama 3 takes a word that is a token as it is, even where the merges would not build it."""
    return fields.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3")


def _sentencepiece_backend(tokens: list[str], types: list[int], fields: Mapping[str, Any]) -> tuple[Backend, list[str]]:
    """Backend, and the tokens as it spells them: some files write runs of spaces as such."""
    tokens = [token if token.strip(" ") else SPACE * len(token) for token in tokens]
    vocab = {token: id for id, token in enumerate(tokens)}
    scores = fields["tokenizer.ggml.scores"]
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    # The file lists no merges. SentencePiece joins the neighbours whose token has the best score, so every way to cut
    # a token in two other tokens is a merge, in the order of the scores; user-defined tokens come before all others.
    order = sorted(range(len(tokens)), key=lambda id: (types[id] != USER_DEFINED, -scores[id]))
    merges = [
        (token[:cut], token[cut:])
        for token in map(tokens.__getitem__, order)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", SPACE)
    return backend, tokens


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{folder} has no tokenizer.json: download the model's tokenizer files too")
    try:
        backend = Backend.from_file(str(file))
        decoder = json.dumps(json.loads(file.read_text(encoding="utf-8"))["decoder"])
    except Exception as error:  # the backend raises plain Exception
        raise TokenizerError(f"{file} can't be read: {error}") from error
    if "ByteLevel" not in decoder and "ByteFallback" not in decoder:
        raise TokenizerError(f"{file}: only byte-level and SentencePiece BPE vocabularies are supported")
    backend.no_padding()
    backend.no_truncation()
    config = _json(folder / "tokenizer_config.json")
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name in GGUF_SPECIAL and value is not None
    }
    bos = special.get("bos_token")
    probe = backend.encode("a", add_special_tokens=True).tokens
    ends = _json(folder / "generation_config.json").get("eos_token_id", [])
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return Tokenizer(
        backend,
        "byte-level" if "ByteLevel" in decoder else "sentencepiece",
        special_tokens=special,
        add_bos=config.get("add_bos_token", bos is not None and probe[:1] == [bos]),
        eos_ids=[*(ends if isinstance(ends, list) else [ends]), *([] if eos is None else [eos])],
        chat_template=_folder_template(folder, config, "default"),
        tool_template=_folder_template(folder, config, "tool_use"),
    )


def _folder_template(folder: Path, config: Mapping[str, Any], name: str) -> str | None:
    """The chat template of that name: a file of its own, or in tokenizer_config.json (one, or a list of named ones)."""
    file = folder / "chat_template.jinja"
    if name != "default":
        file = folder / "additional_chat_templates" / f"{name}.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry["name"] == name), None)
    return template if name == "default" else None


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in the file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return value


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for U+0100 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
