"""Which address a request comes from: the socket's other end, or what a trusted proxy in front of us says."""

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Network = IPv4Network | IPv6Network
FORWARDED = "x-forwarded-for"
UNKNOWN = "unknown"
"""An address that is in no network: a proxy of ours did not tell whom it spoke to."""


def client_address(peer: str, headers: Mapping[str, str], proxies: Sequence[Network]) -> str:
    """`peer`, unless it is one of `proxies`: then the last address in X-Forwarded-For that is none of them.

    Everybody can send that header, so only what our own proxies added to it counts: it is read from its end, up to the
    first address that we did not put in front of us ourselves. Where that is no address, it is UNKNOWN.
    """
    address = peer
    forwarded = headers.get(FORWARDED, "") if proxies else ""
    for entry in reversed(forwarded.split(",")) if forwarded else ():
        if not _is_among(address, proxies):
            break
        if entry := entry.strip():
            address = _without_port(entry)
            if _parsed(address) is None:
                return UNKNOWN
    return address


def _without_port(entry: str) -> str:
    """Some proxies add the caller's port: `203.0.113.9:4711`, `[2001:db8::7]:4711`."""
    if entry.startswith("["):
        return entry[1:].partition("]")[0]
    host, colon, port = entry.partition(":")
    return host if colon and port.isdecimal() else entry


def _is_among(address: str, networks: Sequence[Network]) -> bool:
    parsed = _parsed(address)
    return parsed is not None and any(parsed in network for network in networks)


def _parsed(address: str) -> IPv4Address | IPv6Address | None:
    try:
        parsed = ip_address(address)
    except ValueError:
        return None
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    return parsed
