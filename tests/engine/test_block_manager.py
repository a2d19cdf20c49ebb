"""The block pool: states add up, prefixes are found and confirmed, eviction takes the right block."""

import hashlib

import pytest

from engine.block_manager import ROOT, BlockManager, block_digest, token_bytes

TOKENS = list(range(16 * 4))


def fill(manager: BlockManager, tokens: list[int], salt: bytes = b"") -> list[int]:
    """Allocate and register the full blocks of `tokens`, as a finished prefill would."""
    count = len(tokens) // 16
    hashes: list[bytes] = []
    manager.extend_hashes(hashes, salt, tokens, count)
    blocks = manager.allocate(count)
    assert blocks is not None
    for i in range(count):
        block = manager.register(
            blocks[i], blocks[i - 1] if i else ROOT, hashes[i], salt, token_bytes(tokens[16 * i : 16 * i + 16])
        )
        if block is None:
            break
        blocks[i] = block
    return blocks


def match(manager: BlockManager, tokens: list[int], salt: bytes = b"") -> list[int]:
    hashes: list[bytes] = []
    manager.extend_hashes(hashes, salt, tokens, len(tokens) // 16)
    return manager.match(hashes, salt, tokens)


def test_released_blocks_are_found_again_and_in_order() -> None:
    manager = BlockManager(8)
    blocks = fill(manager, TOKENS)
    manager.release(blocks)
    assert (manager.free, manager.held, manager.cached) == (4, 0, 4)
    assert match(manager, TOKENS) == blocks
    assert match(manager, TOKENS[:40]) == blocks[:2]
    manager.check([])


def test_one_wrong_token_ends_the_match_there() -> None:
    manager = BlockManager(8)
    blocks = fill(manager, TOKENS)
    changed = TOKENS.copy()
    changed[20] += 1
    assert match(manager, changed) == blocks[:1]


def test_tenants_do_not_see_each_other() -> None:
    manager = BlockManager(8)
    fill(manager, TOKENS, b"tenant a")
    assert match(manager, TOKENS, b"tenant b") == []
    assert match(manager, TOKENS) == []


def test_digest_fields_cannot_pose_as_each_other() -> None:
    assert block_digest(b"ab", b"", b"") != block_digest(b"a", b"b", b"")
    assert block_digest(b"", b"ab", b"") != block_digest(b"", b"a", b"b")
    assert block_digest(b"", b"x", b"") != block_digest(b"", b"", b"x")
    # The rule is public, so that another process can compute the same hashes.
    assert block_digest(b"p", b"", b"tt") == hashlib.sha256(b"P\1\0\0\0pS\0\0\0\0T\2\0\0\0tt").digest()


def test_the_tail_of_the_least_recently_used_sequence_is_evicted_first() -> None:
    manager = BlockManager(6)
    old = fill(manager, TOKENS[:48])
    new = fill(manager, [7] * 48)
    manager.release(old)
    manager.release(new)
    assert manager.allocate(1) == [old[2]]
    assert match(manager, TOKENS[:48]) == old[:2]
    assert manager.allocate(3) == [old[1], old[0], new[2]]
    assert match(manager, [7] * 48) == new[:2]


def test_held_blocks_are_never_evicted() -> None:
    manager = BlockManager(4)
    blocks = fill(manager, TOKENS[:48])
    assert manager.allocate(2) is None
    assert manager.free == 1
    manager.release(blocks[2:])
    assert manager.allocate(2) == [3, blocks[2]]
    manager.check([blocks[:2], [3, blocks[2]]])


def test_a_block_computed_twice_is_kept_once() -> None:
    manager = BlockManager(8)
    first, second = fill(manager, TOKENS), fill(manager, TOKENS)
    assert first == second
    assert manager.held == 4
    manager.check([first, second])


def test_equal_hashes_of_different_contents_do_not_match() -> None:
    manager = BlockManager(8, digest=lambda parent, salt, tokens: b"same")
    blocks = fill(manager, TOKENS[:16])
    assert match(manager, [9] * 16) == []
    assert match(manager, TOKENS[:16], b"other tenant") == []
    # Same tokens one block later: the parent differs, so they must not be taken for the first block.
    assert match(manager, TOKENS[:16] * 2) == blocks


def test_check_notices_a_lost_reference() -> None:
    manager = BlockManager(4)
    blocks = manager.allocate(2)
    assert blocks is not None
    with pytest.raises(AssertionError):
        manager.check([blocks[:1]])
