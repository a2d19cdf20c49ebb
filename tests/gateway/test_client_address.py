"""Whose word counts about where a request comes from."""

from ipaddress import ip_network

import pytest

from gateway.client_address import client_address

PROXIES = [ip_network("10.0.0.0/8"), ip_network("fd00::/8")]


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("203.0.113.9", "1.2.3.4", "203.0.113.9"),
        ("10.0.0.1", "1.2.3.4", "1.2.3.4"),
        ("10.0.0.1", "6.6.6.6, 1.2.3.4, 10.0.0.2", "1.2.3.4"),
        ("10.0.0.1", "6.6.6.6, 1.2.3.4", "1.2.3.4"),
        ("::ffff:10.0.0.1", "1.2.3.4", "1.2.3.4"),
        ("fd00::1", "2001:db8::7", "2001:db8::7"),
        ("10.0.0.1", "10.0.0.3,10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "1.2.3.4, unknown", "unknown"),
        ("10.0.0.1", "1.2.3.4, _hidden", "unknown"),
        ("10.0.0.1", "1.2.3.4, ", "1.2.3.4"),
        ("10.0.0.1", "6.6.6.6, 1.2.3.4:5678", "1.2.3.4"),
        ("10.0.0.1", "1.2.3.4:5678, 10.0.0.2:80", "1.2.3.4"),
        ("10.0.0.1", "[2001:db8::7]:5678", "2001:db8::7"),
        ("10.0.0.1", "[2001:db8::7]", "2001:db8::7"),
        ("10.0.0.1", "2001:db8::7", "2001:db8::7"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("", "1.2.3.4", ""),
    ],
)
def test_only_what_our_own_proxies_added_counts(peer: str, forwarded: str, address: str) -> None:
    assert client_address(peer, {"x-forwarded-for": forwarded}, PROXIES) == address


def test_without_trusted_proxies_it_is_the_socket_s_other_end() -> None:
    assert client_address("10.0.0.1", {"x-forwarded-for": "1.2.3.4"}, []) == "10.0.0.1"
