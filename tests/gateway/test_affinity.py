"""Who holds how much of a prompt: chains of what was sent, and the blocks that engines publish."""

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import BlockChanges
from gateway.settings import UpstreamSettings
from gateway.upstreams.affinity import CHUNK_BYTES, BlockFollower, SentChunks, matched, text_chain
from gateway.upstreams.upstream import Upstream
from tests.gateway.samples import chat_call

TEXTS = st.text(st.characters(codec="utf-8"), max_size=2000)


@given(TEXTS, TEXTS)
def test_a_longer_conversation_begins_with_the_chain_of_the_shorter(first: str, second: str) -> None:
    short = [{"role": "user", "content": first}]
    long = [*short, {"role": "assistant", "content": second}]
    chain, longer = text_chain(chat_call(messages=short)), text_chain(chat_call(messages=long))
    assert longer[: len(chain)] == chain or len(chain) - matched(chain, set(longer)) <= 1


def test_one_other_character_ends_the_match_there() -> None:
    text = "x" * 10 * CHUNK_BYTES
    chain = text_chain(chat_call(text))
    changed = text_chain(chat_call(text[: 5 * CHUNK_BYTES] + "y" + text[5 * CHUNK_BYTES + 1 :]))
    assert matched(changed, set(chain)) == 5
    assert len(chain) == len(changed) == 10


def test_tools_are_part_of_the_prompt() -> None:
    text = "x" * 4 * CHUNK_BYTES
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * CHUNK_BYTES}}]
    assert matched(text_chain(chat_call(text, tools=tools)), set(text_chain(chat_call(text)))) == 0


def test_what_was_sent_long_ago_is_forgotten_tail_first() -> None:
    sent = SentChunks(most=5)
    sent.add([1, 2, 3])
    sent.add([11, 12, 13])
    assert sent.matched([11, 12, 13]) == 3
    assert sent.matched([1, 2, 3]) == 2
    sent.add([1, 2, 3])
    assert (sent.matched([1, 2, 3]), sent.matched([11, 12, 13])) == (3, 2)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_a_follower_holds_what_the_engine_does(steps: list[tuple[bool, int]]) -> None:
    follower = BlockFollower(Upstream("e", UpstreamSettings(kind="engine")), "m")
    truth: set[str] = set()
    follower.apply(BlockChanges(instance="i", sequence=0, reset=True, added=[], removed=[]))
    for number, (is_there, block) in enumerate(steps):
        name = str(block)
        (truth.add if is_there else truth.discard)(name)
        added, removed = ([name], []) if is_there else ([], [name])
        follower.apply(BlockChanges(instance="i", sequence=number, reset=False, added=added, removed=removed))
    assert follower.held == truth
    follower.apply(BlockChanges(instance="j", sequence=9, reset=True, added=["z"], removed=[]))
    assert follower.held == {"z"}
