"""Which sale price a request is billed at: the standard one, or, where it asks for it, the one with priority."""

import msgspec

from billing.prices import PriceBook, Tier
from gateway.call import Call
from gateway.errors import ApiError
from gateway.operation import Operation

URGENT = -1
"""What an engine of ours is told: it runs before everybody else, whose priority is 0."""


def choose_tier(operation: Operation, call: Call, book: PriceBook) -> Call:
    """Set the operation's tier by what the call asks for; return the call as the upstreams are asked.

    `service_tier: "priority"` is sold where the model has a price for it. A model that has no price at all is served as
    it is asked, its charge unknown as ever. Raises ApiError 400 where the model has other prices only: the request
    would cost more than the caller is billed. Other values go to the upstream at the standard price.
    """
    if "service_tier" not in call.fields or msgspec.json.decode(call.fields["service_tier"]) != "priority":
        return call
    if operation.tier == "batch":
        raise _refused("A batch runs when there is room, so that its lines cannot ask for priority")
    assert operation.model is not None, "it is routed"
    has_price = book.sale(operation.model, "priority", operation.payer) is not None
    if not has_price and book.sale(operation.model, payer=operation.payer) is not None:
        raise _refused(f"The model {operation.model!r} has no price for priority")
    operation.tier = "priority"
    return msgspec.structs.replace(call, priority=URGENT)


def served_tier(asked: Tier, served_standard: bool) -> Tier:
    """An upstream may serve at the standard tier what asked for priority, and say so."""
    return "standard" if asked == "priority" and served_standard else asked


def _refused(reason: str) -> ApiError:
    text = f'{reason}. Leave out `service_tier`, or ask for "default".'
    return ApiError(400, "unsupported_parameter", text, param="service_tier")
