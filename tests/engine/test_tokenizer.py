"""Tokens agree with transformers reading the same file, decode to the text, and bad files are explained."""

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from engine import catalog
from engine.tokenizer import BYTE_OF_CHARACTER, SPLITS, Tokenizer, TokenizerError, load_tokenizer, one_of

CORPUS = [
    "Hello, world! It's a test; they'll say WE'RE done.",
    "def f(x: int) -> str:\n    return f'{x:>8}'\n\n\tfor i in range(10):\n\t\tprint(i)  # loop\r\n",
    "你好,世界。今天天气不错!こんにちは 안녕하세요",
    "🎉👩‍👩‍👧‍👦🇩🇪 emoji",
    " leading, trailing   and      runs\n\n\n\nof \t\t whitespace \n ",
    "1234567890 3.14159 1,000,000 ½ ² ٣ 0x1F",
    "\x00\x01\x07\x1b[0m\x7f\x85\u200b\u2028\ufeff",
    "naïve café Ångström — “quotes” … x² ≤ ∞",
    "https://example.org/a?b=c&d=%20 user@host ../path/to/file.txt",
    "<table><tr><td>1</td></tr></table> <|not_a_token|> <unk> [INST]",
    "a",
    "",
]

texts = st.one_of(
    st.text(max_size=60),
    st.text(st.sampled_from(" \n\t\r ab1²'sS▁<|>é你🎉\x00"), max_size=40),
    st.lists(st.sampled_from(CORPUS), max_size=3).map("".join),
)


def reference(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def train(size: int, *, byte_level: bool) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a small BPE, learnt from the corpus."""
    backend = Backend(models.BPE())
    alphabet = list(BYTE_OF_CHARACTER) if byte_level else []
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def write_gguf(path: Path, architecture: str, fields: dict[str, Any]) -> Path:
    """A GGUF file with a tokenizer and what transformers needs to accept the architecture."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_head_count(1)
    writer.add_context_length(16)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.{key}", value)
        else:
            writer.add_string(f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_fields(pre: str) -> dict[str, Any]:
    vocab, merges = train(700, byte_level=True)
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
    types = [gguf.TokenType.NORMAL.value] * (len(tokens) - 4) + [gguf.TokenType.CONTROL.value] * 3
    types.append(gguf.TokenType.USER_DEFINED.value)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": [" ".join(merge) for merge in merges],
        "ggml.bos_token_id": len(tokens) - 4,
        "ggml.eos_token_id": len(tokens) - 2,
        "ggml.add_bos_token": False,
        "chat_template": "{{ messages }}",
    }


def sentencepiece_fields(*, space_prefix: bool) -> dict[str, Any]:
    """As converters write Gemma: special tokens, runs of white space, bytes, then pieces with falling scores."""
    vocab, _ = train(400, byte_level=False)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    runs = ["\n" * n for n in range(2, 6)] + [" " * n for n in range(2, 6)] + ["<table>", "<tr>", "</tr>"]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [token for token in sorted(vocab, key=vocab.__getitem__) if token.strip("▁") or token == "▁"]
    pieces = [token for token in pieces if token not in runs]
    kinds = [(special, 3), (runs, 4), (data, 6), (pieces, 1)]
    tokens = [token for group, _ in kinds for token in group]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": [kind for group, kind in kinds for _ in group],
        "ggml.scores": [-1000.0] * (len(tokens) - len(pieces)) + [-float(i) for i in range(len(pieces))],
        "ggml.bos_token_id": 2,
        "ggml.eos_token_id": 1,
        "ggml.unknown_token_id": 3,
        "ggml.padding_token_id": 0,
        "ggml.add_bos_token": True,
        "ggml.add_space_prefix": space_prefix,
    }


Pair = tuple[Tokenizer, Any]

KINDS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "qwen2": ("qwen2", lambda: byte_level_fields("qwen2")),
    "gpt-2": ("llama", lambda: byte_level_fields("gpt-2")),
    "llama-bpe": ("llama", lambda: byte_level_fields("llama-bpe")),
    "gemma3": ("gemma3", lambda: sentencepiece_fields(space_prefix=False)),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Our tokenizer and transformers', both from one GGUF file of a small trained vocabulary."""
    architecture, fields = KINDS[request.param]
    path = write_gguf(tmp_path_factory.mktemp(request.param) / "model.gguf", architecture, fields())
    return load_tokenizer(path), reference(path)


@settings(deadline=None, max_examples=150)
@given(text=texts)
def test_a_small_vocabulary_agrees_with_transformers(pair: Pair, text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False)
    if not text.startswith("<bos>"):
        assert ours.encode(text, add_special=True) == theirs.encode(text)


