"""Thinking is told apart from the answer in text, in token counts and under a grammar, however the text is cut."""

import pytest
from byte_words import allowed, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import guided
from engine.pieces import PlainText
from engine.reasoning import AfterThinking, ReasoningSplitter, ThinkingMeter, phase_after, thinks
from engine.tools.declared import read_tools
from engine.tools.formats import splitter_of

TOKENS = byte_tokenizer("{{ messages }}</think>", added=["<think>", "</think>"])
CONTROL = byte_tokenizer(None, control=["<think>", "</think>"])
PLAIN = byte_tokenizer("</think>")


def split(parts: list[str], opened: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(PlainText(), opened)
    pieces = [piece for part in parts for piece in splitter.push(part)] + splitter.finish()
    assert all(bool(piece.content) != bool(piece.reasoning) for piece in pieces)
    return "".join(piece.reasoning for piece in pieces), "".join(piece.content for piece in pieces)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm. < 3?\n</think>\n\nFour.", False, ("Hm. < 3?", "Four.")),
        ("Hm.\n\nYes.\n</think>\n\nFour. ", True, ("Hm.\n\nYes.", "Four. ")),
        ("\n<think>\n\n</think>\n\nFour.", False, ("", "Four.")),
        ("Four. <think>no</think>", False, ("", "Four. <think>no</think>")),
        ("  Four.", False, ("", "  Four.")),
        ("<thin", False, ("", "<thin")),
        ("<think>cut sho", False, ("cut sho", "")),
        ("cut </thin", True, ("cut </thin", "")),
        ("", True, ("", "")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
    ],
)
def test_thinking_is_taken_off_the_front(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split([text], opened) == expected
    assert split(list(text), opened) == expected


parts = st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "你", "<", "/think>", "<thi"]), max_size=9)


@settings(deadline=None, max_examples=300)
@given(text=parts.map("".join), opened=st.booleans())
def test_the_split_does_not_depend_on_where_the_text_is_cut(text: str, opened: bool) -> None:
    whole = split([text], opened)
    for at in range(len(text) + 1):
        assert split([text[:at], text[at:]], opened) == whole


@pytest.mark.parametrize("tokenizer", [TOKENS, CONTROL, PLAIN])
@settings(deadline=None, max_examples=100)
@given(thought=st.text("ab <\n", max_size=8), answer=st.text("xy\n", max_size=5), opened=st.booleans())
def test_tokens_up_to_the_closing_mark_are_thinking(tokenizer, thought: str, answer: str, opened: bool) -> None:
    head = tokenizer.encode(f"{'' if opened else '<think>'}{thought}</think>", add_special=False)
    meter = ThinkingMeter(tokenizer.spell, opened)
    for i, token in enumerate(head):
        meter.push(token)
        assert meter.count == i + 1 or not meter.begun
    for token in tokenizer.encode(answer, add_special=False):
        meter.push(token)
    assert meter.count == len(head) and not meter.inside


@pytest.mark.parametrize("text", ["Four.", " \n<thin", "", "x<think>y</think>"])
def test_an_answer_without_thinking_has_none(text: str) -> None:
    meter = ThinkingMeter(TOKENS.spell, False)
    for token in TOKENS.encode(text, add_special=False):
        meter.push(token)
    assert meter.count == 0 and not meter.inside


def constrained(opened: bool) -> AfterThinking:
    grammar = guided.compile_here(TOKENS, guided.from_choice(["yes"]))
    return AfterThinking(grammar, ThinkingMeter(TOKENS.spell, opened), TOKENS.token_id("<think>"))


def test_a_grammar_waits_for_the_end_of_the_thinking() -> None:
    guide = constrained(opened=True)
    for token in TOKENS.encode("no, no</think>", add_special=False):
        assert guide.mask() is None and guide.accept(token)
    for token in TOKENS.encode_plain("yes"):
        assert allowed(guide) == {token} and guide.accept(token)
    assert allowed(guide) == TOKENS.eos_ids


def test_under_a_grammar_a_model_may_begin_to_think_or_answer_at_once() -> None:
    think, first = TOKENS.token_id("<think>"), TOKENS.encode_plain("y")[0]
    assert think is not None
    thinking, answering = constrained(False), constrained(False)
    assert allowed(thinking) == {think, first}
    assert thinking.accept(think) and thinking.mask() is None
    assert answering.accept(first) and allowed(answering) == {TOKENS.encode_plain("e")[0]}
    assert not constrained(False).accept(TOKENS.encode_plain("n")[0])


def test_a_model_thinks_when_its_template_or_vocabulary_says_so() -> None:
    assert thinks(TOKENS) and thinks(CONTROL) and thinks(PLAIN)
    assert not thinks(byte_tokenizer("{{ messages }}"))


@pytest.mark.parametrize("tokenizer", [TOKENS, CONTROL, PLAIN])
@pytest.mark.parametrize(
    ("prompt", "phase"),
    [
        ("a<think>\n", "thinking"),
        ("a<think>\n\n</think>\n\n", "answering"),
        ("", "undecided"),
        ("<think>a", "undecided"),
    ],
)
def test_a_prompt_may_open_or_close_the_thinking(tokenizer, prompt: str, phase: str) -> None:
    assert phase_after(tokenizer.encode(prompt, add_special=False), tokenizer.spell) == phase


def test_a_model_that_thinks_may_call_tools_after_it() -> None:
    tools = read_tools([{"type": "function", "function": {"name": "now"}}], None, True)
    assert tools is not None
    text = '<think>\n<tool_call> or not?\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for parts in ([text], list(text)):
        splitter = ReasoningSplitter(splitter_of("hermes", tools), False)
        pieces = [piece for part in parts for piece in splitter.push(part)] + splitter.finish()
        assert "".join(piece.reasoning for piece in pieces) == "<tool_call> or not?"
        assert "".join(piece.call.arguments for piece in pieces if piece.call) == "{}"
        assert not any(piece.content for piece in pieces)
