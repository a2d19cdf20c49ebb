"""What a stream shows, and when: stop strings that may have begun, characters in pieces, over real sockets."""

import json

import httpx
import pytest

from tests.engine.scripted_model import scripted_model
from tests.engine.serving import serving


def ask(text: str | bytes, prompt: str | list[int], **body) -> tuple[list[str], str, dict]:
    """Each chunk's text, the whole text, and the whole answer, of a model that goes on with `text`."""
    body = {"model": "scripted", "prompt": prompt, "temperature": 0, "max_tokens": 100, **body}
    with serving(scripted_model(text)) as url, httpx.Client(base_url=url) as http:
        reply = http.post("/v1/completions", json={**body, "stream": True})
        whole = http.post("/v1/completions", json=body)
        assert reply.status_code == whole.status_code == 200
    lines = [json.loads(line[6:]) for line in reply.content.decode().splitlines() if line.startswith("data: {")]
    chunks = [line["choices"][0]["text"] for line in lines]
    answer = json.loads(whole.content.decode())
    assert "".join(chunks) == answer["choices"][0]["text"]
    assert lines[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
    return chunks, answer["choices"][0]["text"], answer


def test_nothing_of_a_stop_string_is_sent() -> None:
    chunks, text, answer = ask("> ABCDEFGHIJKL", "> ", stop="DEFGHIJ")
    assert chunks == ["A", "B", "C", ""] and text == "ABC"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3 and answer["farthing"]["generated_tokens"] == 10


def test_held_text_is_sent_once_it_is_no_stop_string() -> None:
    chunks, text, _ = ask("> ABCDEFGHIxyz", "> ", stop=["DEFGHIJ", "zz"])
    assert chunks[:4] == ["A", "B", "C", "DEFGHIx"] and text == "ABCDEFGHIxyz"
    assert ask("> ABCDEF", "> ", stop="DEFGHIJ")[1] == "ABCDEF", "held when the text ends"
    assert ask("> ABCDEFGHI", "> ", stop="DEFGHIJ", max_tokens=6)[1] == "ABCDEF", "held when max_tokens cuts it"


def test_a_stop_string_inside_a_character_of_several_bytes() -> None:
    for stop in ("é", "🎉!", "界"):
        _, text, _ = ask("> né世界🎉!", "> ", stop=stop)
        assert text == "né世界🎉!".split(stop)[0]


@pytest.mark.parametrize("count", range(1, 9))
def test_max_tokens_inside_a_character(count: int) -> None:
    data = "> a🎉b🎉".encode()
    chunks, text, answer = ask(data, "> ", max_tokens=count)
    assert text == data[2 : 2 + count].decode(errors="ignore")
    assert "\ufffd" not in "".join(chunks) and answer["usage"]["completion_tokens"] == count


@pytest.mark.parametrize("inside", [1, 2, 3])
def test_nothing_of_a_prompt_that_ends_inside_a_character_leaks(inside: int) -> None:
    data = "> 🎉 and on".encode()
    prompt = list(data[: 2 + inside])
    chunks, text, _ = ask(data, prompt)
    assert text == data[2 + inside :].decode(errors="replace") and "🎉" not in text and ">" not in text
    assert text.endswith(" and on") and len("".join(chunks)) == len(text)
    _, echoed, _ = ask(data, prompt, echo=True, logprobs=1)
    assert echoed == data[: 2 + inside].decode(errors="replace") + text


def test_logprobs_of_characters_in_pieces() -> None:
    _, text, answer = ask("> 🎉é", "> ", logprobs=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"][:4] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x8e", "bytes:\\x89"]
    assert logprobs["text_offset"] == [0, 0, 0, 0, 1, 1] and text == "🎉é"