@settings(deadline=None, max_examples=150)
@given(text=texts)
def test_decoding_gives_the_text_back(pair: Pair, text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text, add_special=True)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    plain = ours.encode_plain(text)
    assert not ours.eos_ids.intersection(plain)
    if "▁" not in text:
        assert ours.decode(plain) == text


def test_the_small_vocabularies_name_their_special_tokens(pair: Pair) -> None:
    ours, theirs = pair
    assert ours.bos_id == theirs.bos_token_id and theirs.eos_token_id in ours.eos_ids
    assert ours.vocab_size == len(theirs) and ours.chat_template == theirs.chat_template
    assert ours.special_tokens["eos_token"] == theirs.eos_token
    if "<|endoftext|>" in ours.control_tokens:
        assert ours.eos_ids == {ours.control_tokens["<|endoftext|>"], ours.control_tokens["<|im_end|>"]}


def test_a_space_prefix_is_added_once(tmp_path: Path) -> None:
    fields = sentencepiece_fields(space_prefix=True)
    ours = load_tokenizer(write_gguf(tmp_path / "model.gguf", "llama", fields))
    theirs = reference(tmp_path / "model.gguf")
    for text in ("Hello world", "a", "", "x\ny"):
        assert ours.encode(text, add_special=True) == theirs.encode(text)


@pytest.mark.parametrize(("pre", "wanted"), [("llama-bpe", True), ("qwen2", False)])
def test_a_file_that_does_not_say_so_has_a_bos_where_its_family_has(tmp_path: Path, pre: str, wanted: bool) -> None:
    fields = byte_level_fields(pre)
    del fields["ggml.add_bos_token"]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", "llama", fields))
    assert tokenizer.add_bos is wanted
    assert (tokenizer.encode("a", add_special=True)[0] == tokenizer.bos_id) is wanted


@pytest.fixture(scope="module")
def real_pairs() -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            path = catalog.pull(name)
            made[name] = load_tokenizer(path), reference(path)
            if name == "smollm2-135m":
                # transformers doesn't know the pre-tokenizer `smollm` and takes GPT-2's, which keeps digits together
                made[name][1].backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
                )
        return made[name]

    return get


REAL = ["smollm2-135m", *(name for name in ("qwen2.5-coder-0.5b", "gemma3-270m") if catalog.find(name).present)]


@pytest.mark.model
@pytest.mark.parametrize("name", REAL)
@settings(deadline=None, max_examples=100)
@given(text=texts)
def test_real_models_agree_with_transformers(real_pairs: Callable[[str], Pair], name: str, text: str) -> None:
    ours, theirs = real_pairs(name)
    ids = ours.encode(text, add_special=True)
    assert ids == theirs.encode(text)
    # not the text: SmolLM2's vocabulary lacks the bytes of planes that no character is in, and drops them
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.model
def test_the_small_model_cuts_digits_apart_as_it_was_trained(small_model: Path) -> None:
    ours = load_tokenizer(small_model)
    assert [ours.decode([id]) for id in ours.encode("a  12²", add_special=False)] == ["a", "  ", "1", "2", "²"]
    assert ours.eos_ids == {0, 2} and ours.vocab_size == 49152 and ours.chat_template


def folder(path: Path, *, template: str = "in tokenizer_config.json") -> Path:
    """A Hugging Face folder with a small byte-level tokenizer that puts a BOS in front."""
    vocab, merges = train(400, byte_level=True)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|im_end|>", "</s>", "<|pause|>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.enable_truncation(4)
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "pad_token": None}
    if template == "in tokenizer_config.json":
        config["chat_template"] = template
    elif template == "named":
        config["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    else:
        (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [backend.token_to_id("<|pause|>")]}))
    return path


