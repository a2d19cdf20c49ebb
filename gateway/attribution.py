"""Who pays is decided by the key alone; what else a request may say about itself, and what it may not.

A request is tagged by its key, by the user that its body names (OpenAI's `user`, Anthropic's `metadata.user_id`) and by
`x-farthing-tags: scenario=chat,feature=search`. Budgets and limits can hang on a tag, so whoever chooses tags freely
can leave one budget and drain another. Hence a key is made without `may_attribute`: the body's user is recorded for the
reader of the ledger and counts nowhere, and the header is refused. With `may_attribute` (for one's own service, which
speaks for many users) both count. A key's own tags always count, and win.
"""

import urllib.parse
from collections.abc import Collection, Mapping
from typing import NamedTuple

from billing.people import Principal
from billing.restrictions import RestrictionError, check_tags
from gateway.errors import ApiError

TAGS_HEADER = "x-farthing-tags"

_ADDRESS_HEADERS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "x-", "openai-", "x-openai-", "anthropic-", "x-anthropic-", "x-litellm-", "x-farthing-")
    for name in ("base-url", "api-base", "api-url", "target-url", "upstream-url")
) | {"x-portkey-custom-host", "helicone-target-url", "helicone-openai-api-base"}
_ADDRESS_FIELDS = frozenset(
    {"base_url", "baseURL", "baseUrl", "api_base", "apiBase", "api_url", "api_key", "apiKey", "custom_host"}
    | {"target_url", "upstream_url", "user_config", "litellm_params"}
)


class Attribution(NamedTuple):
    """What a request is tagged with."""

    tags: dict[str, str]
    """For the ledger's row."""
    scopes: tuple[str, ...]
    """`name=value` of the tags whose budgets and limits apply, sorted."""


def attribute(principal: Principal, headers: Mapping[str, str], claimed: Mapping[str, str]) -> Attribution:
    """The tags of a request. `claimed`: what its body says (`Call.tags`: the user it names, made storable).

    Raises ApiError 400 for a header that cannot be read, 403 for one that the key does not allow.
    """
    header = headers.get(TAGS_HEADER)
    if header is None and not claimed:
        return Attribution(principal.tags, _scopes(principal.tags))
    if header is not None and not principal.may_attribute:
        text = f"This API key may not set {TAGS_HEADER}. Leave the header out, or ask your operator to allow it."
        raise ApiError(403, "attribution_not_allowed", text)
    said = _read(header) if header is not None else {}
    for name in said.keys() & principal.tags.keys():
        raise _bad(f"`{name}` is set by the API key; leave it out")
    tags = {**claimed, **said, **principal.tags}
    return Attribution(tags, _scopes(tags if principal.may_attribute else principal.tags))


def refuse_addresses(headers: Mapping[str, str], fields: Collection[str] = ()) -> None:
    """Raises ApiError 400 naming a header or a top-level body field that wants to say where the request goes, or with
    which key of a provider. Only the operator's configuration does."""
    if not _ADDRESS_HEADERS.isdisjoint(headers):
        name = next(name for name in headers if name in _ADDRESS_HEADERS)
        raise _address(f"The header `{name}`", None)
    if not _ADDRESS_FIELDS.isdisjoint(fields):
        name = next(name for name in fields if name in _ADDRESS_FIELDS)
        raise _address(f"The field `{name}`", name)


def _read(header: str) -> dict[str, str]:
    """`name=value,name=value`; a value may be percent-encoded UTF-8, as in the W3C's baggage."""
    tags: dict[str, str] = {}
    for part in header.split(","):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or name in tags:
            raise _bad("write `name=value`, each name once, with commas between")
        try:
            tags[name] = urllib.parse.unquote(value.strip(), errors="strict")
        except UnicodeDecodeError:
            raise _bad(f"the value of `{name[:80]}` is not percent-encoded UTF-8") from None
    try:
        check_tags(tags)
    except RestrictionError as error:
        raise _bad(str(error)) from None
    return tags


def _scopes(tags: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(sorted(f"{name}={value}" for name, value in tags.items())) if tags else ()


def _bad(why: str) -> ApiError:
    return ApiError(400, "invalid_tags", f"The header {TAGS_HEADER} cannot be used: {why}.", param=TAGS_HEADER)


def _address(what: str, param: str | None) -> ApiError:
    text = f"{what} is refused: where a request goes is decided by Farthing's configuration. Leave it out."
    return ApiError(400, "address_refused", text, param=param)
