"""What the gateway says when it cannot answer: one exception a kind of ending, each with a sentence for the caller."""

from billing.records import Status


class ClientGoneError(Exception):
    """The caller closed its connection before the answer was complete."""


class ApiError(Exception):
    """An answer that is an error. Wire formats turn it into their own shape; the pipeline into the operation's row.

    `outcome` is the row's status: `invalid` (the request is wrong), `refused` (budget, limit, price), `upstream_error`.
    """

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        param: str | None = None,
        outcome: Status = "invalid",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.outcome: Status = outcome
        self.headers = headers or {}

    @property
    def type(self) -> str:
        """OpenAI's error type."""
        if self.status >= 500:
            return "server_error"
        return "insufficient_quota" if self.status == 402 else "invalid_request_error"


class UpstreamReplyError(ApiError):
    """The upstream's own error answer, handed to the caller as it came."""

    def __init__(self, status: int, body: bytes, message: str, headers: dict[str, str]) -> None:
        super().__init__(status, None, message, outcome="invalid", headers=headers)
        self.body = body


def unavailable(what: str, *, retry_after: int = 2) -> ApiError:
    """503 with Retry-After: something the gateway needs is away and is expected back."""
    message = f"{what} Try again in {retry_after} seconds."
    headers = {"retry-after": str(retry_after)}
    return ApiError(503, "service_unavailable", message, outcome="upstream_error", headers=headers)
