"""How upstreams report what they counted, read as OpenAI has it: parts inside their totals.

| reported by | cached | cache-write | reasoning |
|---|---|---|---|
| OpenAI, vLLM, SGLang, TensorRT-LLM, llama.cpp, Ollama, Farthing's engine | `prompt_tokens_details.cached_tokens`, inside | | `completion_tokens_details.reasoning_tokens` (SGLang also `reasoning_tokens`), inside |
| OpenRouter | the same | `prompt_tokens_details.cache_write_tokens`, inside | the same; `cost` in US dollars |
| DeepSeek | `prompt_cache_hit_tokens`, inside; hit + miss = prompt | | inside |
| Anthropic | `cache_read_input_tokens`, beside | `cache_creation_input_tokens`, beside | inside `output_tokens` |
| Gemini's OpenAI endpoint | inside | | beside: in `total_tokens` alone, or named as well |
"""  # noqa: E501

from decimal import Decimal
from typing import Any

import msgspec

from gateway.upstreams.kinds import Place
from gateway.upstreams.usage import Usage, read_usage


class CostedUsage(Usage, frozen=True):
    """Usage of an upstream that says what the call cost, in US dollars."""

    cost: Decimal | None = None


class _Cost(msgspec.Struct):
    cost: Decimal | None = None


class VendorUsage:
    """Reads every vendor's names; `cache` and `reasoning` say whether these counts are inside their totals."""

    def __init__(self, cache: Place = "inside", reasoning: Place = "inside", *, reports_cost: bool = False) -> None:
        self._cache_beside = cache == "beside"
        self._reasoning_beside = reasoning == "beside"
        self._reports_cost = reports_cost
        self._plain = not (self._cache_beside or self._reasoning_beside or reports_cost)

    def normalise(self, raw: bytes) -> tuple[Usage | None, str | None]:
        """(usage as OpenAI has it, what was odd in it) of the JSON of a `usage` field, which may be null."""
        oddly = None
        if self._plain:  # an engine reports with every chunk: what needs no translation gets none
            usage, odd = read_usage(raw)
            if usage is not None and odd is None and _is_openai(usage, raw):
                return usage, None
            oddly = odd if usage is not None else None
        value = msgspec.json.decode(raw)
        if not isinstance(value, dict):
            return read_usage(raw)
        usage, odd = read_usage(msgspec.json.encode(self._as_openai(value)))
        return (_with_cost(usage, raw) if usage is not None and self._reports_cost else usage), odd or oddly

    def _as_openai(self, value: dict[str, Any]) -> dict[str, Any]:
        prompt_details = _object(value, "prompt_tokens_details", "input_tokens_details")
        completion_details = _object(value, "completion_tokens_details", "output_tokens_details")
        cached = _first(
            (prompt_details, "cached_tokens"),
            (value, "prompt_cache_hit_tokens"),
            (value, "cache_read_input_tokens"),
            (value, "cached_tokens"),
        )
        written = _first((prompt_details, "cache_write_tokens"), (value, "cache_creation_input_tokens"))
        reasoning = _first((completion_details, "reasoning_tokens"), (value, "reasoning_tokens"))
        prompt = _first((value, "prompt_tokens"), (value, "input_tokens"))
        if prompt is None:
            prompt = _plus(value.get("prompt_cache_miss_tokens"), value.get("prompt_cache_hit_tokens"))
        completion = _first((value, "completion_tokens"), (value, "output_tokens"))
        total = value.get("total_tokens")
        if self._cache_beside:
            total, prompt = _plus(total, cached, written), _plus(prompt, cached, written)
        if self._reasoning_beside:
            reasoning, completion = _inside(prompt, completion, reasoning, total)
        counts = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }
        return {name: count for name, count in counts.items() if count is not None}


def _is_openai(usage: Usage, raw: bytes) -> bool:
    """Whether no count is there by a name that only another vendor uses."""
    if b"prompt_cache_" in raw or (usage.prompt_tokens_details is None and b"cache" in raw):
        return False
    return usage.completion_tokens_details is not None or b"reasoning" not in raw


def _with_cost(usage: Usage, raw: bytes) -> Usage:
    """With the amount exactly as it was written; without one where it is not one."""
    try:
        cost = msgspec.json.decode(raw, type=_Cost).cost
    except msgspec.ValidationError:
        return usage
    if cost is None or not cost.is_finite() or cost < 0:
        return usage
    return CostedUsage(**msgspec.structs.asdict(usage), cost=cost)


def _inside(prompt: Any, completion: Any, reasoning: Any, total: Any) -> tuple[Any, Any]:
    """(reasoning, completion with it) where it is beside: named, or only what the total has more than its parts.

    A total that its two parts add up to has the reasoning inside already, whatever the vendor did before.
    """
    rest = total - prompt - (completion or 0) if _are_whole(total, prompt, completion or 0) else None
    if rest == 0:
        return reasoning, completion
    if reasoning is None and rest is not None and rest > 0:
        reasoning = rest
    return reasoning, completion if reasoning is None else _plus(completion or 0, reasoning)


def _object(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return next((value[name] for name in names if isinstance(value.get(name), dict)), {})


def _first(*places: tuple[dict[str, Any], str]) -> Any:
    """The first count that is there; what is no number is kept, for its reader to complain about."""
    return next((holder[name] for holder, name in places if holder.get(name) is not None), None)


def _plus(count: Any, *parts: Any) -> Any:
    """`count` and those parts of it that are counts; as it is where it is none itself."""
    if not _are_whole(count):
        return count
    return int(count) + sum(int(part) for part in parts if _are_whole(part) and part > 0)


def _are_whole(*counts: Any) -> bool:
    return all(
        (isinstance(count, int) and not isinstance(count, bool)) or (isinstance(count, float) and count.is_integer())
        for count in counts
    )
