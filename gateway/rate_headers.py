"""What a limit by the minute leaves a caller, in OpenAI's words: on answers and on refusals alike."""

from typing import Literal

from billing.leases import Rate


def rate_headers(kind: Literal["requests", "tokens"], rate: Rate) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{kind}": str(rate.limit),
        f"x-ratelimit-remaining-{kind}": str(max(rate.remaining, 0)),
        f"x-ratelimit-reset-{kind}": f"{rate.reset_seconds:.3f}s",
    }
