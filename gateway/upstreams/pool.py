"""A model's upstreams: which of them a request goes to, as far as they can take it."""

import random
import time
from collections.abc import Collection, Sequence
from uuid import UUID

from gateway.call import Call
from gateway.settings import ModelSettings
from gateway.upstreams.affinity import matched, text_chain
from gateway.upstreams.balance import POLICIES
from gateway.upstreams.target import Target
from gateway.upstreams.upstream import can_tokenize


class Pool:
    """`targets` as configured, at least one."""

    def __init__(self, model: str, settings: ModelSettings, targets: Sequence[Target]) -> None:
        self.model = model
        self.settings = settings
        self.targets = tuple(targets)
        self.window = max(target.upstream.settings.connect_window_seconds for target in targets)
        """Seconds for which a request waits for upstreams that are being restarted."""
        are_engines = [target.upstream.is_engine for target in targets]
        self.has_engine, self.is_engines = any(are_engines), all(are_engines)
        """Whether one of them is an engine, and whether all are."""
        self._choose = POLICIES[settings.balance]
        self._by_prefix = settings.balance == "prefix_affine" and len(targets) > 1
        self._by_blocks = self._by_prefix and all(target.follower is not None for target in targets)

    def chain(self, call: Call) -> Sequence[int]:
        """What prompts are compared by; nothing where engines tell what they hold, or where it does not matter."""
        return text_chain(call) if self._by_prefix and not self._by_blocks and call.kind != "embedding" else ()

    async def choose(self, call: Call, chain: Sequence[int], tenant: UUID, tried: Collection[Target]) -> Target | None:
        """The upstream that takes this request; None when all were tried or cannot take one now."""
        now = time.monotonic()
        if len(self.targets) == 1:
            only = self.targets[0]
            return only if only.ready(now) and not tried else None
        ready = [target for target in self.targets if target.ready(now) and target not in tried]
        if len(ready) > 1:  # who asked to be left alone is left alone while another can do it
            ready = [target for target in ready if not target.rests(now)] or ready
        if len(ready) < 2:
            return ready[0] if ready else None
        held = await self._matched(call, chain, tenant, ready)
        views = [target.view(call, count) for target, count in zip(ready, held, strict=True)]
        chosen = ready[self._choose(views, random.random())]  # noqa: S311
        now = time.monotonic()  # asking for hashes took time, in which others chose too
        return chosen if chosen.ready(now) else next((target for target in ready if target.ready(now)), None)

    async def _matched(self, call: Call, chain: Sequence[int], tenant: UUID, ready: Sequence[Target]) -> list[int]:
        """How much of the prompt each holds: blocks where all are engines, else chunks of what was sent."""
        if self._by_blocks and call.kind != "embedding":
            return await self._held_blocks(call, tenant, ready)
        return [target.sent.matched(chain) for target in ready]

    async def _held_blocks(self, call: Call, tenant: UUID, ready: Sequence[Target]) -> list[int]:
        held = [_follow(target) for target in ready]
        hashes: list[str] | None = None
        if any(held) and can_tokenize(call):
            asked = min(ready, key=lambda target: target.in_flight)
            hashes = await asked.upstream.block_hashes(call, asked.name, tenant)
        return [matched(hashes or (), blocks) for blocks in held]


def _follow(target: Target) -> set[str]:
    assert target.follower is not None
    target.follower.start()
    return target.follower.held
