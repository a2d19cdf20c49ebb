"""Admit or refuse: before a byte goes upstream, a call's worst case is held in every budget and limit that applies."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from uuid import UUID

import msgspec

from billing.allowances import ScopeKind
from billing.charge import affordable_output, worst_case
from billing.leases import BudgetError, Hold, Leases, Left, LimitExceeded, Need
from billing.pots import NOTHING
from billing.prices import Price, PriceBook
from gateway.call import Call
from gateway.database import reachable
from gateway.dispatch import Dispatcher
from gateway.errors import ApiError, budget_refusal, limit_refusal
from gateway.operation import Operation
from gateway.upstreams.upstream import PromptSize

TRIES = 3
"""A call without max_tokens is sized to what is left; when others took it meanwhile, it is sized again so often."""

MOST_OUTPUT = 1_000_000
"""No model writes so many tokens in one answer: reserved where all that is known is that they can be paid."""

Scopes = Mapping[ScopeKind, Sequence[str]]


class Admitted(msgspec.Struct, frozen=True):
    hold: Hold
    cap: int | None = None
    """Output tokens, for each choice, that the upstream is told; None where the caller's own limit holds, or none."""
    prompt: int | None = None
    """Tokens of the prompt that money is held for; None where no hard budget applies."""
    output: int | None = None
    """The same of the output, over all choices."""


class Admission:
    def __init__(self, leases: Leases, dispatcher: Dispatcher) -> None:
        self._leases = leases
        self._dispatcher = dispatcher

    async def admit(self, operation: Operation, call: Call, model: str, book: PriceBook) -> Admitted:
        """Hold the worst case, in money under hard budgets and in tokens under limits, in all of them or in none.

        Where nothing bounds the call the hold is of nothing: it only marks where the charge will count.

        Raises ApiError 402 naming the exhausted scope, that the model is unpriced or that a budget is in another
        currency; 429 naming the limit; 503 when the database is away and no lease is at hand.
        """
        try:
            return await self._admit(operation, call, model, book)
        except BudgetError as error:
            raise budget_refusal(error) from error
        except LimitExceeded as error:
            raise limit_refusal(error) from error

    async def admit_flat(self, operation: Operation, model: str, amount: Decimal | None = NOTHING) -> Hold:
        """Hold a place in every limit of requests and of calls at once, and what a call without tokens will be billed.

        Raises as `admit`.
        """
        try:
            return await self._hold(operation.id, _scopes(operation, model), Need(amount, 0))
        except BudgetError as error:
            raise budget_refusal(error) from error
        except LimitExceeded as error:
            raise limit_refusal(error) from error

    async def _admit(self, operation: Operation, call: Call, model: str, book: PriceBook) -> Admitted:
        scopes = _scopes(operation, model)
        left = self._leases.left_at_hand(scopes) or await self._left(scopes)
        money, tokens = left.money, left.tokens
        if money is None and tokens is None:
            return Admitted(await self._hold(operation.id, scopes, Need(NOTHING, 0)))
        price = book.sale(model, operation.tier, operation.payer)
        if money is not None and not _has_bound(price):
            # refuses it, unless the budget has gone meanwhile
            return Admitted(await self._hold(operation.id, scopes, Need(None, 0)))
        size = await self._dispatcher.prompt_size(call, model)
        for last in [False] * (TRIES - 1) + [True]:
            output, cap = _output(call, size, price, money, tokens)
            amount = NOTHING if money is None else worst_case(price, size.tokens, output * call.choices, call.images)
            try:
                hold = await self._hold(operation.id, scopes, Need(amount, size.tokens + output * call.choices))
            except (BudgetError, LimitExceeded):
                if cap is None or last:
                    raise
                left = await self._left(scopes)
                money, tokens = left.money, left.tokens
                if money is None and tokens is None:  # what refused it has gone meanwhile
                    return Admitted(await self._hold(operation.id, scopes, Need(NOTHING, 0)))
            else:
                return Admitted(hold, cap) if money is None else Admitted(hold, cap, size.tokens, output * call.choices)
        raise AssertionError("the last try returns or raises")

    async def _left(self, scopes: Scopes) -> Left:
        async with reachable():
            return await self._leases.left(scopes)

    async def _hold(self, operation_id: UUID, scopes: Scopes, need: Need) -> Hold:
        """Most leases suffice, and need no clock."""
        hold = self._leases.admit_at_hand(operation_id, scopes, need)
        if hold is not None:
            return hold
        async with reachable():
            return await self._leases.admit_waiting(operation_id, scopes, need)

    def settle(self, hold: Hold, billed: Decimal | None, tokens: int) -> None:
        """The operation has its row: what it was billed takes the place of what was held."""
        self._leases.settle(hold, billed, tokens)

    def release(self, hold: Hold) -> None:
        """The operation will never have a row."""
        self._leases.release(hold)


def _scopes(operation: Operation, model: str) -> Scopes:
    principal, attribution = operation.principal, operation.attribution
    assert principal is not None
    scopes: dict[ScopeKind, Sequence[str]] = {**principal.scopes, "model": (model,)}
    if attribution is not None and attribution.scopes:
        scopes["tag"] = attribution.scopes
    return scopes


def _affordable(call: Call, size: PromptSize, price: Price | None, money: Decimal | None, tokens: int | None) -> int:
    """Output tokens for each choice that what is left of the tightest budget and limit allows; may be negative."""
    bounds = []
    if money is not None:
        bounds.append(affordable_output(price, size.tokens, money, call.images))
    if tokens is not None:
        bounds.append(tokens - size.tokens)
    return min(bounds) // call.choices


def _has_bound(price: Price | None) -> bool:
    """Whether every class of tokens has a price, so that a call has a worst case."""
    return price is not None and price.dearest_input is not None and price.dearest_output is not None


def _output(
    call: Call, size: PromptSize, price: Price | None, money: Decimal | None, tokens: int | None
) -> tuple[int, int | None]:
    """(tokens to reserve for each choice, cap to send upstream or None): the caller's limit, the room left in the
    context, or what is affordable, at least 1, so that an exhausted budget is refused by name."""
    if call.kind == "embedding":
        return 0, None
    room = size.room
    if call.max_output is not None:
        if call.max_output < 0:
            raise _endless(call)
        return (call.max_output if room is None else min(call.max_output, room)), None
    affordable = _affordable(call, size, price, money, tokens)
    if room is not None and affordable >= room:
        return room, None
    if size.max_output is not None:  # told more than it can, an upstream would refuse
        affordable = min(affordable, size.max_output)
    elif room is None and affordable >= MOST_OUTPUT:
        return MOST_OUTPUT, None
    return max(affordable, 1), max(affordable, 1)


def _endless(call: Call) -> ApiError:
    name = "max_output_tokens" if call.api == "responses" else "max_tokens"
    text = f"`{name}` is below 0, which some upstreams read as no limit. Send a limit, or leave it out."
    return ApiError(400, "invalid_value", text, param=name)
