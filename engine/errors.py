"""A request that cannot be served, in OpenAI's error shape."""

import msgspec

from engine.protocol import ErrorBody, ErrorDetail


class ApiError(Exception):
    """Answered with `status` and `body()`. `message` says what to do; `param` names the offending parameter."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, type: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(
            message, type or ("server_error" if status >= 500 else "invalid_request_error"), param, code
        )

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.detail))


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)
