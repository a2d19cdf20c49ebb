"""Admit or refuse: under a hard budget the worst case of a call is reserved before a byte goes upstream."""

from decimal import Decimal

from billing.budgets import ScopeKind
from billing.charge import affordable_output, worst_case
from billing.leases import BudgetError, Budgets, UnpricedError
from billing.prices import PriceBook
from gateway.call import Call
from gateway.database import reachable
from gateway.dispatch import Dispatcher
from gateway.errors import ApiError
from gateway.operation import Operation
from gateway.upstreams.upstream import PromptSize

TRIES = 3
"""A call without max_tokens is sized to what is left; when others took it meanwhile, it is sized again so often."""


class Admission:
    def __init__(self, budgets: Budgets, dispatcher: Dispatcher) -> None:
        self._budgets = budgets
        self._dispatcher = dispatcher

    async def admit(self, operation: Operation, call: Call, model: str, book: PriceBook) -> int | None:
        """Hold the worst case in every scope that has a budget; return the output cap that a hard one imposes, if any.

        Where no budget is hard the hold is of nothing: it only marks where the charge will count.

        Raises ApiError 402 naming the exhausted scope, or that the model is unpriced; 503 when the database is away.
        The hold is settled by the operation's row, whatever becomes of the call.
        """
        scopes = _scopes(operation, model)
        async with reachable():
            remaining = await self._budgets.remaining(scopes)
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
            async with reachable():
                remaining = await self._budgets.remaining(scopes) or Decimal(0)
        raise AssertionError("the last try returns or raises")

    async def _hold(self, operation: Operation, scopes: dict[ScopeKind, str], amount: Decimal | None) -> None:
        try:
            async with reachable():
                await self._budgets.admit(operation.id, scopes, amount)
        except BudgetError as error:
            code = "unpriced_model" if isinstance(error, UnpricedError) else "budget_exhausted"
            text = f"Refused: {error}. Lower max_tokens, or ask your operator to raise the budget."
            if isinstance(error, UnpricedError):
                text = f"Refused: {error}. Choose another model, or ask your operator for a price."
            headers = {"x-should-retry": "false"}
            raise ApiError(402, code, text, outcome="refused", headers=headers) from error


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
