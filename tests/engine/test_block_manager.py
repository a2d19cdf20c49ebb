"""The block pool: states add up, prefixes are found and confirmed, eviction takes the right block."""

import hashlib
import itertools

import pytest

from engine.block_manager import ROOT, BlockManager, Space, block_digest, token_bytes

TOKENS = list(range(16 * 4))


def fill(manager: BlockManager, tokens: list[int], salt: bytes = b"") -> list[int]:
    """Allocate and register the full blocks of `tokens`, as a finished prefill would."""
    count = len(tokens) // 16
    hashes: list[bytes] = []
    space = Space(salt)
    manager.extend_hashes(hashes, space, tokens, count)
    blocks = manager.allocate(count, salt)
    assert blocks is not None
    for i in range(count):
        block = manager.register(
            blocks[i], blocks[i - 1] if i else ROOT, hashes[i], space, token_bytes(tokens[16 * i : 16 * i + 16])
        )
        if block is None:
            break
        blocks[i] = block
    return blocks


def match(manager: BlockManager, tokens: list[int], salt: bytes = b"") -> list[int]:
    hashes: list[bytes] = []
    manager.extend_hashes(hashes, Space(salt), tokens, len(tokens) // 16)
    return manager.match(hashes, Space(salt), tokens)


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
    fields = [b"", b"a", b"b", b"ab"]
    digests = {
        block_digest(parent, Space(salt, adapter), tokens)
        for parent, salt, adapter, tokens in itertools.product(fields, repeat=4)
    }
    assert len(digests) == len(fields) ** 4
    # The rule is public, so that another process can compute the same hashes.
    told = b"P\1\0\0\0pS\1\0\0\0sA\0\0\0\0T\2\0\0\0tt"
    assert block_digest(b"p", Space(b"s"), b"tt") == hashlib.sha256(told).digest()


def test_the_tail_of_the_least_recently_used_sequence_is_evicted_first() -> None:
    manager = BlockManager(6)
    old = fill(manager, TOKENS[:48])
    new = fill(manager, [7] * 48)
    manager.release(old)
    manager.release(new)
    assert manager.allocate(1, b"") == [old[2]]
    assert match(manager, TOKENS[:48]) == old[:2]
    assert manager.allocate(3, b"") == [old[1], old[0], new[2]]
    assert match(manager, [7] * 48) == new[:2]


def test_held_blocks_are_never_evicted() -> None:
    manager = BlockManager(4)
    blocks = fill(manager, TOKENS[:48])
    assert manager.allocate(2, b"") is None
    assert manager.free == 1
    manager.release(blocks[2:])
    assert manager.allocate(2, b"") == [3, blocks[2]]
    manager.check([blocks[:2], [3, blocks[2]]])


def test_a_block_computed_twice_is_kept_once() -> None:
    manager = BlockManager(8)
    first, second = fill(manager, TOKENS), fill(manager, TOKENS)
    assert first == second
    assert manager.held == 4
    manager.check([first, second])


def test_equal_hashes_of_different_contents_do_not_match() -> None:
    manager = BlockManager(8, digest=lambda parent, space, tokens: b"same")
    blocks = fill(manager, TOKENS[:16])
    assert match(manager, [9] * 16) == []
    assert match(manager, TOKENS[:16], b"other tenant") == []
    # Same tokens one block later: the parent differs, so they must not be taken for the first block.
    assert match(manager, TOKENS[:16] * 2) == blocks


def test_check_notices_a_lost_reference() -> None:
    manager = BlockManager(4)
    blocks = manager.allocate(2, b"")
    assert blocks is not None
    with pytest.raises(AssertionError):
        manager.check([blocks[:1]])


def floors(fraction: float = 0.5) -> BlockManager:
    """16 blocks: a's 4 oldest and b's 8 later ones cached, 4 free."""
    manager = BlockManager(16, tenant_floor=fraction)
    for tenant, first, count in ((b"a", 0, 4), (b"b", 1000, 8)):
        manager.release(fill(manager, list(range(first, first + 16 * count)), tenant))
    return manager


def test_a_tenant_cannot_evict_what_another_has_below_its_floor() -> None:
    manager = floors()
    assert manager.floor == 4 and manager.protected_from(b"b") == 4 and manager.protected_from(b"c") == 8
    blocks = manager.allocate(12, b"b")
    assert blocks is not None and manager.cached_of(b"a") == 4 and manager.cached_of(b"b") == 0
    assert match(manager, list(range(64)), b"a") != []
    manager.check([blocks])


def test_without_floors_the_oldest_goes_first_whoever_has_it() -> None:
    manager = floors(0.0)
    assert manager.protected_from(b"b") == 0
    manager.allocate(8, b"b")
    assert (manager.cached_of(b"a"), manager.cached_of(b"b")) == (0, 8)


def test_above_their_floors_tenants_lose_the_oldest_block_first() -> None:
    manager = floors(0.25)  # 2 blocks each
    manager.allocate(4 + 2, b"c")
    assert (manager.cached_of(b"a"), manager.cached_of(b"b")) == (2, 8)
    manager.allocate(6, b"c")
    assert (manager.cached_of(b"a"), manager.cached_of(b"b")) == (2, 2)


def test_at_last_a_floor_gives_way() -> None:
    manager = floors()
    assert manager.allocate(16, b"b") is not None
    assert manager.cached == 0 and manager.protected_from(b"b") == 0


def test_one_tenant_alone_may_use_the_whole_pool() -> None:
    manager = BlockManager(8, tenant_floor=0.5)
    manager.release(fill(manager, TOKENS, b"a"))
    assert manager.protected_from(b"a") == 0
    assert manager.allocate(8, b"a") is not None
