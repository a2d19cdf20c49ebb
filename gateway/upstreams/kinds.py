"""The kinds of upstream that a configuration can name, and what is known of each: facts of their documentation."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

KindName = Literal[
    "engine",
    "openai",
    "vllm",
    "sglang",
    "tensorrt-llm",
    "llama.cpp",
    "ollama",
    "deepseek",
    "anthropic",
    "gemini",
    "openrouter",
]
Place = Literal["inside", "beside"]
"""Whether a count is part of the total that it belongs to, or comes on top of it."""

_NULL = b"null"
_CHOICES = {"n": (b"1", _NULL)}
_BIAS = {"logit_bias": (b"{}", _NULL)}


class Kind(NamedTuple):
    base_url: str
    """Where it is when the configuration does not say."""
    health: str
    """Asked whether it is there: a path under `base_url`, or one of the whole server where it starts with `//`."""
    cache: Place = "inside"
    """Cached and cache-write tokens, to the prompt's."""
    reasoning: Place = "inside"
    """Reasoning tokens, to the completion's."""
    reports_cost: bool = False
    """`usage.cost` is what the call cost, in US dollars."""
    refuses: Mapping[str, tuple[bytes, ...]] = MappingProxyType({})
    """Parameters that it cannot honour, with the JSON values that ask for nothing."""
    completion_limit: bool = True
    """Understands `max_completion_tokens`; elsewhere it is sent by its older name, `max_tokens`."""


KINDS: dict[KindName, Kind] = {
    "engine": Kind("http://127.0.0.1:8001/v1", "//health"),
    "openai": Kind("https://api.openai.com/v1", "/models"),
    "vllm": Kind("http://127.0.0.1:8000/v1", "//health"),
    "sglang": Kind("http://127.0.0.1:30000/v1", "//health"),
    "tensorrt-llm": Kind("http://127.0.0.1:8000/v1", "//health"),
    "llama.cpp": Kind("http://127.0.0.1:8080/v1", "//health"),
    "ollama": Kind(
        "http://127.0.0.1:11434/v1",
        "/models",
        refuses={**_CHOICES, **_BIAS, "tool_choice": (b'"auto"', _NULL)},
        completion_limit=False,
    ),
    "deepseek": Kind(
        "https://api.deepseek.com/v1",
        "/models",
        refuses={**_CHOICES, **_BIAS, "seed": (_NULL,)},
        completion_limit=False,
    ),
    "anthropic": Kind("https://api.anthropic.com/v1", "/models", cache="beside"),
    "gemini": Kind(
        "https://generativelanguage.googleapis.com/v1beta/openai", "/models", reasoning="beside", refuses=_BIAS
    ),
    "openrouter": Kind("https://openrouter.ai/api/v1", "/models", reports_cost=True),
}