@pytest.mark.parametrize("template", ["in tokenizer_config.json", "named", "in a file of its own"])
def test_a_folder_is_read_whole(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(folder(tmp_path / "model", template=template))
    assert tokenizer.chat_template == template
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    names = ("<|im_end|>", "</s>", "<|pause|>")
    assert tokenizer.eos_ids == {tokenizer.control_tokens[name] for name in names}
    long = "Hello, world! " * 10
    ids = tokenizer.encode(long, add_special=True)
    assert ids[0] == tokenizer.bos_id and tokenizer.decode(ids) == long
    assert tokenizer.encode("<s>x", add_special=True).count(ids[0]) == 1
    assert tokenizer.encode(long, add_special=False) == ids[1:]


def test_control_tokens_are_found_from_the_left_and_the_longest_first(tmp_path: Path) -> None:
    fields = byte_level_fields("qwen2")
    fields["ggml.tokens"] = [*fields["ggml.tokens"][:-1], "<|im_end|><|im_end|>"]
    fields["ggml.token_type"] = [*fields["ggml.token_type"][:-1], 3]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", "qwen2", fields))
    text = "<<|im_end|><|im_end|><|im_end|>|im_end|>"
    assert list(tokenizer.control_spans(text)) == [(1, 21), (21, 31)]
    assert [text[a:b] for a, b in tokenizer.control_spans(text)] == ["<|im_end|><|im_end|>", "<|im_end|>"]


def test_a_long_text_does_not_stop_the_other_threads(pair: Pair) -> None:
    gaps, text = [0.0], " ".join(CORPUS) * 3000

    def tick() -> None:
        last = time.perf_counter()
        while not encoded.is_set():
            time.sleep(0.001)
            gaps.append(time.perf_counter() - last)
            last += gaps[-1]

    encoded = threading.Event()
    ticking = threading.Thread(target=tick)
    ticking.start()
    begun = time.perf_counter()
    pair[0].encode_plain(text)
    took = time.perf_counter() - begun
    encoded.set()
    ticking.join()
    assert took > 0.1 and max(gaps) < took / 2


names = st.lists(st.text("<|ab>", min_size=1, max_size=4), min_size=1, max_size=6)


@given(names=names, text=st.text("<|ab>", max_size=30))
def test_one_of_finds_the_longest_name_at_each_place(names: list[str], text: str) -> None:
    found, at = [], 0
    while at < len(text):
        fitting = [name for name in names if text.startswith(name, at)]
        if fitting:
            found.append(max(fitting, key=len))
        at += len(found[-1]) if fitting else 1
    assert re.findall(one_of(names), text) == found
    assert re.findall(one_of([]), text) == []


def test_finding_control_tokens_takes_time_in_proportion_to_the_text(pair: Pair) -> None:
    text = "<|im_start" * 100_000
    begun = time.thread_time()
    assert not list(pair[0].control_spans(text))
    assert time.thread_time() - begun < 1  # name by name and place by place: many seconds


def test_threads_that_want_control_tokens_do_not_disturb_those_that_do_not(pair: Pair) -> None:
    ours = pair[0]
    name = next(iter(ours.control_tokens))
    expected = {True: ours.encode(name * 50, add_special=False), False: ours.encode_plain(name * 50)}
    assert expected[True] != expected[False]

    def encode(control: bool) -> list[int]:
        return ours.encode(name * 50, add_special=False) if control else ours.encode_plain(name * 50)

    with ThreadPoolExecutor(8) as pool:
        kinds = [i % 3 == 0 for i in range(400)]
        assert list(pool.map(encode, kinds)) == [expected[kind] for kind in kinds]


def test_two_texts_are_encoded_at_once(pair: Pair) -> None:
    """A long text in one thread must not hold up the others; here both wait for each other inside."""
    met = threading.Barrier(2, timeout=10)

    def read() -> None:
        with pair[0]._mode.reading(False):
            met.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: read(), range(2)))


def test_half_a_surrogate_pair_is_an_error_not_a_crash(pair: Pair) -> None:
    with pytest.raises(ValueError, match="surrogate pair at 1"):
        pair[0].encode("a\ud800", add_special=True)


def test_a_row_that_pads_the_vocabulary_has_no_text(pair: Pair) -> None:
    assert pair[0].token_bytes(pair[0].vocab_size + 100) == b""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ggml.model": "bert"}, "'bert'; this engine reads 'gpt2' and 'llama'"),
        ({"ggml.pre": "klingon"}, "'klingon'; this engine knows .*default, .*qwen2"),
        ({"ggml.merges": ["nope nada"]}, "damaged"),
    ],
)
def test_a_file_this_engine_cannot_tokenise_with_is_explained(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen2", byte_level_fields("qwen2") | change)
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(path)


def test_a_folder_without_a_usable_tokenizer_is_explained(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="can't be read"):
        load_tokenizer(tmp_path)
    backend = Backend(models.WordLevel(vocab={"a": 0}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="only byte-level and SentencePiece"):
        load_tokenizer(tmp_path)


def test_splits_cover_every_character() -> None:
    for pattern in SPLITS.values():
        backend = pre_tokenizers.Split(Regex(pattern), "removed")
        assert [backend.pre_tokenize_str(text) for text in CORPUS] == [[] for _ in CORPUS]
