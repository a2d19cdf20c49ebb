"""What an attempt is charged and what it cost: the exact token classes, then price book times classes.

Who reported decides the source. The engine's account is exact. Without it (the engine died) the last usage seen on the
stream counts, also the engine's own. Any other upstream's usage is `upstream`. Nobody reported: `estimated`, from the
characters that were sent and delivered. A caller that left is charged for the prompt and for the output it was sent.
"""

from decimal import Decimal

from billing.charge import charge, device_cost
from billing.prices import PriceBook
from billing.records import TokenClasses, UsageSource
from billing.usage import token_classes
from engine.protocol import Account
from gateway.call import Call
from gateway.operation import Attempt, Priced
from gateway.routing.rules import about_tokens
from gateway.upstreams.usage import Usage

CHARACTERS_PER_TOKEN = 4


def price_attempt(attempt: Attempt, call: Call, book: PriceBook) -> Priced:
    tokens, source, flag = count(attempt, call)
    sale = book.sale(attempt.model)
    cost_price = book.cost(attempt.model, attempt.upstream)
    cost: Decimal | None = None
    if attempt.refused:
        cost = Decimal(0)
    elif cost_price is not None and attempt.is_engine:
        seconds = _device_seconds(attempt.account)
        cost = None if seconds is None else device_cost(cost_price, seconds)
    elif cost_price is not None:
        cost = charge(cost_price, _reported(attempt.usage)[0] if attempt.usage else tokens)
    return Priced(
        tokens=tokens,
        usage_source=source,
        usage_flag=flag,
        billed=charge(sale, tokens),
        cost=cost,
        price_version_id=sale.id if sale else None,
        cost_version_id=cost_price.id if cost_price else None,
    )


def count(attempt: Attempt, call: Call) -> tuple[TokenClasses, UsageSource, str | None]:
    """The attempt's billable tokens, who counted them, and what was inconsistent in the count, if anything."""
    source: UsageSource = "engine" if attempt.is_engine else "upstream"
    if attempt.refused:
        return TokenClasses(), source, None
    if attempt.account is not None:
        return _delivered(_of_account(attempt.account), attempt), source, None
    usage = attempt.delivered if attempt.status == "upstream_error" else attempt.usage
    if usage is not None:
        reported, flag = _reported(usage)
        return _delivered(reported, attempt), source, "; ".join(words for words in (attempt.odd, flag) if words) or None
    if attempt.delivered_characters == 0 and (attempt.is_engine or attempt.status == "upstream_error"):
        return TokenClasses(), "estimated", attempt.odd
    return _estimate(attempt, call), "estimated", attempt.odd


def _of_account(account: Account) -> TokenClasses:
    return TokenClasses(
        input_fresh=account.input_fresh,
        input_cached=account.input_cached,
        input_cache_write=account.input_cache_write,
        output_text=account.output_text,
        output_reasoning=account.output_reasoning,
    )


def _reported(usage: Usage) -> tuple[TokenClasses, str | None]:
    return token_classes(
        usage.prompt_tokens,
        usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        total_tokens=usage.total_tokens,
    )


def _delivered(tokens: TokenClasses, attempt: Attempt) -> TokenClasses:
    """Cut the output down to what the caller was sent, unless it got all."""
    if attempt.status == "ok":
        return tokens
    sent = max(attempt.delivered.completion_tokens, 0) if attempt.delivered else 0
    reasoning = min(tokens.output_reasoning, sent)
    return TokenClasses(
        input_fresh=tokens.input_fresh,
        input_cached=tokens.input_cached,
        input_cache_write=tokens.input_cache_write,
        output_text=min(tokens.output_text, sent - reasoning),
        output_reasoning=reasoning,
    )


def _estimate(attempt: Attempt, call: Call) -> TokenClasses:
    prompt = sum(about_tokens(text) for _, text in call.texts())
    return TokenClasses(input_fresh=prompt, output_text=-(-attempt.delivered_characters // CHARACTERS_PER_TOKEN))


def _device_seconds(account: Account | None) -> float | None:
    return None if account is None else account.prefill_device_seconds + account.decode_device_seconds
