"""Which address a request comes from: the socket's other end, or what a trusted proxy in front of us says."""

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Network = IPv4Network | IPv6Network
FORWARDED = "x-forwarded-for"


def client_address(peer: str, headers: Mapping[str, str], proxies: Sequence[Network]) -> str:
    """`peer`, unless it is one of `proxies`: then the last address in X-Forwarded-For that is none of them.

    Everybody can send that header, so only what our own proxies added to it counts: it is read from its end, up to the
    first address that we did not put in front of us ourselves.
    """
    address = peer
    forwarded = headers.get(FORWARDED, "") if proxies else ""
    for entry in reversed(forwarded.split(",")) if forwarded else ():
        if not _is_among(address, proxies):
            break
        if _parsed(entry.strip()) is None:
            break
        address = entry.strip()
    return address


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
