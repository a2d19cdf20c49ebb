"""`GET /v1/blocks`, and the names of a prompt's blocks: what a balancer needs to send a prompt where it is cached."""

import asyncio
import math
import time

from engine.batch import BLOCK_TOKENS
from engine.block_manager import Space
from engine.errors import ApiError
from engine.front import Front
from engine.hosted import HostedModel
from engine.protocol import BlockChanges
from engine.published import block_name

LONGEST_WAIT = 30.0
LOOK_SECONDS = 0.05
"""How often a waiting call looks whether something has changed: this costs the step loop nothing."""


async def block_changes(front: Front, model: HostedModel, instance: str, since: int, wait: float) -> BlockChanges:
    """Changes after number `since` of this instance, as soon as there are any, at the latest after `wait` seconds."""
    published = model.blocks.published
    deadline = time.monotonic() + (min(wait, LONGEST_WAIT) if math.isfinite(wait) else LONGEST_WAIT)
    while (instance, since) == (published.instance, published.sequence) and time.monotonic() < deadline:
        if front.is_stopping:
            break
        await asyncio.sleep(LOOK_SECONDS)
    assert front.core is not None, "a model is served by a core"
    try:
        return await asyncio.wrap_future(front.core.ask(lambda: model.blocks.changes_since(instance, since)))
    except RuntimeError as error:
        raise ApiError(503, "The engine is stopping.", code="engine_stopped") from error


def block_names(model: HostedModel, tenant: str, tokens: list[int]) -> list[str]:
    """Of the full blocks of a prompt, as this tenant's requests look for them."""
    hashes: list[bytes] = []
    model.blocks.extend_hashes(hashes, Space(tenant.encode()), tokens, len(tokens) // BLOCK_TOKENS)
    return [block_name(digest) for digest in hashes]
