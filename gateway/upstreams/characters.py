"""How much an upstream has said, where it does not count: in characters of which four make about a token."""

from billing.in_flight import CHARACTERS_PER_TOKEN

__all__ = ["CHARACTERS_PER_TOKEN", "characters", "in_a_piece"]


def characters(text: str) -> int:
    """One of English counts as one; of what is not ASCII, about one and a half make a token."""
    if text.isascii():
        return len(text)
    ascii_characters = len(text.encode("ascii", "ignore"))
    return ascii_characters + -(-(len(text) - ascii_characters) * CHARACTERS_PER_TOKEN * 2 // 3)


def in_a_piece(count: int) -> int:
    """Of what came in one piece: answers are streamed by the token, so that each piece with text has one at least."""
    return max(count, CHARACTERS_PER_TOKEN) if count else 0
