"""The configuration in force and what is made from it: replaced as a whole by a reload, while requests run on.

A request keeps the pool and the upstreams that it started with. What a reload leaves as it was keeps its connections,
its breaker and its measurements; an upstream that goes is closed when its last request has ended.
"""

import asyncio
from collections.abc import Mapping

from gateway.routing.router import Router
from gateway.routing.rules import RulesRouter
from gateway.settings import Settings
from gateway.upstreams.pool import Pool
from gateway.upstreams.target import Target
from gateway.upstreams.upstream import Upstream


class Live:
    """Raises ValueError when an upstream's key cannot be had."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.router: Router = RulesRouter(settings.router.threshold)
        self.upstreams: Mapping[str, Upstream] = {n: Upstream(n, s) for n, s in settings.upstreams.items()}
        self.pools: Mapping[str, Pool] = self._pools(settings, self.upstreams, {})
        self._closing: dict[asyncio.Task[None], Upstream] = {}

    def apply(self, settings: Settings) -> None:
        """Make `settings` the ones in force. Raises ValueError, and changes nothing, without an upstream's key."""
        upstreams = {name: self._upstream(name, settings) for name in settings.upstreams}
        known = {(target.model, target.upstream.name): target for target in self._targets()}
        pools = self._pools(settings, upstreams, known)
        kept = {target for pool in pools.values() for target in pool.targets}
        for target in self._targets():
            if target not in kept:
                target.close()
        for upstream in set(self.upstreams.values()) - set(upstreams.values()):
            task = asyncio.create_task(upstream.close_when_idle())
            self._closing[task] = upstream
            task.add_done_callback(self._closing.pop)
        self.settings, self.upstreams, self.pools = settings, upstreams, pools
        self.router = RulesRouter(settings.router.threshold)

    async def close(self) -> None:
        retired = list(self._closing.values())
        for task in list(self._closing):
            task.cancel()
        for target in self._targets():
            target.close()
        for upstream in (*self.upstreams.values(), *retired):
            await upstream.close()

    def _targets(self) -> list[Target]:
        return [target for pool in self.pools.values() for target in pool.targets]

    def _upstream(self, name: str, settings: Settings) -> Upstream:
        """The one there is, where nothing about it has changed."""
        wanted, old = settings.upstreams[name], self.upstreams.get(name)
        if old is not None and old.settings == wanted and old.key == wanted.api_key():
            return old
        return Upstream(name, wanted)

    def _pools(
        self, settings: Settings, upstreams: Mapping[str, Upstream], known: Mapping[tuple[str, str], Target]
    ) -> dict[str, Pool]:
        pools = {}
        for name, model in settings.models.items():
            targets = []
            for wanted in model.upstreams:
                upstream, old = upstreams[wanted.upstream], known.get((name, wanted.upstream))
                same = old is not None and old.upstream is upstream and old.settings == wanted
                targets.append(old if old is not None and same else Target(name, wanted, upstream))
            pools[name] = Pool(name, model, targets)
        return pools
