"""What an attempt is charged and what it cost: the exact token classes, then price book times classes.

Who reported decides the source. The engine's account is exact. Without it (the engine died) the last usage seen on the
stream counts, also the engine's own. Any other upstream's usage is `upstream`. Nobody reported: `estimated`, from the
characters that were sent and delivered. A caller that left, or whose stream was cut, is charged for the prompt and for
the output it was sent. Of several attempts the caller pays the one that answered, at the price of the model it was
routed to, with the caller's own override of it; the operator's cost is that of each.

What becomes of a call that ends badly:

- The caller leaves before the first byte: an engine's account is charged, as far as it computed; another upstream's
  prompt is charged by an estimate, because it cannot be asked.
- The caller leaves after output: the prompt, and the output it was sent.
- The upstream dies or fails: what it had reported of what was delivered. Where it reported nothing, nothing is charged:
  the estimate is kept for the reader alone.
- Another attempt answers in its place: nothing; its cost is the operator's.

An upstream may count more than it was allowed: it ignores max_tokens, or adds a prompt of its own. What is above the
reservation, or above the caller's own limit of the output, is not charged, so that no hard budget is ever overspent.
The operator's cost stays what was reported, and `usage_flag` says so.
"""

from decimal import Decimal

import msgspec

from billing.charge import charge, device_cost
from billing.prices import Price, PriceBook
from billing.records import TokenClasses, UsageSource
from engine.protocol import Account
from gateway.call import Call
from gateway.operation import Attempt, Operation, Priced
from gateway.routing.rules import about_tokens
from gateway.tiers import served_tier
from gateway.upstreams.characters import CHARACTERS_PER_TOKEN
from gateway.upstreams.usage import Usage, classes_of
from gateway.upstreams.usage_dialect import CostedUsage

NOTHING_USED = "usage has no tokens, and there is an answer"
COSTED_IN = "USD"
"""Currency of the cost in a `CostedUsage`."""


def price_attempt(attempt: Attempt, operation: Operation, book: PriceBook, currency: str) -> Priced:
    assert operation.call is not None and operation.model is not None, "what was attempted was decoded and routed"
    tokens, source, flag = chargeable(attempt, operation)
    images = operation.call.images if tokens.prompt_tokens + tokens.completion_tokens else 0
    served = served_tier(operation.tier, attempt.served_standard)
    cost_price = book.cost(attempt.model, attempt.upstream, served)
    sale, tier = book.sale(operation.model, served, operation.payer), served
    if served != operation.tier:  # money is held for what was asked for: nobody pays more for being served otherwise
        asked = book.sale(operation.model, operation.tier, operation.payer)
        if _is_less(charge(asked, tokens, images), charge(sale, tokens, images)):
            sale, tier = asked, operation.tier
    unheard = attempt.status == "upstream_error" and attempt.usage is None and attempt.account is None
    billable = attempt.billable and not unheard
    return Priced(
        tokens=tokens,
        usage_source=source,
        usage_flag=flag,
        billed=charge(sale, tokens, images) if billable else Decimal(0),
        cost=_cost(attempt, tokens, images, cost_price, currency),
        price_version_id=sale.id if sale else None,
        cost_version_id=cost_price.id if cost_price else None,
        price_override_id=sale.override_id if sale else None,
        tier=tier,
        images=images,
        billable=billable,
    )


def chargeable(attempt: Attempt, operation: Operation) -> tuple[TokenClasses, UsageSource, str | None]:
    """`count`, of the attempt that the caller pays no more than was reserved or allowed."""
    assert operation.call is not None, "what was attempted was decoded"
    tokens, source, flag = count(attempt, operation.call, operation.reserved_output)
    if not attempt.billable:
        return tokens, source, flag
    tokens, over = _promised(tokens, operation)
    return tokens, source, "; ".join(filter(None, (flag, over))) or None


def _is_less(amount: Decimal | None, than: Decimal | None) -> bool:
    """One that is known is less than one that is not."""
    return amount is not None and (than is None or amount < than)


def settled_usage(priced: Priced) -> Usage:
    """The attempt's tokens as a caller is told them."""
    tokens = priced.tokens
    return Usage.of(
        tokens.prompt_tokens,
        tokens.completion_tokens,
        cached=tokens.input_cached,
        written=tokens.input_cache_write,
        reasoning=tokens.output_reasoning,
    )


def _cost(attempt: Attempt, tokens: TokenClasses, images: int, price: Price | None, currency: str) -> Decimal | None:
    if attempt.refused:
        return Decimal(0)
    if isinstance(attempt.usage, CostedUsage) and attempt.usage.cost is not None and currency == COSTED_IN:
        return attempt.usage.cost
    if price is None:
        return None
    if attempt.is_engine:
        seconds = _device_seconds(attempt.account)
        return None if seconds is None else device_cost(price, seconds)
    if attempt.usage is None and not attempt.billable:
        return None
    return charge(price, classes_of(attempt.usage)[0] if attempt.usage else tokens, images)


