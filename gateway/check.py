"""What a configuration means, in lines for a person: each model's upstreams, prices and ways round a failure."""

from collections.abc import Iterator
from decimal import Decimal

from gateway.settings import ClassPrices, ModelSettings, Settings, TargetSettings, UpstreamSettings
from gateway.settings_file import Mistake

_CLASSES = {
    "input_fresh": "input",
    "input_cached": "cached",
    "input_cache_write": "cache write",
    "output_text": "output",
    "output_reasoning": "reasoning",
}
_PARTS = {"per_request": "a request", "per_image": "an image", "per_cached_answer": "a cached answer"}
_BALANCE = {
    "weighted": "shared out by weight",
    "least_busy": "the least busy one is asked",
    "latency": "the quickest one is asked",
    "prefix_affine": "the one that holds most of the prompt is asked",
}


def explain(settings: Settings) -> Iterator[str]:
    yield f"prices are in {settings.currency} per million tokens"
    yield f"auto: the large model from a score of {settings.router.threshold:g} on, else the small one"
    for role, name in settings.roles.items():
        yield f"{role}: {name}"
    for name, upstream in settings.upstreams.items():
        yield f"upstream {name}: {_upstream(upstream)}"
    for name, model in settings.models.items():
        yield ""
        yield f"model {name}"
        yield from (f"  {line}" for line in _model(name, model, settings))


def warnings(settings: Settings) -> Iterator[str]:
    """What works, and may still not be what was meant."""
    used = {target.upstream for model in settings.models.values() for target in model.upstreams}
    for name in settings.upstreams:
        if name not in used:
            yield f"no model uses the upstream {name!r}"
    for name, model in settings.models.items():
        missing = _unpriced(model.price)
        if len(missing) == len(_CLASSES):
            yield f"{name!r} has no price: its charge is unknown, and a hard budget refuses it"
        elif missing:
            words = ", ".join(missing)
            yield f"{name!r} has no price for {words}: a hard budget refuses it, and what has such tokens is unpriced"
        kinds = {settings.upstreams[target.upstream].kind for target in model.upstreams}
        if model.max_output is None and kinds != {"engine"}:
            yield (
                f"{name!r} has no max_output: under a hard budget a call without max_tokens holds, and asks for, as "
                "many tokens as are left, which can be more than its upstream takes"
            )
        for target in model.upstreams:
            if _cost(settings.upstreams[target.upstream], target) is None:
                yield f"{name!r} on {target.upstream!r} has no cost: its margin is unknown"


def with_excerpt(mistake: Mistake, text: str) -> list[str]:
    """The line of the file that a mistake is in, a caret under its place."""
    lines = text.splitlines()
    if mistake.place is None or not 0 < mistake.place.line <= len(lines):
        return []
    line = lines[mistake.place.line - 1].replace("\t", " ")
    return [f"    {line}", f"    {' ' * (mistake.place.column - 1)}^"]


def _upstream(upstream: UpstreamSettings) -> str:
    if upstream.api_key_env is not None:
        key = f"key from the variable {upstream.api_key_env}"
    elif upstream.api_key_file is not None:
        key = f"key from {upstream.api_key_file}"
    else:
        key = "no key"
    return f"{upstream.kind} at {upstream.base_url}, {key}"


def _model(name: str, model: ModelSettings, settings: Settings) -> Iterator[str]:
    yield f"billed {_prices(model.price)}"
    if model.batch_price is not None:
        yield f"in a batch {_prices(model.batch_price)}"
    if model.priority_price is not None:
        yield f"with priority {_prices(model.priority_price)}"
    for target in model.upstreams:
        cost = _cost_words(settings.upstreams[target.upstream], target)
        yield f"runs on {target.upstream}{_as(name, target)}, {cost}"
    if len(model.upstreams) > 1:
        yield f"of these {_BALANCE[model.balance]}"
    if model.hedge_after_seconds is not None:
        yield f"a second one is asked too after {model.hedge_after_seconds:g} seconds without an answer"
    times = f"asked again at most {model.retries} times" if model.retries else "asked once"
    yield times + (f", then {' and '.join(model.fallbacks)} may answer" if model.fallbacks else "")
    if (cache := model.response_cache) is not None:
        yield f"its answers are given again for {cache.seconds:g} seconds, within the same {cache.shared_by}"
    if model.drop_params:
        yield "what an upstream cannot honour is left out"


def _as(name: str, target: TargetSettings) -> str:
    words = "" if target.upstream_model in (None, name) else f" as {target.upstream_model}"
    words += f", weight {target.weight}" if target.weight != 1 else ""
    return words + (f", at most {target.max_concurrent} at a time" if target.max_concurrent is not None else "")


def _prices(prices: ClassPrices | None) -> str:
    known = {} if prices is None else prices.complete()
    names = _CLASSES | _PARTS
    words = [f"{names[name]} {price:f}" for name, price in known.items() if price is not None]
    return ", ".join(words) or "nothing: it has no price"


def _unpriced(prices: ClassPrices | None) -> list[str]:
    known = ClassPrices().complete() if prices is None else prices.complete()
    return [words for name, words in _CLASSES.items() if known[name] is None]


def _cost(upstream: UpstreamSettings, target: TargetSettings) -> Decimal | ClassPrices | None:
    return upstream.device_hour if upstream.kind == "engine" else target.cost


def _cost_words(upstream: UpstreamSettings, target: TargetSettings) -> str:
    cost = _cost(upstream, target)
    if isinstance(cost, ClassPrices):
        return f"costs {_prices(cost)}"
    if cost is not None:
        return f"costs {cost:f} an hour of its device"
    return "reports its cost itself" if upstream.kind == "openrouter" else "costs nobody knows what"
