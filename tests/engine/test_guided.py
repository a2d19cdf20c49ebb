"""Grammars allow what they describe and nothing else, refuse what they can't enforce, and survive hostile ones."""

import json
import random
import subprocess
import sys
import time
from functools import partial
from typing import Any

import jsonschema
import pytest
import torch
from byte_words import allowed, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import guided, json_schema
from engine.guided import Grammar, GrammarError, Guide
from engine.logits import apply_grammars

WORDS = byte_tokenizer(control=["<|end|>"], added=['":', '"}', "true", "[1", "  "])
EOS = WORDS.eos_ids


def start(grammar: Grammar) -> Guide:
    return guided.compile_here(WORDS, grammar)


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the text is a whole answer."""
    guide = start(grammar)
    return all(guide.accept(token) for token in WORDS.encode_plain(text)) and allowed(guide) >= EOS


def walk(grammar: Grammar, seed: int, steps: int = 4000) -> str:
    """An answer drawn at random from what the masks allow."""
    draw, guide, out = random.Random(seed), start(grammar), []
    for _ in range(steps):
        options = sorted(allowed(guide))
        token = draw.choice(options)
        if EOS.intersection(options):  # where it may end, it does
            token = next(iter(EOS.intersection(options)))
        assert guide.accept(token)
        if token in EOS:
            return WORDS.decode(out)
        out.append(token)
    raise AssertionError("no end")


scalars = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-99, 99),
        st.integers(0, 50),
    ),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.sampled_from([1, "a", "é\n", None, True, 2.5]), min_size=1, max_size=3),
    ),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
    st.just({"type": "string", "format": "date"}),
)


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "key", "ü"])
    objects = st.builds(
        lambda fields, required: {
            "type": "object",
            "properties": fields,
            "required": [name for name in fields if name in required],
            "additionalProperties": False,
        },
        st.dictionaries(names, inner, max_size=3),
        st.sets(names),
    )
    arrays = st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)
    )
    return st.one_of(objects, arrays, st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner))


@settings(deadline=None, max_examples=120)
@given(schema=st.recursive(scalars, combined, max_leaves=5), seed=st.integers(0, 1000))
def test_whatever_the_masks_allow_is_valid_json_of_the_schema(schema: Any, seed: int) -> None:
    value = json.loads(walk(guided.from_json_schema(schema), seed))
    jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker(["date"]))


@pytest.mark.parametrize("text", ['{"a": [1, 2.5e3, "é🎉\\n"], "b": {}}', "{}", '{\n  "a": null\n}'])
def test_any_object_is_one_of_the_empty_schema_of_objects(text: str) -> None:
    grammar = guided.from_json_schema({"type": "object"})
    assert accepts(grammar, text) and not accepts(grammar, f"[{text}]") and not accepts(grammar, text[:-1])


def test_white_space_between_the_parts_of_json_has_an_end() -> None:
    grammar = guided.from_json_schema({"type": "object"})
    assert accepts(grammar, "{" + " " * 20 + "}") and not accepts(grammar, "{" + " " * 21 + "}")


def test_at_the_end_of_a_grammar_only_the_tokens_that_end_a_text_are_allowed() -> None:
    guide = start(guided.from_choice(["yes", "no"]))
    for token in WORDS.encode_plain("yes"):
        assert not EOS & allowed(guide) and guide.accept(token)
    assert allowed(guide) == EOS
    assert guide.accept(min(EOS)) and allowed(guide) == EOS


@pytest.mark.parametrize(
    "choices", [["a", "ab", "abc"], ['with "quotes"', "line\nbreak", "back\\slash"], ["你好", "🎉", "\x00", "\x7f\x1b"]]
)
def test_choices_are_taken_as_they_are(choices: list[str]) -> None:
    grammar = guided.from_choice(choices)
    assert all(accepts(grammar, choice) for choice in choices)
    assert not accepts(grammar, choices[0] + "!") and walk(grammar, 1) in choices


def test_a_pattern_matches_the_whole_answer() -> None:
    grammar = guided.from_regex(r"[a-c]{2}\d+(x|é)")
    assert accepts(grammar, "ab12é") and not accepts(grammar, "xab12é") and not accepts(grammar, "ab12éé")


def test_a_lark_grammar_may_hold_a_schema() -> None:
    grammar = guided.from_lark(
        'start: "call " NAME " " args\nNAME: /[a-z]+/\nargs: %json {"type": "object", "maxProperties": 0}'
    )
    assert accepts(grammar, "call f {}") and not accepts(grammar, 'call f {"a": 1}')


def test_a_wrong_token_is_told() -> None:
    guide = start(guided.from_choice(["yes"]))
    assert not guide.accept(WORDS.encode_plain("n")[0])
    assert guide.mask() is None and not guide.accept(WORDS.encode_plain("y")[0]) and "grammar" in guide.failure


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "propertees": {}}, "'propertees'"),
        ({"type": "object", "properties": {"a": {"type": "string", "nullable": True}}}, "#/properties/a .*'nullable'"),
        ({"$defs": {"x": {"uniqueItems": True}}, "$ref": "#/$defs/x"}, "#/\\$defs/x .*'uniqueItems'"),
        ({"anyOf": [{}, {"not": {}}]}, "#/anyOf/1 .*'not'"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"type": "object", "patternProperties": {"^a": {"contains": 1}}}, "'contains'"),
        ({"items": {"propertyNames": {}}}, "#/items .*'propertyNames'"),
        ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
        ({"type": "string", "format": "uri-reference"}, "format: uri-reference"),
        ({"type": "string", "format": "no-such"}, "format: no-such"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "pattern": "["}, "unclosed character class"),
        ({"type": "wizard"}, "wizard"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
        ({"$ref": "https://example.org/x"}, "example.org"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"properties": []}, "properties of the schema"),
        ({"anyOf": {}}, "anyOf of the schema"),
        ({"items": 3}, "#/items"),
        (False, "must be an object"),
        ([], "must be an object"),
        ("{", "not valid JSON"),
        ({"enum": ["x" * json_schema.MAX_BYTES]}, "bytes; the most is"),
    ],
)
def test_a_schema_that_would_not_be_enforced_is_refused_by_keyword(schema: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        start(guided.from_json_schema(schema))


def test_annotations_are_no_constraints() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "x",
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [{"if": 1}],
        "deprecated": True,
        "readOnly": True,
        "type": "integer",
        "$comment": "c",
    }
    assert accepts(guided.from_json_schema(schema), "7")
    assert accepts(
        guided.from_json_schema({"properties": {"not": {"const": {"if": 1}}}, "required": ["not"]}),
        '{"not": {"if": 1}}',
    )


@pytest.mark.parametrize(
    ("make", "source", "words"),
    [
        (guided.from_regex, "(", "unclosed group"),
        (guided.from_regex, "(?=x)y", "look-around"),
        (guided.from_regex, r"\bx", "lookarounds not supported"),
        (guided.from_regex, "a" * (guided.MAX_GRAMMAR_BYTES + 1), "bytes; the most is"),
        (guided.from_regex, "\ud800", "surrogate"),
        (guided.from_lark, 'root ::= "a"', "EBNF"),
        (guided.from_lark, 'start: other\nother[temperature=0.5]: "a"', "option temperature"),
        (guided.from_lark, "start: other", 'unknown name: "other"'),
        (guided.from_lark, 'start: %json {"type": "object", "if": 1}', "'if'"),
        (guided.from_lark, "start: %json {", "not valid JSON"),
        (guided.from_lark, "start: A\nA: /a/ & /b/", "no text matches"),
        (guided.from_lark, "start: @elsewhere", "elsewhere"),
        (guided.from_choice, [], "1 to 1000 choices"),
        (guided.from_choice, ["a", ""], "none of them empty"),
    ],
)
def test_a_wrong_grammar_is_explained_in_a_line(make: Any, source: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words) as error:
        start(make(source))
    assert "\n" not in str(error.value) and len(str(error.value)) < 800


HOSTILE = {
    "chain of references": lambda n: guided.from_json_schema(
        {
            "$ref": "#/$defs/r0",
            "$defs": {f"r{i}": {"properties": {"a": {"$ref": f"#/$defs/r{i + 1}"}}} for i in range(n)} | {f"r{n}": {}},
        }
    ),
    "chain of rules": lambda n: guided.from_lark(
        "start: r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(n)) + f'r{n}: "z"'
    ),
    "chain of terminals": lambda n: guided.from_lark(
        "start: R0\n" + "".join(f'R{i}:"x"R{i + 1}\n' for i in range(n)) + f'R{n}: "z"'
    ),
    "parentheses": lambda n: guided.from_regex("(" * n + "a" + ")" * n),
    "many choices": lambda n: guided.from_json_schema({"enum": [f"value {i}" for i in range(n)]}),
    "many properties": lambda n: guided.from_json_schema({"properties": {f"p{i}": {} for i in range(n)}}),
    "nested repeats": lambda n: guided.from_regex("((a{1,1000}){1,1000}){1,1000}"),
    "look back": lambda n: guided.from_regex("[ab]*a[ab]{5000}"),
    "ambiguity": lambda n: guided.from_lark('start: x x x x x x x x\nx: "a"* | "a"+ | x x |'),
    "doubling": lambda n: guided.from_lark(
        "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "z"'
    ),
}


async def try_hostile() -> None:
    """Run in a process of its own by the test below: what goes wrong here is a crash."""
    for name, make in HOSTILE.items():
        for n in (500, 2000, 4000, 7000, 100_000):
            begun = time.monotonic()
            try:
                guide = (await guided.compile(WORDS, partial(make, n)))()
            except GrammarError:
                guide = None
            compiled = time.monotonic()
            for token in WORDS.encode_plain('"abababbazzzzz' if "choice" in name else "aabababbaaaaaa") * 5:
                if guide is None or guide.mask() is None or not guide.accept(token):
                    break
            ended = time.monotonic()
            print(f"{name}, {n}: {compiled - begun:.2f} s, {ended - compiled:.2f} s", flush=True)
            assert compiled - begun < 10 and ended - compiled < 10


def test_hostile_grammars_take_bounded_time_and_memory_and_never_the_process() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))"
    run = f"{limit}; import asyncio, test_guided; asyncio.run(test_guided.try_hostile())"
    code = f"import sys; sys.path[:0] = ['.', 'tests/engine']; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-400:] + done.stderr[-800:]


def test_a_grammar_that_takes_the_step_loop_too_much_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided, "MAX_SECONDS", 0.02)
    monkeypatch.setattr(guided, "SECONDS_PER_TOKEN", 1e-4)
    guide, token = start(HOSTILE["ambiguity"](0)), WORDS.encode_plain("a")[0]
    accepted = 0
    while guide.accept(token) and accepted < 500:
        accepted += 1
        guide.mask()
    assert 0 < accepted < 240 and guide.mask() is None and "too much time" in guide.failure
    plain = start(guided.from_regex("a*"))
    assert all(plain.accept(token) and plain.mask() is not None for _ in range(500))


async def test_the_same_grammar_is_compiled_once() -> None:
    before = guided._compiled.cache_info()
    grammar = guided.from_choice([f"once {time.monotonic()}"])
    first, second = [(await guided.compile(WORDS, lambda: grammar))() for _ in range(2)]
    after = guided._compiled.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)
    assert first.accept(WORDS.encode_plain("o")[0]) and second.accept(WORDS.encode_plain("o")[0])


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3], [2]])
@pytest.mark.parametrize("vocabulary", [WORDS.vocab_size, WORDS.vocab_size + 77])
def test_masks_touch_only_the_rows_that_have_a_grammar(rows: list[int], vocabulary: int) -> None:
    logits = torch.randn(4, vocabulary)
    before = logits.clone()
    guides = [start(guided.from_choice([chr(97 + row)])) for row in range(4)]
    apply_grammars(logits, [(row, guides[row]) for row in rows])
    for row in range(4):
        if row in rows:
            token = WORDS.encode_plain(chr(97 + row))[0]
            assert logits[row].isfinite().nonzero().flatten().tolist() == [token]
            assert logits[row, token] == before[row, token]
        else:
            assert torch.equal(logits[row], before[row])