def count(attempt: Attempt, call: Call, most_output: int | None = None) -> tuple[TokenClasses, UsageSource, str | None]:
    """The attempt's billable tokens, who counted them, and what was inconsistent in the count, if anything.

    `most_output`: tokens that were reserved; an estimate never says more.
    """
    source: UsageSource = "engine" if attempt.is_engine else "upstream"
    if attempt.refused:
        return TokenClasses(), source, None
    if attempt.account is not None:
        return _delivered(_of_account(attempt.account), attempt), source, None
    partial = attempt.cut or attempt.status == "upstream_error"
    usage = attempt.delivered if partial else attempt.usage
    if usage is not None:
        reported, flag = classes_of(usage)
        odd = "; ".join(words for words in (attempt.odd, flag) if words) or None
        if not reported.prompt_tokens + reported.completion_tokens and attempt.delivered_characters:
            return _estimate(attempt, call, most_output), "estimated", "; ".join(filter(None, (odd, NOTHING_USED)))
        if usage is attempt.delivered and attempt.unreported_characters:
            return _with_unreported(reported, attempt, most_output), "estimated", odd
        return _delivered(reported, attempt), source, odd
    if attempt.delivered_characters == 0 and (attempt.is_engine or attempt.status == "upstream_error"):
        return TokenClasses(), "estimated", attempt.odd
    return _estimate(attempt, call, most_output), "estimated", attempt.odd


def _of_account(account: Account) -> TokenClasses:
    return TokenClasses(
        input_fresh=account.input_fresh,
        input_cached=account.input_cached,
        input_cache_write=account.input_cache_write,
        output_text=account.output_text,
        output_reasoning=account.output_reasoning,
    )


def _delivered(tokens: TokenClasses, attempt: Attempt) -> TokenClasses:
    """Cut the output down to what the caller was sent, unless it got all."""
    if _is_whole(attempt):
        return tokens
    sent = max(attempt.delivered.completion_tokens, 0) if attempt.delivered else 0
    return _first_output(tokens, sent + _tokens_in(attempt.unreported_characters))


def _first_output(tokens: TokenClasses, most: int) -> TokenClasses:
    """With so many tokens of output; what a model thinks comes before what it says."""
    reasoning = min(tokens.output_reasoning, most)
    return msgspec.structs.replace(
        tokens, output_text=min(tokens.output_text, most - reasoning), output_reasoning=reasoning
    )


def _promised(tokens: TokenClasses, operation: Operation) -> tuple[TokenClasses, str | None]:
    """Those that the caller can be charged for, and what was above that."""
    over = []
    most = operation.reserved_prompt
    if most is not None and tokens.prompt_tokens > most:
        over.append(f"of {tokens.prompt_tokens} prompt tokens {most} were reserved")
        cached = min(tokens.input_cached, most)
        written = min(tokens.input_cache_write, most - cached)
        fresh = min(tokens.input_fresh, most - cached - written)
        tokens = msgspec.structs.replace(tokens, input_cached=cached, input_cache_write=written, input_fresh=fresh)
    most = _most_output(operation)
    if most is not None and tokens.completion_tokens > most:
        over.append(f"of {tokens.completion_tokens} output tokens {most} were allowed")
        tokens = _first_output(tokens, most)
    return tokens, f"{' and '.join(over)}: the rest is not charged" if over else None


def _most_output(operation: Operation) -> int | None:
    """Over all choices; None where neither a reservation nor the caller bounds it."""
    call = operation.call
    if operation.reserved_output is not None or call is None or call.max_output is None or call.max_output < 0:
        return operation.reserved_output
    return call.max_output * call.choices


def _is_whole(attempt: Attempt) -> bool:
    return attempt.status == "ok" and not attempt.cut


def _with_unreported(tokens: TokenClasses, attempt: Attempt, most_output: int | None) -> TokenClasses:
    """Reported tokens and, estimated, what was delivered after the report: Anthropic's first event has one of these.

    Of a whole answer the last report may already have counted what followed, so there nothing is added up.
    """
    unreported = _tokens_in(attempt.unreported_characters)
    whole = _is_whole(attempt)
    output = max(tokens.output_text, unreported) if whole else tokens.output_text + unreported
    if most_output is not None:
        output = max(min(output, most_output - tokens.output_reasoning), tokens.output_text)
    return msgspec.structs.replace(tokens, output_text=output)


def _tokens_in(characters: int) -> int:
    return -(-characters // CHARACTERS_PER_TOKEN)


def _estimate(attempt: Attempt, call: Call, most_output: int | None) -> TokenClasses:
    output = _tokens_in(attempt.delivered_characters)
    return TokenClasses(
        input_fresh=about_prompt(call), output_text=output if most_output is None else min(output, most_output)
    )


def about_prompt(call: Call) -> int:
    """Tokens of the prompt, estimated from its text."""
    return sum(about_tokens(text) for _, text in call.texts())


def _device_seconds(account: Account | None) -> float | None:
    return None if account is None else account.prefill_device_seconds + account.decode_device_seconds
