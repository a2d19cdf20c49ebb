"""One operation's explanation, for people and for scripts: exact digits in both."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec

from billing.explanation import Amount, AttemptExplanation, Explanation, PartAmount
from billing.records import CACHED_ANSWER_NUMBER, CachedAnswer
from gateway.amounts import exact


def as_object(found: Explanation) -> Any:
    """For JSON: amounts and counts of units as strings, every digit of them."""
    whole = msgspec.to_builtins(found)
    del whole["operation"]["prices"]  # each amount has the version it was made with
    return whole


def as_lines(found: Explanation) -> Iterator[str]:
    operation, record = found.operation, found.operation.record
    who = ", ".join(filter(None, (operation.user, operation.team, operation.org)))
    yield f"operation   {record.id}"
    yield f"started     {record.started_at.isoformat(timespec='milliseconds')}"
    yield f"who         {who or 'unknown'} (key {operation.key_name or record.key_id})"
    if record.tags:
        yield f"tags        {', '.join(f'{name}={value}' for name, value in record.tags.items())}"
    answered = record.model or "nothing was chosen"
    score = "" if record.route_score is None else f", score {record.route_score:g}"
    yield f"model       asked for {record.requested_model}, answered by {answered}{score}"
    if record.route_reasons:
        yield f"route       {'; '.join(record.route_reasons)}"
    yield f"status      {record.status} ({record.http_status}){f': {record.error}' if record.error else ''}"
    for attempt in found.attempts:
        yield from _attempt(attempt, record.currency)
    if record.cached is not None and found.cached is not None:
        yield from _cached(record.cached, found.cached, record.currency)
    for each in found.adjustments:
        deltas = [("billed", each.billed_delta), ("cost", each.cost_delta)]
        changed = ", ".join(f"{name} {exact(delta)}" for name, delta in deltas if delta is not None)
        yield ""
        what = "cached answer" if each.number == CACHED_ANSWER_NUMBER else f"attempt {each.number}"
        yield f"adjusted    {what}: {changed} ({each.reason}, by {each.actor})"
    yield ""
    for name in ("billed", "cost", "margin"):
        amount: Decimal | None = getattr(found, name)
        yield f"{name:<12}{'unknown' if amount is None else f'{exact(amount)} {record.currency}'}"


def _cached(cached: CachedAnswer, billed: Amount, currency: str) -> Iterator[str]:
    amounts = [("billed", cached.saved_billed), ("cost", cached.saved_cost)]
    came_to = ", ".join(
        f"{name} {'unknown' if amount is None else f'{exact(amount)} {currency}'}" for name, amount in amounts
    )
    yield ""
    yield f"cached      the answer of {cached.cached_from}, out of the response cache"
    yield (
        f"  saved     {cached.saved_prompt_tokens:,} prompt and {cached.saved_completion_tokens:,} output tokens; "
        f"they came to: {came_to}"
    )
    yield from _amount("billed", billed, currency)


def _attempt(attempt: AttemptExplanation, currency: str) -> Iterator[str]:
    record = attempt.record
    yield ""
    failed = f": {record.error}" if record.error else ""
    yield f"attempt {record.number}   {record.model} on {record.upstream}, {record.status}{failed}"
    flag = f" ({record.usage_flag})" if record.usage_flag else ""
    yield f"  usage     counted by: {record.usage_source}{flag}"
    yield from _amount("billed", attempt.billed, currency)
    yield from _amount("cost", attempt.cost, currency)


def _amount(name: str, side: Amount, currency: str) -> Iterator[str]:
    total = "unknown" if side.amount is None else f"{exact(side.amount)} {currency}"
    yield f"  {name:<9} {total}{f' ({side.note})' if side.note else ''}"
    if side.price is not None:
        since = side.price.effective_at.isoformat(timespec="seconds")
        override = f", terms {side.price.override_id}" if side.price.override_id else ""
        yield f"            price version {side.price.id} of {since}{override}"
    width = max((len(_product(part)) for part in side.parts), default=0)
    for part in side.parts:
        yield f"            {_product(part):<{width}} = {exact(part.amount)}"


def _product(part: PartAmount) -> str:
    per = {1: "", 3600: " an hour"}.get(part.per, f" per {part.per:,}")
    words = part.part.replace("_", " ")
    return f"{words:<17} {exact(part.quantity):>12} {part.unit} x {exact(part.unit_price)}{per}"
