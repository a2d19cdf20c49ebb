"""Tool calls: declared rightly or refused by name, enforced by grammars, and read back however the text is cut."""

import json
import random
from typing import Any

import jsonschema
import pytest
from byte_words import allowed, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import guided
from engine.detokenizer import Detokenizer
from engine.guided import GrammarError
from engine.pieces import Piece, Splitter
from engine.tokenizer import Tokenizer
from engine.tools.declared import ToolError, Tools, read_tools
from engine.tools.formats import Format, format_of, grammar_of, needs_grammar, splitter_of

HERMES_TEMPLATE = "{{ tools }}<tool_call></tool_call>"
LLAMA_TEMPLATE = '{{ tools }}{"name": function name, "parameters": …}'
HERMES = byte_tokenizer(HERMES_TEMPLATE, added=["<tool_call>", "</tool_call>"])
HERMES_CONTROL = byte_tokenizer(HERMES_TEMPLATE, control=["<tool_call>", "</tool_call>"])
LLAMA = byte_tokenizer(LLAMA_TEMPLATE, control=["<|python_tag|>", "<|eom_id|>"])
FORMATS: list[Format] = ["hermes", "llama"]
KEY = {"hermes": "arguments", "llama": "parameters"}

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


DECLARED = [
    function("weather", description="d", parameters=WEATHER, strict=True),
    function("now"),
    function("any_thing", parameters={"type": "object"}),
]


def tools(choice: Any = "auto", parallel: bool = True, declared: Any = DECLARED) -> Tools:
    read = read_tools(declared, choice, parallel)
    assert read is not None
    return read


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def run(splitter: Splitter, parts: list[str]) -> list[Piece]:
    return [piece for part in parts for piece in splitter.push(part)] + splitter.finish()


