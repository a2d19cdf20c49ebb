"""One account for a request that ran as several sequences."""

from collections.abc import Sequence

import msgspec

from engine.protocol import Account

SUMMED = (
    "output_text",
    "output_reasoning",
    "generated_tokens",
    "recomputed_tokens",
    "prefill_device_seconds",
    "decode_device_seconds",
    "kv_block_seconds",
    "drafted_tokens",
    "accepted_tokens",
    "preemptions",
)
PROMPT = ("input_fresh", "input_cached", "input_cache_write")


def combine(accounts: Sequence[Account], *, one_prompt: bool) -> Account:
    """The sum of what the sequences used, from the first one's arrival to the last one's end.

    With `one_prompt` all had the same prompt, and it is counted once, as the first one found it.
    """
    if len(accounts) == 1:
        return accounts[0]
    names = SUMMED if one_prompt else (*PROMPT, *SUMMED)
    sums = {name: sum(getattr(account, name) for account in accounts) for name in names}
    first_tokens = [account.ttft_seconds for account in accounts if account.ttft_seconds is not None]
    gaps = [(account.mean_inter_token_seconds, account.generated_tokens - 1) for account in accounts]
    known = [(mean, count) for mean, count in gaps if mean is not None]
    longest = [account.max_inter_token_seconds for account in accounts if account.max_inter_token_seconds is not None]
    return msgspec.structs.replace(
        accounts[0],
        **sums,
        queue_seconds=min(account.queue_seconds for account in accounts),
        ttft_seconds=min(first_tokens, default=None),
        mean_inter_token_seconds=sum(m * n for m, n in known) / sum(n for _, n in known) if known else None,
        max_inter_token_seconds=max(longest, default=None),
        total_seconds=max(account.total_seconds for account in accounts),
    )
