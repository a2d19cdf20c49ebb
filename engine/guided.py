"""Guided decoding: at each step only tokens that a grammar allows may be sampled.

Grammars are compiled, and the allowed tokens found, by llguidance: an Earley parser over regular-expression
derivatives that walks a trie of the vocabulary. Compiling takes a millisecond to a second and recurses with the depth
of the grammar, so it has a thread of its own with a large stack; a step costs well below a millisecond a request.
"""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from numpy.typing import NDArray

from engine import json_schema
from engine.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 1 << 16
MAX_CHOICES = 1000
COMPILED = 64
"""How many compiled grammars are kept, the latest used ones."""

STACK_BYTES = 256 << 20
"""Of the compiling thread. The library recurses about 10 KB a rule that leads to another; a grammar within the size
limits has a few thousand. Only what is used takes memory."""

LIMITS = LLParserLimits(
    step_max_items=20_000,  # tens of ms at most; a schema of 300 optional properties needs 6,000
    max_lexer_states=20_000,  # 1 to 2 KB each
    verbose_errors=False,
)

MAX_SECONDS, SECONDS_PER_TOKEN = 2.0, 0.01
"""What finding one answer's allowed tokens may take of the step loop. An ordinary grammar takes a hundredth of it; one
that is made to be ambiguous takes 0.5 s a token within the limits above."""

JSON_SPACE = r"[ \n\r\t]{1,20}"
"""What may stand between the parts of a JSON text: bounded, for small models like to go on with white space."""


class GrammarError(ValueError):
    """The grammar is wrong, or takes too much to enforce; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match, in the form that the compiler reads. Make one with the functions below."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


def from_json_schema(schema: Any) -> Grammar:
    """Any JSON text that is valid under `schema`, an object or JSON text of one."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is not valid JSON: {error}") from error
    if isinstance(schema, bool):
        raise GrammarError("the schema must be an object")
    try:
        return Grammar("json_schema", json_schema.check(schema))
    except json_schema.SchemaError as error:
        raise GrammarError(str(error)) from error


def from_regex(pattern: str) -> Grammar:
    r"""A text that matches the pattern as a whole: Rust's syntax, without look-around and word borders.

    `\d`, `\w` and `\s` stand for ASCII characters only.
    """
    return sized(Grammar("regex", pattern))


def from_choice(choices: Sequence[str]) -> Grammar:
    """One of the texts, exactly."""
    if not choices or len(choices) > MAX_CHOICES or not all(choices):
        raise GrammarError(f"give 1 to {MAX_CHOICES} choices, none of them empty")
    # What JSON leaves as it is and the grammar's reader does not.
    options = " | ".join(json.dumps(choice, ensure_ascii=False).replace("\x7f", r"\u007f") for choice in choices)
    return sized(Grammar("lark", f"start: {options}"))


_OPTIONS = re.compile(r"^\s*[\w-]+\s*\[[^\]\n]*\b(temperature|stop)\b[^\]\n]*\]\s*:", re.MULTILINE)
_INLINE_SCHEMA = re.compile(r"%json\s*")


def from_lark(source: str) -> Grammar:
    """A text of the rule `start`: Lark's syntax as llguidance reads it, with `%json {…}` for a JSON Schema."""
    if re.search(r"^\s*[\w-]+\s*::=", source, re.MULTILINE):
        raise GrammarError("the grammar is written in EBNF (::=): write it for Lark, as `start: …`")
    if option := _OPTIONS.search(source):
        raise GrammarError(f"a rule has the option {option[1]}, which is not supported: leave it out")
    for place in _INLINE_SCHEMA.finditer(source):
        try:
            json_schema.check(json.JSONDecoder().raw_decode(source, place.end())[0])
        except json_schema.SchemaError as error:
            raise GrammarError(f"in %json, {error}") from error
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"what follows %json is not valid JSON: {error}") from error
    return sized(Grammar("lark", source))


def sized(grammar: Grammar, most: int = MAX_GRAMMAR_BYTES) -> Grammar:
    """The grammar, unless it is too large or no text."""
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError("the grammar is not valid Unicode: it has half a surrogate pair") from error
    if size > most:
        raise GrammarError(f"the grammar has {size} bytes; the most is {most}: make it smaller")
    return grammar


