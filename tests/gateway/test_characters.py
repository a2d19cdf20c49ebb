"""How long a text is where nobody counts its tokens."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.rules import about_tokens
from gateway.upstreams.anthropic_decoder import AnthropicDecoder
from gateway.upstreams.characters import CHARACTERS_PER_TOKEN, characters, in_a_piece
from gateway.upstreams.frames import ChatDecoder


def test_english_counts_its_characters_and_others_more() -> None:
    assert characters("") == 0
    assert characters("a word or two") == 13
    assert characters("你好，世界") == 14
    assert in_a_piece(0) == 0 and in_a_piece(1) == CHARACTERS_PER_TOKEN and in_a_piece(9) == 9


@given(st.text(max_size=200))
def test_it_is_about_what_a_prompt_of_the_same_text_counts(text: str) -> None:
    assert abs(characters(text) / CHARACTERS_PER_TOKEN - about_tokens(text)) <= 2


def test_each_piece_of_a_stream_is_a_token_at_least() -> None:
    chat = ChatDecoder()
    pieces = [
        b'{"choices":[{"index":0,"delta":{"content":"%b"}}]}' % text.encode() for text in ("", "a", "你", "a" * 9)
    ]
    assert [frame.characters for piece in pieces for frame in chat.event(None, piece)] == [0, 4, 4, 9]
    claude = AnthropicDecoder(native=False)
    begin = b'{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}'
    delta = b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"%b"}}'
    events = [begin, *(delta % text.encode() for text in ("a", "你好啊"))]
    assert [frame.characters for event in events for frame in claude.event(None, event)][-2:] == [4, 8]
