"""Chat deltas in any order become parts one after the other, and nothing of them is lost."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.api.chunk import Delta, Function, ReasoningDetail, ToolCall
from gateway.api.parts import Part, Parts, Step


def fragment(index: int | None, text: str, id: str | None = None, name: str | None = None) -> Delta:
    return Delta(tool_calls=[ToolCall(index, id, Function(name, text))])


def run(deltas: list[Delta], **options: Any) -> tuple[list[Part], list[Step]]:
    """The parts and the steps, which must be in order: one part at a time, each opened, grown and closed."""
    parts = Parts(**options)
    steps = [step for delta in deltas for step in parts.take(delta)] + parts.end()
    said = {part.index: "" for part in parts.row}
    now = -1
    is_open = False
    for what, part, text in steps:
        if what == "open":
            assert not is_open and part.index == now + 1
            now, is_open = part.index, True
        assert is_open and part.index == now
        said[part.index] += text
        is_open = what != "close"
    assert not is_open and now == len(parts.row) - 1
    assert said == {part.index: part.text for part in parts.row}
    return parts.row, steps


def test_fragments_of_two_calls_that_are_mixed() -> None:
    row, steps = run(
        [
            fragment(0, "", "a", "f"),
            fragment(0, '{"x"'),
            fragment(1, "", "b", "g"),
            fragment(1, "{"),
            fragment(0, ":1}"),
            fragment(1, "}"),
        ]
    )
    assert [(part.id, part.name, part.text) for part in row] == [("a", "f", '{"x":1}'), ("b", "g", "{}")]
    grown = [(step.part.index, step.text) for step in steps if step.what == "grow"]
    assert grown == [(0, '{"x"'), (0, ":1}"), (1, "{"), (1, "}")], "the second waits only while the first is not whole"


def test_calls_in_turn_are_not_held_back() -> None:
    parts = Parts()
    parts.take(fragment(0, "{}", "a", "f"))
    steps = parts.take(fragment(1, '{"y"', "b", "g"))
    assert [(step.what, step.part.index) for step in steps] == [("close", 0), ("open", 1), ("grow", 1)]


def test_calls_of_one_index_with_ids_of_their_own() -> None:
    """As some upstreams send parallel calls: all with the index 0, or with none."""
    for index in (0, None):
        row, _ = run([fragment(index, "{}", "a", "f"), fragment(index, '{"x":1}', "b", "g")])
        assert [(part.id, part.text) for part in row] == [("a", "{}"), ("b", '{"x":1}')]


def test_a_call_opens_once_its_name_is_known() -> None:
    row, steps = run([fragment(0, "", "a"), fragment(0, "{", None, "f"), fragment(0, "}")])
    assert [(step.what, step.text) for step in steps] == [("open", ""), ("grow", "{"), ("grow", "}"), ("close", "")]
    assert row[0].name == "f"


def test_arguments_that_are_an_object_already() -> None:
    row, _ = run([Delta(tool_calls=[ToolCall(0, "a", Function("f", {"x": 1}))])])
    assert json.loads(row[0].text) == {"x": 1}


def test_thinking_before_text_with_its_signature() -> None:
    signed = [ReasoningDetail(signature="S"), ReasoningDetail(data="D")]
    deltas = [Delta(reasoning_content="hm"), Delta(reasoning="m"), Delta(reasoning_details=signed), Delta("hi")]
    row, steps = run(deltas)
    assert [(part.kind, part.text, part.signature) for part in row] == [
        ("thinking", "hmm", "S"),
        ("redacted", "", "D"),
        ("text", "hi", ""),
    ]
    closed = next(step.part for step in steps if step.what == "close")
    assert closed.signature == "S", "it is there before the part is closed"
    assert [part.kind for part in run(deltas, thinking=False)[0]] == ["text"]


VALUES = st.dictionaries(st.text(max_size=3), st.text(max_size=8) | st.integers() | st.lists(st.booleans()), max_size=3)


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[list[str], list[tuple[int, str]]]:
    """(the arguments of some calls, their fragments in an order that mixes the calls)."""
    calls = [json.dumps(value, ensure_ascii=False) for value in draw(st.lists(VALUES, min_size=1, max_size=4))]
    left = dict(enumerate(calls))
    mixed = []
    while left:
        index = draw(st.sampled_from(sorted(left)))
        size = draw(st.integers(1, len(left[index])))
        mixed.append((index, left[index][:size]))
        left[index] = left[index][size:]
        left = {key: text for key, text in left.items() if text}
    return calls, mixed


@given(shuffled(), st.lists(st.integers(0, 30), max_size=3))
def test_no_order_of_fragments_loses_any(calls: tuple[list[str], list[tuple[int, str]]], texts: list[int]) -> None:
    whole, mixed = calls
    deltas = [fragment(i, "", f"call_{i}", f"f{i}") for i in range(len(whole))]
    deltas += [fragment(i, text) for i, text in mixed]
    for place in texts:
        deltas.insert(place, Delta("word"))
    row, _ = run(deltas)
    assert {part.id: part.text for part in row if part.kind == "tool"} == {f"call_{i}": s for i, s in enumerate(whole)}
    assert "".join(part.text for part in row if part.kind == "text") == "word" * len(texts)
