"""Admission: worst-case money is held in every budget that applies, all or nothing, before a call is dispatched.

Each admission is one transaction. A hold ends in one of three ways: the ledger settles it with its operation, the
gateway releases it because nothing was dispatched, or its process died before recording the operation and the next
process on the same spool frees it (`billing.ledger`).
"""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import holds
from billing.budgets import Budget, ScopeKind, list_budgets
from billing.records import refuse_bad_money
from billing.windows import Window

# A window's row appears on first use. Rows are taken in key order. The limit is read again under the row's lock, and
# an amount of 0 always fits: a free model passes an exhausted budget.
_TAKE = text("""
    INSERT INTO budget_window AS w (budget_id, starts_at, leased)
    SELECT b.id, k.starts_at, k.amount
    FROM (
        SELECT *, CAST(:amount AS numeric) AS amount
        FROM unnest(CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[])) AS t (id, starts_at)
    ) AS k JOIN budget b ON b.id = k.id
    WHERE NOT b.hard OR k.amount = 0 OR k.amount <= b.limit_amount
    ORDER BY b.id, k.starts_at
    ON CONFLICT (budget_id, starts_at) DO UPDATE SET leased = w.leased + excluded.leased
    WHERE excluded.leased = 0 OR (
        SELECT NOT b.hard OR w.settled + w.leased + excluded.leased <= b.limit_amount
        FROM budget b WHERE b.id = w.budget_id
    )
    RETURNING w.budget_id
""")
_HOLD = text("""
    INSERT INTO hold (operation_id, budget_id, starts_at, amount, replica)
    SELECT :operation, k.id, k.starts_at, CAST(:amount AS numeric), :replica
    FROM unnest(CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[])) AS k (id, starts_at)
""")


class BudgetError(Exception):
    """A hard budget refuses a call. `str()` is a sentence for the caller; `scope_id` is for the operator."""

    def __init__(self, budget: Budget, sentence: str) -> None:
        super().__init__(sentence)
        self.scope_kind: ScopeKind = budget.scope_kind
        self.scope_id: str = budget.scope_id
        self.limit: Decimal = budget.limit_amount
        self.remaining: Decimal = budget.remaining
        self.currency: str = budget.currency
        self.window: Window = budget.window
        self.resets_at: datetime | None = budget.resets_at


class BudgetExhausted(BudgetError):  # noqa: N818 - the name of a state that callers know
    """The call's worst case does not fit in what is left."""


class UnpricedError(BudgetError):
    """The call has no worst case, because its model has no (complete) price, and a hard budget applies."""


class OtherCurrencyError(BudgetError):
    """A hard budget is in another currency than the one that calls are charged in, so nothing can be compared."""


class Budgets:
    """Admits calls against the budgets in PostgreSQL, for one gateway process.

    `replica` is the process's `Spool.replica`; it is stored with each hold. `currency` is what calls are charged in.
    """

    def __init__(self, engine: AsyncEngine, replica: str, currency: str) -> None:
        self._engine = engine
        self._replica = replica
        self._currency = currency
        self._doubtful: set[UUID] = set()

    async def admit(self, operation_id: UUID, scopes: Mapping[ScopeKind, str], amount: Decimal | None) -> None:
        """Hold `amount` (0 or more; None: unknown) in every budget that a scope has, or in none.

        `scopes` maps a scope's kind to its id. Soft budgets count the hold and never refuse; with no budget at all
        nothing is held. A soft budget in another currency does not count the call. Raises BudgetExhausted, naming the
        fullest budget that refused; UnpricedError when the amount is unknown under a hard budget; OtherCurrencyError;
        ValueError on a negative amount; database errors as they come.
        """
        refuse_bad_money(amount=amount)
        await self._settle_doubts()
        try:
            async with self._engine.begin() as conn:
                await self._admit(conn, operation_id, scopes, amount)
        except BudgetError:
            raise
        except BaseException:  # cancelled or cut off, perhaps after the commit: the hold may be there
            self._doubtful.add(operation_id)
            raise

    async def _admit(
        self, conn: AsyncConnection, operation_id: UUID, scopes: Mapping[ScopeKind, str], amount: Decimal | None
    ) -> None:
        budgets = await self._comparable(conn, scopes)
        if not budgets:
            return
        if amount is None:
            for budget in budgets:
                if budget.hard:
                    raise UnpricedError(budget, f"the model has no complete price and the {_words(budget)} is hard")
            amount = Decimal(0)
        keys = {"budgets": [budget.id for budget in budgets], "starts": [budget.starts_at for budget in budgets]}
        taken = set((await conn.execute(_TAKE, keys | {"amount": amount})).scalars())
        if len(taken) < len(budgets):
            refusing = [budget for budget in await self._comparable(conn, scopes) if budget.id not in taken]
            budget = min(refusing or budgets, key=lambda candidate: candidate.remaining)
            raise BudgetExhausted(budget, _exhausted(budget, amount))
        await conn.execute(_HOLD, keys | {"operation": operation_id, "amount": amount, "replica": self._replica})

    async def remaining(self, scopes: Mapping[ScopeKind, str]) -> Decimal | None:
        """The least that is left in a hard budget of these scopes now; None when no hard budget applies.

        Raises OtherCurrencyError.
        """
        async with self._engine.connect() as conn:
            return min((b.remaining for b in await self._comparable(conn, scopes) if b.hard), default=None)

    async def _comparable(self, conn: AsyncConnection, scopes: Mapping[ScopeKind, str]) -> list[Budget]:
        """Budgets of these scopes in the currency of the charges; raises OtherCurrencyError when a hard one is not."""
        budgets = await list_budgets(conn, scopes)
        for budget in budgets:
            if budget.hard and budget.currency != self._currency:
                sentence = f"the {_words(budget)} cannot pay for calls that are charged in {self._currency}"
                raise OtherCurrencyError(budget, sentence)
        return [budget for budget in budgets if budget.currency == self._currency]

    async def release(self, operation_id: UUID) -> None:
        """Free an admitted operation's hold; only when nothing was dispatched and no operation will be recorded.

        Once called it will happen: when the database is away this raises, and the next admission tries again.
        """
        self._doubtful.add(operation_id)
        await self._settle_doubts()

    async def _settle_doubts(self) -> None:
        if doubtful := list(self._doubtful):
            async with self._engine.begin() as conn:
                await holds.release(conn, doubtful)
            self._doubtful.difference_update(doubtful)


def _words(budget: Budget) -> str:
    window = "" if budget.window == "none" else f" by the {budget.window}"
    return f"{budget.scope_kind}'s budget of {budget.limit_amount:f} {budget.currency}{window}"


def _exhausted(budget: Budget, amount: Decimal) -> str:
    resets = "" if budget.resets_at is None else f"; it resets at {budget.resets_at:%Y-%m-%d %H:%M} UTC"
    return (
        f"this call could cost {amount:f} {budget.currency} and the {_words(budget)} has "
        f"{budget.remaining:f} left{resets}"
    )