def merged(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and the calls as name and arguments; checks the order that clients rely on."""
    calls: list[tuple[str, str]] = []
    ids = set()
    for piece in pieces:
        assert bool(piece.content) + bool(piece.reasoning) + (piece.call is not None) == 1
        if piece.call is None:
            continue
        number, id, name, arguments = piece.call
        if number == len(calls):
            assert id is not None and id not in ids and name is not None
            ids.add(id)
            calls.append((name, arguments))
        else:
            assert number == len(calls) - 1 and id is None and name is None and arguments
            calls[number] = (calls[number][0], calls[number][1] + arguments)
    return "".join(piece.content for piece in pieces), calls


def written(format: Format, calls: list[tuple[str, str]]) -> str:
    objects = [f'{{"name": "{name}", "{KEY[format]}": {arguments}}}' for name, arguments in calls]
    return "; ".join(objects) if format == "llama" else "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects)


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 5),
        st.text(st.sampled_from('a"\\{}[]:,é你🎉\n<tool_call>'), max_size=6),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text('ab}"é', max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.builds(
    lambda value, ascii, indent: json.dumps(value, ensure_ascii=ascii, indent=indent),
    st.dictionaries(st.text('ab}"é', max_size=3), values, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
)
calls_made = st.lists(st.tuples(st.sampled_from(["weather", "now", "any_thing"]), arguments), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(format=st.sampled_from(FORMATS), calls=calls_made, before=st.sampled_from(["", "I'll look.\n", "你好 < "]))
def test_calls_cut_at_every_place_add_up_to_the_whole(
    format: Format, calls: list[tuple[str, str]], before: str
) -> None:
    before = before if format == "hermes" else ""
    text = before + written(format, calls)
    expected = (before.rstrip(), calls)
    assert merged(run(splitter_of(format, tools()), [text])) == expected
    assert merged(run(splitter_of(format, tools()), list(text))) == expected
    for at in range(len(text) + 1):
        assert merged(run(splitter_of(format, tools()), [text[:at], text[at:]])) == expected


@settings(deadline=None, max_examples=30)
@given(format=st.sampled_from(FORMATS), calls=calls_made)
def test_calls_whose_every_byte_is_a_token_add_up_to_the_whole(format: Format, calls: list[tuple[str, str]]) -> None:
    tokenizer = LLAMA if format == "llama" else HERMES_CONTROL
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.push(token) for token in tokenizer.encode_plain(written(format, calls))] + [
        detokenizer.finish()
    ]
    found = merged(run(splitter_of(format, tools()), parts))
    assert found == ("", calls)
    assert [json.loads(arguments) for _, arguments in found[1]] == [json.loads(arguments) for _, arguments in calls]


pieces = st.sampled_from(
    [
        '{"name": "now", "arguments": {',
        "}",
        "}}",
        '"',
        "<tool_call>",
        "</tool_call>",
        "\n",
        "text ",
        "{",
        ";",
        "<|python_tag|>",
        '"a": 1',
        "<tool",
    ]
)


@settings(deadline=None, max_examples=300)
@given(format=st.sampled_from(FORMATS), text=st.lists(pieces, max_size=9).map("".join), at=st.integers(0, 60))
def test_any_text_gives_the_same_pieces_however_it_is_cut(format: Format, text: str, at: int) -> None:
    whole = merged(run(splitter_of(format, tools()), [text]))
    assert merged(run(splitter_of(format, tools()), list(text))) == whole
    assert merged(run(splitter_of(format, tools()), [text[:at], text[at:]])) == whole
    if format == "hermes" and "<tool_call>" not in text and not text.lstrip().startswith("{"):
        assert whole == (text, [])


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("hermes", "plain", ("plain", [])),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', ("", [("now", "{}")])),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call> done ', ("done", [("now", "{}")])),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}', ("", [("now", '{"a": 1}')])),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', ("", [("now", '{"a": 1}')])),
        (
            "hermes",
            '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
            ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', []),
        ),
        ("hermes", "<tool_call>not json", ("<tool_call>not json", [])),
        ("hermes", '<tool_call>{"name": "now", "argum', ('<tool_call>{"name": "now", "argum', [])),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1, 2', ("", [("now", '{"a": [1, 2')])),
        (
            "hermes",
            '\n{"name": "now", "arguments": {"a": 1}}\n{"name": "now"}',
            ("", [("now", '{"a": 1}'), ("now", "{}")]),
        ),
        ("hermes", ' {"name": "nobody", "arguments": {}}', (' {"name": "nobody", "arguments": {}}', [])),
        ("hermes", '{"answer": [1]} <tool_call>{"name": "now"}', ('{"answer": [1]}', [("now", "{}")])),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>{"b": 1}', ('{"b": 1}', [("now", "{}")])),
        ("hermes", 'See {"name": "now", "arguments": {}}', ('See {"name": "now", "arguments": {}}', [])),
        ("llama", 'text {"name": "now"}', ('text {"name": "now"}', [])),
        (
            "llama",
            '<|python_tag|>{"type": "function", "name": "now", "parameters": {"a": 1}}',
            ("", [("now", '{"a": 1}')]),
        ),
        ("llama", '{"answer": 42}', ('{"answer": 42}', [])),
        (
            "llama",
            '{"name": "nobody", "parameters": {}} and more',
            ('{"name": "nobody", "parameters": {}} and more', []),
        ),
        ("llama", '<|python_tag|>print("x")', ('<|python_tag|>print("x")', [])),
        ("llama", '  {"name": "now", "parameters": {}}\n{"name": "now", "parameters": {}}', ("", [("now", "{}")] * 2)),
    ],
)
def test_what_models_write_is_read(format: Format, text: str, expected: Any) -> None:
    assert merged(run(splitter_of(format, tools()), [text])) == expected
    assert merged(run(splitter_of(format, tools()), list(text))) == expected


@pytest.mark.parametrize("format", FORMATS)
def test_an_answer_in_json_is_not_held_back_until_its_end(format: Format) -> None:
    splitter = splitter_of(format, tools())
    assert merged(splitter.push('{"answer": ')) == ('{"answer": ' if format == "llama" else '{"answer":', [])


@pytest.mark.parametrize("format", FORMATS)
def test_without_parallel_calls_only_the_first_is_shown(format: Format) -> None:
    text = written(format, [("now", "{}"), ("weather", '{"city": "a"}')])
    assert merged(run(splitter_of(format, tools(parallel=False)), [text])) == ("", [("now", "{}")])


def test_the_format_is_known_from_the_template() -> None:
    assert [format_of(t) for t in (HERMES, HERMES_CONTROL, LLAMA)] == ["hermes", "hermes", "llama"]
    assert format_of(byte_tokenizer(LLAMA_TEMPLATE)) is None and format_of(byte_tokenizer(None)) is None
    assert format_of(byte_tokenizer("<tool_call><function=f>")) is None


MODELS: list[tuple[Format, Tokenizer]] = [("hermes", HERMES), ("hermes", HERMES_CONTROL), ("llama", LLAMA)]


def spell(tokenizer: Tokenizer, ids: list[int]) -> str:
    names = {id: name.encode() for name, id in tokenizer.control_tokens.items()}
    return b"".join(names.get(id) or tokenizer.token_bytes(id) for id in ids).decode()


def follows(tokenizer: Tokenizer, wanted: Tools, format: Format, text: str) -> bool:
    """Whether the answer is allowed; tags are written as the model would."""
    grammar = grammar_of(format, wanted, tokenizer)
    guide = guided.compile_here(tokenizer, grammar)
    ids = tokenizer.encode(text, add_special=False)
    return all(guide.accept(id) for id in ids) and allowed(guide) >= tokenizer.eos_ids


@pytest.mark.parametrize(("format", "tokenizer"), MODELS)
@pytest.mark.parametrize("choice", ["required", named("weather")])
def test_an_answer_that_must_call_is_calls_of_the_schema(format: Format, tokenizer: Tokenizer, choice: Any) -> None:
    wanted = tools(choice, declared=[DECLARED[0], function("now")])
    grammar = grammar_of(format, wanted, tokenizer)
    for seed in range(8):
        draw, guide, out = random.Random(seed), guided.compile_here(tokenizer, grammar), []
        while len(out) < 3000:
            options = allowed(guide)
            ends = options & tokenizer.eos_ids
            token = min(ends) if ends else draw.choice(sorted(options))
            assert guide.accept(token)
            if ends:
                break
            out.append(token)
        content, calls = merged(run(splitter_of(format, wanted), [spell(tokenizer, out)]))
        assert content == "" and len(calls) == 1
        name, arguments = calls[0]
        assert name == "weather" or (choice == "required" and name == "now")
        jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"const": {}})


@pytest.mark.parametrize(("format", "tokenizer"), MODELS)
def test_several_calls_are_allowed_where_they_are_wanted(format: Format, tokenizer: Tokenizer) -> None:
    two = written(format, [("now", "{}"), ("weather", '{"city": "é", "days": 3}')])
    assert follows(tokenizer, tools("required"), format, two)
    assert not follows(tokenizer, tools("required", parallel=False), format, two)
    assert not follows(tokenizer, tools(named("now")), format, two)
    assert not follows(tokenizer, tools("required"), format, "No.")


@pytest.mark.parametrize("tokenizer", [HERMES, HERMES_CONTROL])
def test_a_model_that_may_choose_writes_freely_and_calls_rightly(tokenizer: Tokenizer) -> None:
    one, two = (
        written("hermes", [("now", "{}")]),
        written("hermes", [("any_thing", '{"x": [1]}'), ("weather", '{"city": "a"}')]),
    )
    for text in ("", "Hello <b>, {}\n\n 你好", one, f"I'll look.\n{one}", two, f"{two}\ndone"):
        assert follows(tokenizer, tools(), "hermes", text), text
    wrong = [
        written("hermes", [call])
        for call in [("nobody", "{}"), ("weather", "{}"), ("weather", '{"city": 1}'), ("any_thing", "[]")]
    ]
    for text in (*wrong, "<tool_call>", f"Hm. {wrong[0]}", one[:-1]):
        assert not follows(tokenizer, tools(), "hermes", text), text
    assert not follows(tokenizer, tools(parallel=False), "hermes", two)


def test_a_llama_model_that_may_choose_is_free_unless_a_function_is_strict() -> None:
    assert not needs_grammar("llama", tools(declared=DECLARED[1:])) and needs_grammar("llama", tools())
    assert needs_grammar("llama", tools("required", declared=DECLARED[1:])) and needs_grammar("hermes", tools())
    one = written("llama", [("weather", '{"city": "a"}')])
    for text in ("", "Hello {}\n", "<b>", one, f"{one}; {one}"):
        assert follows(LLAMA, tools(), "llama", text), text
    for text in ('{"a": 1}', ' {"a": 1}', written("llama", [("weather", "{}")]), "<|python_tag|>x", f"{one} and"):
        assert not follows(LLAMA, tools(), "llama", text), text


def test_an_answer_may_be_calls_or_json() -> None:
    answer = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    one = written("hermes", [("now", "{}")])
    for text, right in (
        (one, True),
        ('{"x": 1}', True),
        ("text", False),
        ('{"x": "1"}', False),
        (f"{one} text", False),
    ):
        grammar = grammar_of("hermes", tools(), HERMES, answer)
        guide = guided.compile_here(HERMES, grammar)
        ids = HERMES.encode(text, add_special=False)
        assert (all(guide.accept(id) for id in ids) and allowed(guide) >= HERMES.eos_ids) is right


@pytest.mark.parametrize(
    ("declared", "choice", "param", "words"),
    [
        ([], "required", "tool_choice", "only allowed together with tools"),
        ([function("f")], {"type": "function", "function": {"name": "f", "x": 1}}, "tool_choice", "unknown field 'x'"),
        ([{"type": "code"}], None, "tools[0]", "must look like"),
        (["f"], None, "tools[0]", "must look like"),
        ([{**function("f"), "x": 1}], None, "tools[0]", "unknown field 'x'"),
        ([function("f", arguments={})], None, "tools[0].function", "unknown field 'arguments'"),
        ([function("no spaces")], None, "tools[0].function.name", "1 to 64 letters"),
        ([function("f"), function("f")], None, "tools[1].function.name", "two functions"),
        ([function("f", parameters=[])], None, "tools[0].function.parameters", "JSON Schema"),
        ([function("f", strict="yes")], None, "tools[0].function.strict", "true or false"),
        ([function("f", description=1)], None, "tools[0].function.description", "string"),
        ([function("f")] * 129, None, "tools", "the most is 128"),
        ([function("f")], named("g"), "tool_choice", "'g'"),
        ([function("f")], "always", "tool_choice", "auto, none, required"),
        ([function("f")], {"type": "allowed_tools"}, "tool_choice", "auto, none, required"),
        ([function("f", parameters={"not": {}}, strict=True)], None, "tools[0].function.parameters", "'not'"),
        ([function("f", parameters={"not": {}})], "required", "tools[0].function.parameters", "'not'"),
        (
            [function("f"), function("g", parameters={"type": "string"})],
            named("g"),
            "tools[1].function.parameters",
            "type object",
        ),
    ],
)
def test_bad_tools_are_named(declared: Any, choice: Any, param: str, words: str) -> None:
    with pytest.raises(ToolError, match=words) as error:
        read_tools(declared, choice, True)
    assert error.value.param == param


def test_schemas_that_nobody_enforces_may_have_any_keyword() -> None:
    assert tools(declared=[function("f", parameters={"not": {}}), function("g")]).functions[0].parameters == {"not": {}}
    assert tools(named("g"), declared=[function("f", parameters={"not": {}}), function("g")]).callable[0].name == "g"


def test_no_tools_are_shown_where_none_shall_be_called() -> None:
    assert read_tools(DECLARED, "none", True) is None and read_tools([], None, True) is None
    assert read_tools([], "auto", True) is None


def test_templates_see_what_was_declared_without_strict() -> None:
    assert tools().declared[0] == function("weather", description="d", parameters=WEATHER)


def test_schemas_of_all_functions_together_have_a_size() -> None:
    big = {"type": "object", "properties": {"a": {"enum": ["x" * 200_000]}}}
    with pytest.raises(GrammarError, match="the most is"):
        grammar_of("hermes", tools("required", declared=[function(name, parameters=big) for name in "ab"]), HERMES)
