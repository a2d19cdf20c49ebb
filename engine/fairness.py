"""Who is served next, and how much of a step each tenant may take.

Each tenant has a virtual token counter: what the engine has computed for it, in tokens of prefill (a decode token
weighs more). The tenant with the lowest counter goes first (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024). Tokens found in the cache cost nothing, nor does what is computed again after a preemption.

A tenant that was away is lifted near the lowest counter of those present, so that nobody saves up. It keeps `burst`
tokens of advantage, though: with none, a rare request would share its steps evenly with a flood and take twice as long,
and wait for the step in progress besides. Over any length of time that is all it can get beyond its share.
"""

from dataclasses import dataclass

RECENT = 5.0
"""Seconds for which a tenant that has left is still expected back."""


@dataclass(slots=True)
class Tenant:
    """What the scheduler knows of a tenant with requests here, or who had some."""

    counter: float = 0.0
    active: int = 0
    """Sequences waiting or running."""
    running: int = 0
    blocks: int = 0
    """Blocks its running sequences took or were promised, those they found in the cache not counted."""
    served: int = 0
    """The last step in which it got prefill."""


class Fairness:
    """Counters of all tenants. `burst` is in tokens of prefill, `decode_weight` what a decode token weighs."""

    def __init__(self, burst: float, decode_weight: float) -> None:
        self.burst = burst
        self.decode_weight = decode_weight
        self.tenants: dict[bytes, Tenant] = {}
        self.active: dict[bytes, Tenant] = {}
        self._left: dict[bytes, float] = {}  # when, in order of time

    def arrive(self, name: bytes, now: float) -> None:
        """A sequence of this tenant has come."""
        tenant = self.active.get(name)
        if tenant is None:
            self._expire(now)
            if not self.active:
                self.tenants.clear()  # nobody has waited for anybody: nothing is owed
            lowest = min((other.counter for other in self.active.values()), default=self.burst)
            tenant = self.tenants.setdefault(name, Tenant())
            tenant.counter = max(tenant.counter, lowest - self.burst)
            self.active[name] = tenant
        tenant.active += 1

    def leave(self, name: bytes, now: float) -> None:
        """A sequence of this tenant has ended."""
        tenant = self.active[name]
        tenant.active -= 1
        if not tenant.active:
            del self.active[name]
            self._left.pop(name, None)
            self._left[name] = now

    def contended(self, now: float) -> bool:
        """Whether more than one tenant has work, or had some until just now."""
        self._expire(now)
        return len(self.active) > 1 or any(name not in self.active for name in self._left)

    def ahead(self, priorities: dict[bytes, int]) -> set[bytes]:
        """Tenants that have had clearly more than another one of the same or a more urgent priority, or than one that
        was here until just now; `priorities` are the most urgent ones of those that have work."""
        lowest: dict[int, float] = {}
        for name, priority in priorities.items():
            lowest[priority] = min(self.active[name].counter, lowest.get(priority, float("inf")))
        away = [self._counter(name) for name in self._left if name not in self.active]
        bounds = {
            priority: min([*away, *(counter for other, counter in lowest.items() if other <= priority)])
            for priority in lowest
        }
        return {
            name
            for name, priority in priorities.items()
            if self.active[name].counter > bounds[priority] + self.burst / 2
        }

    def _counter(self, name: bytes) -> float:
        tenant = self.tenants.get(name)
        return 0.0 if tenant is None else tenant.counter

    def share(self, total: int) -> int:
        """An equal part of `total` for each tenant that has work."""
        return total // max(1, len(self.active))

    def _expire(self, now: float) -> None:
        while self._left:
            name, when = next(iter(self._left.items()))
            if now - when < RECENT:
                break
            del self._left[name]
            tenant = self.tenants.get(name)
            # One that owes nothing would be lifted anyway: no need to remember it.
            if tenant is not None and not tenant.active and tenant.counter <= self._lowest() - self.burst:
                del self.tenants[name]

    def _lowest(self) -> float:
        return min((tenant.counter for tenant in self.active.values()), default=float("inf"))
