"""Admit or refuse: under a hard budget the worst case of a call is reserved before a byte goes upstream."""

from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal

import structlog

from billing.budgets import ScopeKind
from billing.charge import affordable_output, worst_case
from billing.leases import BudgetError, BudgetExhausted, Budgets, OtherCurrencyError, UnpricedError
from billing.prices import PriceBook
from gateway.call import Call
from gateway.database import reachable
from gateway.dispatch import Dispatcher
from gateway.errors import ApiError
from gateway.operation import Operation
from gateway.upstreams.upstream import PromptSize

log = structlog.get_logger()

TRIES = 3
"""A call without max_tokens is sized to what is left; when others took it meanwhile, it is sized again so often."""


class Admission:
    def __init__(self, budgets: Budgets, dispatcher: Dispatcher) -> None:
        self._budgets = budgets
        self._dispatcher = dispatcher

    async def admit(self, operation: Operation, call: Call, model: str, book: PriceBook) -> int | None:
        """Hold the worst case in every scope that has a budget; return the output cap that a hard one imposes, if any.

        Where no budget is hard the hold is of nothing: it only marks where the charge will count.

        Raises ApiError 402 naming the exhausted scope, that the model is unpriced or that a budget is in another
        currency; 503 when the database is away.
        The hold is settled by the operation's row, whatever becomes of the call.
        """
        scopes = _scopes(operation, model)
        remaining = await self._remaining(scopes)
        if remaining is None:
            await self._hold(operation, scopes, Decimal(0))
            return None
        price = book.sale(model)
        if price is None or worst_case(price, 1, 1) is None:
            await self._hold(operation, scopes, None)
            raise AssertionError("a hard budget refuses an unknown amount")
        size = await self._dispatcher.prompt_size(call, model)
        for attempt in range(TRIES):
            affordable = affordable_output(price, size.tokens, remaining) // call.choices
            output, cap = _output(call, size, affordable)
            try:
                await self._hold(operation, scopes, worst_case(price, size.tokens, output * call.choices))
                return cap
            except ApiError as refusal:
                if refusal.status != 402 or cap is None or attempt == TRIES - 1:
                    raise
            remaining = await self._remaining(scopes) or Decimal(0)
        raise AssertionError("the last try returns or raises")

    async def release(self, operation: Operation) -> None:
        """Free the hold of an operation that will never have a row; at the next admission if the database is away."""
        try:
            await self._budgets.release(operation.id)
        except Exception as error:  # its caller has a failure of its own to tell
            log.warning("hold not released yet", operation=str(operation.id), reason=repr(error))

    async def _remaining(self, scopes: dict[ScopeKind, str]) -> Decimal | None:
        with _refusals():
            async with reachable():
                return await self._budgets.remaining(scopes)

    async def _hold(self, operation: Operation, scopes: dict[ScopeKind, str], amount: Decimal | None) -> None:
        with _refusals():
            async with reachable():
                await self._budgets.admit(operation.id, scopes, amount)


_REFUSALS: dict[type[BudgetError], tuple[str, str]] = {
    BudgetExhausted: ("budget_exhausted", "Lower max_tokens, or ask your operator to raise the budget."),
    UnpricedError: ("unpriced_model", "Choose another model, or ask your operator for a price."),
    OtherCurrencyError: ("budget_currency", "Ask your operator to remove it and to set one in that currency."),
}
"""Code of the error and what the caller can do."""


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn a budget's refusal into a 402."""
    try:
        yield
    except BudgetError as error:
        code, advice = _REFUSALS[type(error)]
        headers = {"x-should-retry": "false"}
        raise ApiError(402, code, f"Refused: {error}. {advice}", outcome="refused", headers=headers) from error


def _scopes(operation: Operation, model: str) -> dict[ScopeKind, str]:
    principal = operation.principal
    assert principal is not None
    scopes: dict[ScopeKind, str] = {"org": str(principal.org_id), "key": str(principal.key_id), "model": model}
    if principal.team_id is not None:
        scopes["team"] = str(principal.team_id)
    if principal.user_id is not None:
        scopes["user"] = str(principal.user_id)
    return scopes


def _output(call: Call, size: PromptSize, affordable: int) -> tuple[int, int | None]:
    """(tokens to reserve for each choice, cap to send upstream or None): the caller's limit, the room left in the
    context, or what the budget affords, at least 1, so that an exhausted budget is refused by name."""
    room = None if size.context is None else max(size.context - size.tokens, 0)
    if call.max_output is not None:
        wanted = max(call.max_output, 0)
        return (wanted if room is None else min(wanted, room)), None
    if room is not None and affordable >= room:
        return room, None
    return max(affordable, 1), max(affordable, 1)
