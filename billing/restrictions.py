"""What a key may be used for, and what its operations are tagged with."""

import ipaddress
import re
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Address, IPv6Network

import msgspec

Network = IPv4Network | IPv6Network

ROUTES = ("chat.completions", "completions", "embeddings", "responses", "messages", "files", "batches", "models")
"""The interfaces that a key can be restricted to. Counting tokens goes with `messages`."""

MAX_TAGS = 16
MAX_TAG_CHARACTERS = 256
_TAG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DECIDED_BY_THE_KEY = frozenset({"org", "team", "key", "model"})


class RestrictionError(ValueError):
    """A restriction or a tag makes no sense; the message says which and what to write instead."""


class Restrictions(msgspec.Struct, frozen=True, kw_only=True):
    """None restricts nothing."""

    models: frozenset[str] | None = None
    """Names that may be asked for; `auto`, `small` and `large` are names like any other."""
    routes: frozenset[str] | None = None
    """Some of ROUTES."""
    networks: tuple[Network, ...] | None = None
    tags: dict[str, str] = {}
    """On every operation of the key; no caller can change them."""
    may_attribute: bool = False
    """Whether the caller's own tags count in the budgets and limits of those tags."""
    record_payloads: bool = False
    """Whether the bodies of its requests and answers are kept (see `billing.payloads`)."""

    def allow_address(self, address: str) -> bool:
        """Whether the key may be used from `address`. An address that is none is outside of every network."""
        if self.networks is None:
            return True
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return any(found in network for network in self.networks)


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Raises RestrictionError naming what is no address range."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text.strip()))
        except ValueError as error:
            raise RestrictionError(f"{error}; write a range like 10.0.0.0/8 or 2001:db8::/32, or one address") from None
    return tuple(found)


def check(restrictions: Restrictions) -> None:
    """Raises RestrictionError for what could never be meant."""
    for name in ("models", "routes", "networks"):
        if (allowed := getattr(restrictions, name)) is not None and not allowed:
            raise RestrictionError(f"a key without any of its {name} could do nothing; revoke it instead")
    if not all(model.strip() and "\0" not in model for model in restrictions.models or ()):
        raise RestrictionError("a model's name needs at least one visible character and no NUL")
    for route in restrictions.routes or ():
        if route not in ROUTES:
            raise RestrictionError(f"there is no route {route!r}; there are {', '.join(ROUTES)}")
    check_tags(restrictions.tags)


def check_tags(tags: dict[str, str]) -> None:
    """Raises RestrictionError naming the tag."""
    if len(tags) > MAX_TAGS:
        raise RestrictionError(f"{len(tags)} tags are too many; the most is {MAX_TAGS}")
    for name, value in tags.items():
        shown = name[:80]
        if not _TAG_NAME.fullmatch(name):
            raise RestrictionError(f"{shown!r} is not a tag's name: letters, digits, `_`, `.` and `-`, at most 64")
        if name in _DECIDED_BY_THE_KEY:
            raise RestrictionError(f"{shown!r} cannot be a tag: who pays for which model is not told by tags")
        if not value or len(value) > MAX_TAG_CHARACTERS or not value.isprintable():
            raise RestrictionError(f"the tag {shown!r} needs 1 to {MAX_TAG_CHARACTERS} printable characters")
