"""The bodies of one request and its answer, while they pass, where the key says that payloads are recorded."""

from collections.abc import Mapping
from uuid import UUID

from billing.payloads import Body, Payload


class Recording:
    """Takes both bodies in pieces. The caller's own key is blacked out, wherever it was written."""

    __slots__ = ("_secrets", "answer", "request")

    def __init__(self, headers: Mapping[str, str]) -> None:
        words = (headers.get("authorization", "").rpartition(" ")[2], headers.get("x-api-key", ""))
        self._secrets = {word.encode("utf-8", "replace") for word in words if word}
        self.request, self.answer = Body(), Body()

    def payload(self, operation_id: UUID) -> Payload:
        return Payload(
            operation_id=operation_id,
            request=self._without_keys(self.request),
            request_bytes=self.request.size,
            answer=self._without_keys(self.answer),
            answer_bytes=self.answer.size,
        )

    def _without_keys(self, body: Body) -> bytes:
        kept = bytes(body.kept)
        for secret in self._secrets:
            kept = kept.replace(secret, b"*" * len(secret))
        return kept
