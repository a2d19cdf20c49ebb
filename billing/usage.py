"""From the counts an upstream reports to five disjoint token classes."""

from billing.records import TokenClasses

MOST_TOKENS = 10**18
"""A larger count reads as this. The ledger holds it in a bigint, and so it does the sum of the five classes."""


def token_classes(
    prompt_tokens: int,
    completion_tokens: int,
    *,
    cached_tokens: int = 0,
    cache_write_tokens: int = 0,
    reasoning_tokens: int = 0,
    total_tokens: int | None = None,
) -> tuple[TokenClasses, str | None]:
    """Split reported counts, of which cached and written are inside the prompt and reasoning inside the completion.

    Returns the classes and what was inconsistent, or None. A count that cannot be right earns no discount: a negative
    one reads as 0, an absurdly large one as MOST_TOKENS, and where the parts exceed their whole, the whole is taken as
    fresh input (or plain output).
    """
    flag = None
    if not (
        cached_tokens >= 0
        and 0 <= cache_write_tokens <= prompt_tokens - cached_tokens
        and 0 <= reasoning_tokens <= completion_tokens <= MOST_TOKENS
        and prompt_tokens <= MOST_TOKENS
        and (total_tokens is None or total_tokens == prompt_tokens + completion_tokens)
    ):
        counts = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "cached_tokens": cached_tokens,
            "cache_write_tokens": cache_write_tokens,
            "reasoning_tokens": reasoning_tokens,
        }
        repaired, flag = _repaired(counts, total_tokens)
        prompt_tokens, completion_tokens, cached_tokens, cache_write_tokens, reasoning_tokens = repaired
    classes = TokenClasses(
        input_fresh=prompt_tokens - cached_tokens - cache_write_tokens,
        input_cached=cached_tokens,
        input_cache_write=cache_write_tokens,
        output_text=completion_tokens - reasoning_tokens,
        output_reasoning=reasoning_tokens,
    )
    return classes, flag


def _repaired(counts: dict[str, int], total_tokens: int | None) -> tuple[tuple[int, int, int, int, int], str | None]:
    """(prompt, completion, cached, written, reasoning) that fit each other, and what was wrong with the counts."""
    wrong = [f"{name} is {max(count, -MOST_TOKENS)}" for name, count in counts.items() if count < 0]
    wrong += [f"{name} is more than {MOST_TOKENS}" for name, count in counts.items() if count > MOST_TOKENS]
    prompt, completion, cached, written, reasoning = (min(max(count, 0), MOST_TOKENS) for count in counts.values())
    if total_tokens is not None and total_tokens != prompt + completion:
        total_tokens = min(max(total_tokens, -MOST_TOKENS), 2 * MOST_TOKENS)
        wrong.append(f"total_tokens is {total_tokens}, its parts are {prompt} + {completion}")
    if cached + written > prompt:
        wrong.append(f"cached_tokens {cached} + cache_write_tokens {written} exceed prompt_tokens {prompt}")
        cached = written = 0
    if reasoning > completion:
        wrong.append(f"reasoning_tokens {reasoning} exceed completion_tokens {completion}")
        reasoning = 0
    return (prompt, completion, cached, written, reasoning), "; ".join(wrong) or None