class Guide:
    """One answer's place in its grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._words = -(-vocabulary // 32)
        self._left = MAX_SECONDS
        """CPU seconds that it may still take."""

    def mask(self) -> NDArray[np.int32] | None:
        """Bits of the tokens that may come next; at the end of the grammar those that end a text, and only they.

        None when the grammar can't be followed any further: then `accept` refuses whatever comes.
        """
        if self._left < 0:
            return None
        words = np.zeros(self._words, np.int32)
        begun = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._left -= time.thread_time() - begun
        return None if self._matcher.is_error() else words

    def accept(self, token: int) -> bool:
        """Go on past a sampled token; False when the grammar does not allow it or reached a limit."""
        if self._left < 0:
            return False
        begun = time.thread_time()
        accepted = self._matcher.consume_token(token)
        self._left += SECONDS_PER_TOKEN - (time.thread_time() - begun)
        return accepted

    @property
    def failure(self) -> str:
        """Why `accept` said no."""
        reason = "it takes too much time" if self._left < 0 else _first_line(self._matcher.get_error())
        return f"The answer's grammar can't be followed any further: {reason}."


async def compile(tokenizer: Tokenizer, read: Callable[[], Grammar]) -> Callable[[], Guide]:
    """What makes a guide for each answer to a request, whose grammar `read` gives. Raises GrammarError."""
    return await asyncio.get_running_loop().run_in_executor(_compiler(), _read_and_compile, tokenizer, read)


def _read_and_compile(tokenizer: Tokenizer, read: Callable[[], Grammar]) -> Callable[[], Guide]:
    matcher = _compiled(tokenizer, read())
    return lambda: Guide(matcher.deep_copy(), tokenizer.vocab_size)


def compile_here(tokenizer: Tokenizer, grammar: Grammar) -> Guide:
    """One guide, compiled in the caller's thread, whose stack may be too small for a deep grammar."""
    return Guide(_compiled(tokenizer, grammar).deep_copy(), tokenizer.vocab_size)


@lru_cache(maxsize=1)
def _compiler() -> ThreadPoolExecutor:
    """One thread: what several hostile grammars take, they take one after the other."""
    executor = ThreadPoolExecutor(1, "grammar")
    usual = threading.stack_size(STACK_BYTES)
    try:
        executor.submit(int).result()
    finally:
        threading.stack_size(usual)
    return executor


@lru_cache(maxsize=COMPILED)
def _compiled(tokenizer: Tokenizer, grammar: Grammar) -> LLMatcher:
    if grammar.kind == "json_schema":
        options = {"whitespace_pattern": JSON_SPACE}
        source = LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)  # type: ignore[arg-type]
    elif grammar.kind == "regex":
        source = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.text, 'dws')}/")
    else:
        source = LLMatcher.grammar_from_lark(grammar.text)
    matcher = LLMatcher(_vocabulary(tokenizer), source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.deep_copy().compute_bitmask()  # warms what copies share
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            reason = _first_line(first.get_error())
            nothing = reason.startswith("NoExtension")
            raise GrammarError("no text matches the grammar" if nothing else f"the grammar is too complex: {reason}")
        return matcher
    raise GrammarError(_explain(matcher.get_error()))


@lru_cache(maxsize=16)
def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """The vocabulary as a trie; takes up to a second, so that a server makes it before the first request."""
    return LLTokenizer(_Words(tokenizer), n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.eos_ids))


class _Words(TokenizerWrapper):
    """What the library asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        names = {id: name.encode() for name, id in tokenizer.control_tokens.items()}
        self.is_tokenizer_wrapper = True
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(names)
        self.tokens = [names.get(id) or tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self._encode = tokenizer.encode_plain

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode() if isinstance(text, bytes) else text)


def warm_up(tokenizer: Tokenizer) -> None:
    """Prepare what all grammars of a model share."""
    if tokenizer.eos_ids:
        _vocabulary(tokenizer)


_KEYS = re.compile(r'Unimplemented keys: \["(?P<first>[^"]*)"')


def _explain(message: str) -> str:
    """The library's sentence as ours: the keyword where it names one, else its reason without the listing."""
    if keys := _KEYS.search(message):
        return f"the schema has the keyword {keys['first']!r}, which is not supported: leave it out"
    lines = [line.strip() for line in message.splitlines()]
    reason = next((line for line in lines if line.startswith("error:")), "").removeprefix("error:").strip()
    first = _first_line(message)
    return f"{first.removesuffix('regex parse error:').strip(' :')}: {reason}" if reason else first


def _first_line(message: str) -> str:
    line = message.strip().splitlines()[0] if message.strip() else ""
    return line if len(line) <= 300 else f"{line[:300]}…"
