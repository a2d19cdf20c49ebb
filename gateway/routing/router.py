"""What every router looks like: a call in, a model role with a score and its reasons out."""

from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.call import Call

Role = Literal["small", "large"]


@dataclass(frozen=True, slots=True)
class Decision:
    """`score` in [0, 1]: how much the call needs the large model. `reasons`: what spoke for it, strongest first."""

    role: Role
    score: float
    reasons: tuple[str, ...]


class Router(Protocol):
    def route(self, call: Call) -> Decision: ...
