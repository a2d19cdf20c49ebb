import hashlib

import pytest

from dashboards.web.session import LIFETIME_SECONDS, Sessions, Throttle

KEY_HASH = hashlib.sha256(b"key").digest()


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_only_the_admin_key_matches() -> None:
    sessions = Sessions(KEY_HASH)
    assert sessions.key_matches("key")
    assert not any(map(sessions.key_matches, ["", "Key", "key ", "schlüssel", "\udcff", KEY_HASH.hex()]))


def test_a_cookie_ends_with_its_lifetime() -> None:
    clock = Clock()
    sessions = Sessions(KEY_HASH, clock)
    cookie = sessions.issue("ada")
    clock.now += LIFETIME_SECONDS - 1
    assert sessions.read(cookie) == "ada"
    clock.now += 1
    assert sessions.read(cookie) is None


def test_another_admin_key_ends_all_sessions_and_the_same_one_is_any_replica() -> None:
    cookie = Sessions(KEY_HASH).issue("ada")
    assert Sessions(KEY_HASH).read(cookie) == "ada"
    assert Sessions(hashlib.sha256(b"new key").digest()).read(cookie) is None


def test_a_forged_cookie_is_refused() -> None:
    sessions = Sessions(KEY_HASH)
    person, expiry, signature = sessions.issue("ada").split(".")
    later = str(int(expiry) + 1)
    forged = [
        "",
        ".",
        "x",
        "..",
        expiry,
        f"{person}.{expiry}",
        f"{person}.{expiry}.",
        f"{person}.{later}.{signature}",
        f"bob.{expiry}.{signature}",
        f"{person}.{expiry}.{signature}0",
        f"{person}.{expiry}.é",
        "é.é.é",
    ]
    assert [sessions.read(each) for each in forged] == [None] * len(forged)


def test_a_cookie_is_good_for_one_purpose() -> None:
    sessions = Sessions(KEY_HASH)
    sealed = sessions.seal("sign-in", "ada", 60)
    assert sessions.unseal("sign-in", sealed) == "ada"
    assert sessions.read(sealed) is None


def test_a_hash_of_the_wrong_length_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 3"):
        Sessions(b"abc")


def test_the_throttle_stops_an_address_and_lets_it_try_again_later() -> None:
    clock = Clock()
    throttle = Throttle(allowed=3, seconds=60, clock=clock)
    for _ in range(3):
        assert throttle.wait_seconds("10.0.0.1") == 0
        throttle.failed("10.0.0.1")
        clock.now += 1
    assert throttle.wait_seconds("10.0.0.1") == 57
    assert throttle.wait_seconds("10.0.0.2") == 0
    clock.now += 57
    assert throttle.wait_seconds("10.0.0.1") == 0


def test_the_throttle_counts_an_ipv6_network_as_one_and_forgets_a_success() -> None:
    throttle = Throttle(allowed=2)
    throttle.failed("2001:db8::1")
    throttle.failed("2001:db8::2:3")
    assert throttle.wait_seconds("2001:db8::ffff") > 0
    assert throttle.wait_seconds("2001:db8:0:1::1") == 0
    throttle.succeeded("2001:db8::1")
    assert throttle.wait_seconds("2001:db8::ffff") == 0


def test_the_throttle_remembers_a_limited_number_of_addresses() -> None:
    throttle = Throttle(allowed=1, addresses=2)
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
        throttle.failed(address)
    assert [throttle.wait_seconds(f"10.0.0.{i}") > 0 for i in (1, 2, 3)] == [False, True, True]
