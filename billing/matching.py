"""Which budgets and limits apply to a call: found by its scopes, without looking at those of others.

An allowance of one scope is filed under it. One of several (user and model, say) is filed under the narrowest of them,
there by the kinds of the others, and there by their ids: a call looks once for each combination of kinds that its own
scopes have, however many allowances there are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from billing.allowances import Scope, ScopeKind
from billing.pots import Account

Others = tuple[tuple[ScopeKind, ...], Mapping[tuple[str, ...], tuple[Account, ...]]]


class Filed(NamedTuple):
    """What is filed under one scope."""

    alone: tuple[Account, ...]
    together: tuple[Others, ...]
    """By the kinds of the further scopes, by their ids."""

    def accounts(self) -> Iterator[Account]:
        yield from self.alone
        for _, by_ids in self.together:
            for accounts in by_ids.values():
                yield from accounts


_NOT_KNOWN = Filed((), ())


class Matching:
    """What is known of scopes; `unknown` is what has to be asked for."""

    def __init__(self) -> None:
        self.scopes: dict[Scope, Filed | None] = {}
        """None: it is known that there is nothing."""
        self.unknown: set[Scope] = set()
        """Asked for and not known, or perhaps not any more what they were."""

    def find(self, scopes: Mapping[ScopeKind, Sequence[str]]) -> list[Account] | None:
        """The accounts that apply to a call of these scopes; None (and they are noted) while one is not known."""
        found: list[Account] = []
        missing = False
        known = self.scopes
        for kind, ids in scopes.items():
            for identifier in ids:
                filed = known.get((kind, identifier), _NOT_KNOWN)
                if filed is None:
                    continue
                if filed is _NOT_KNOWN:
                    self.unknown.add((kind, identifier))
                    missing = True
                else:
                    found += filed.alone
                    for kinds, by_ids in filed.together:
                        for others in product(*(scopes.get(other, ()) for other in kinds)):
                            found += by_ids.get(others, ())
        return None if missing else found

    def of(self, scope: Scope) -> list[Account]:
        """All that is filed under the scope."""
        filed = self.scopes.get(scope)
        return [] if filed is None else list(filed.accounts())

    def file(self, scope: Scope, accounts: Iterable[Account]) -> None:
        """These are all allowances whose narrowest scope this is."""
        alone: list[Account] = []
        together: dict[tuple[ScopeKind, ...], dict[tuple[str, ...], tuple[Account, ...]]] = {}
        for account in accounts:
            also = account.terms.also
            if not also:
                alone.append(account)
                continue
            by_ids = together.setdefault(tuple(also), {})
            ids = tuple(also.values())
            by_ids[ids] = (*by_ids.get(ids, ()), account)
        self.scopes[scope] = Filed(tuple(alone), tuple(together.items())) if alone or together else None

    def forget_absent(self) -> None:
        """Make room: what has no allowance can be learnt again."""
        self.scopes = {scope: filed for scope, filed in self.scopes.items() if filed is not None}
