"""The streamed text is the decoded text, cut before the first completed stop string, wherever tokens end."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from engine.detokenizer import Detokenizer
from engine.tokenizer import BYTE_OF_CHARACTER, Tokenizer

CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def vocabulary(tokens: list[bytes]) -> Tokenizer:
    """A byte-level tokenizer whose token `i` is `tokens[i]` (all different), and after them one control token."""
    spelled = ["".join(CHARACTER_OF_BYTE[byte] for byte in token) for token in tokens]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(spelled)}, merges=[]))
    backend.add_special_tokens([AddedToken("<end>", normalized=False)])
    return Tokenizer(backend, "byte-level", special_tokens={}, add_bos=False)


def stream(pieces: list[bytes], stop: list[str], *, cut: bool = False) -> tuple[list[str], bool]:
    """What each push and then finish returned for tokens that are `pieces`, and whether a stop string ended it."""
    unique = list(dict.fromkeys(pieces))
    detokenizer = Detokenizer(vocabulary(unique), stop)
    sent = [detokenizer.push(unique.index(piece)) for piece in pieces]
    return [*sent, detokenizer.finish(cut=cut)], detokenizer.stopped


def before_stop(text: str, stop: list[str]) -> str:
    """The text before the stop string that is completed first when the text is read character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(word) for word in stop if text[:end].endswith(word)]
        if starts:
            return text[: min(starts)]
    return text


def cut_up(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


letters = st.text(st.sampled_from("ab é你🎉\n"), max_size=30)
stops = st.lists(st.text(st.sampled_from("ab é你🎉\n"), min_size=1, max_size=4), max_size=4)
cuts = st.lists(st.integers(0, 200), max_size=40)


@given(letters, stops, cuts)
def test_any_split_of_a_text_gives_the_same_text(text: str, stop: list[str], cuts: list[int]) -> None:
    sent, stopped = stream(cut_up(text.encode(), cuts), stop)
    assert "".join(sent) == before_stop(text, stop)
    assert stopped == any(word in text for word in stop)


@given(letters, stops, cuts)
def test_no_prefix_of_the_stream_has_to_be_taken_back(text: str, stop: list[str], cuts: list[int]) -> None:
    sent, _ = stream(cut_up(text.encode(), cuts), stop)
    whole = before_stop(text, stop)
    so_far = ""
    for piece in sent:
        so_far += piece
        assert whole.startswith(so_far)


@given(letters, stops, cuts)
def test_as_little_as_possible_is_held_back(text: str, stop: list[str], cuts: list[int]) -> None:
    """After each token, only half characters and what a stop string begins with are still missing."""
    pieces = cut_up(text.encode(), cuts)
    sent, _ = stream(pieces, stop)
    data = b""
    for i, piece in enumerate(pieces):
        data += piece
        decoded = before_stop(data.decode(errors="ignore"), stop)
        missing = decoded.removeprefix("".join(sent[: i + 1]))
        assert missing == "" or any(word.startswith(missing) for word in stop)


@given(st.binary(max_size=20), cuts)
def test_bytes_that_are_not_text_read_as_the_decoded_whole(data: bytes, cuts: list[int]) -> None:
    pieces = cut_up(data, cuts)
    sent, _ = stream(pieces, [])
    assert "".join(sent) == data.decode(errors="replace")


def test_a_character_in_three_tokens_is_sent_once_and_whole() -> None:
    party = "🎉".encode()
    assert stream([b"a", party[:1], party[1:3], party[3:] + b"!"], [])[0] == ["a", "", "", "🎉!", ""]


def test_a_text_that_ends_inside_a_character() -> None:
    half = [b"a" + "🎉".encode()[:2]]
    assert stream(half, [])[0] == ["a", "\ufffd"], "the model ended it there"
    assert stream(half, [], cut=True)[0] == ["a", ""], "max_tokens did"


def test_held_text_is_sent_when_it_turns_out_not_to_be_a_stop_string() -> None:
    assert stream([b"x<", b"en", b"d", b"!"], ["<end>"])[0] == ["x", "", "", "<end!", ""]
    assert stream([b"x<", b"en"], ["<end>"])[0] == ["x", "", "<en"]


def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    assert stream([b"ab\nUs", b"er:", b" more"], ["\nUser:"]) == (["ab", "", "", ""], True)


def test_a_stop_string_can_end_inside_a_token_and_inside_a_character() -> None:
    nihao = "你好".encode()
    assert stream([nihao[:4], nihao[4:] + b"tail"], ["好"]) == (["你", "", ""], True)


def test_control_tokens_have_no_text() -> None:
    tokenizer = vocabulary([b"a"])
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(id) for id in (0, 1, 0)] == ["a", "", "a"]
    assert tokenizer.decode([0, 1, 0]) == "aa"


def test_the_work_per_token_does_not_grow() -> None:
    detokenizer = Detokenizer(vocabulary([b"a"]), ["b" * 50, "a" * 60 + "b"])
    for _ in range(3000):
        detokenizer.push(0)
        assert len(detokenizer._held) <= 60
