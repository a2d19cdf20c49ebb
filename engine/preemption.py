"""Which running sequence gives its blocks back so that another can start or go on."""

from collections.abc import Sequence as List
from typing import NamedTuple

from engine.fairness import Fairness
from engine.sequence import Sequence


class Pool(NamedTuple):
    """What there is to share: blocks of KV and rows of the block table."""

    blocks: int
    rows: int


class Shortage(NamedTuple):
    """What a sequence that wants to start lacks, and how many blocks it would take in all."""

    blocks: int
    rows: int
    taking: int


def displaced_by(
    sequence: Sequence, shortage: Shortage, running: List[Sequence], fairness: Fairness, pool: Pool
) -> list[Sequence]:
    """Running sequences that give way to a waiting one: the latest first, and none at all unless they are enough.

    Those of a later priority do. So do those of a tenant that has more than its share, where the waiting one's tenant
    stays within its own; but never a tenant's only one, so that nobody is kept from finishing anything.
    """
    active = fairness.active
    own = active[sequence.space.salt]
    share = Pool(fairness.share(pool.blocks), fairness.share(pool.rows))
    entitled = own.blocks + shortage.taking <= share.blocks and own.running < share.rows
    held = {name: tenant.blocks for name, tenant in active.items()}
    rows = {name: tenant.running for name, tenant in active.items()}
    blocks_short, rows_short = shortage.blocks, shortage.rows
    victims: list[Sequence] = []
    for victim in reversed(running):
        if blocks_short <= 0 and rows_short <= 0:
            break
        name = victim.space.salt
        has_more = rows[name] > 1 and (rows[name] > share.rows if rows_short > 0 else held[name] > share.blocks)
        equal = victim.priority == sequence.priority
        if victim.priority > sequence.priority or (equal and entitled and has_more):
            victims.append(victim)
            blocks_short -= victim.own_blocks
            rows_short -= 1
            held[name] -= victim.own_blocks
            rows[name] -= 1
    return victims if blocks_short <= 0 and rows_short <= 0 else []


def victim_for(sequence: Sequence, running: List[Sequence], fairness: Fairness, pool: Pool, *, own: bool) -> Sequence:
    """Who is preempted so that a running `sequence` of open length can grow; perhaps itself. With `own`, only its
    tenant's come into question.

    Never one that was promised its blocks, nor, if it can be helped, the first of the others: the latest of a tenant
    that has more than its share, or else the latest of all.
    """
    share = fairness.share(pool.blocks)
    active = fairness.active
    candidates = [
        other for other in running if not other.reserves_all and (not own or other.space.salt == sequence.space.salt)
    ]
    return max(
        candidates[1:] or candidates,
        key=lambda other: (other.priority, active[other.space.salt].blocks > share, other.order),
    )
