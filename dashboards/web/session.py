"""The signed cookie that keeps an operator signed in, and the brake on guessing the admin key."""

import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

LIFETIME_SECONDS = 12 * 60 * 60
COOKIE = "farthing_session"


class Sessions:
    """Makes and checks cookie values `<expiry, Unix seconds>.<HMAC-SHA256 of it>`.

    The signing secret derives from the admin key's hash, so every replica accepts the cookies of the others and a
    changed admin key ends all sessions. Nothing is stored.
    """

    def __init__(self, admin_key_hash: bytes, clock: Callable[[], float] = time.time) -> None:
        if len(admin_key_hash) != hashlib.sha256().digest_size:
            raise ValueError(f"admin_key_hash must be a SHA-256 digest of 32 bytes, not {len(admin_key_hash)}")
        self._key_hash = admin_key_hash
        self._secret = hmac.digest(admin_key_hash, b"farthing dashboard session, version 1", "sha256")
        self._clock = clock

    def key_matches(self, key: str) -> bool:
        """Whether `key` is the admin key, in constant time."""
        return hmac.compare_digest(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest(), self._key_hash)

    def issue(self) -> str:
        expiry = str(int(self._clock()) + LIFETIME_SECONDS)
        return f"{expiry}.{self._signature(expiry)}"

    def valid(self, cookie: str) -> bool:
        expiry, _, signature = cookie.partition(".")
        genuine = hmac.compare_digest(signature.encode(), self._signature(expiry).encode())
        return genuine and int(expiry) > self._clock()

    def _signature(self, expiry: str) -> str:
        return hmac.new(self._secret, expiry.encode(), "sha256").hexdigest()


class Throttle:
    """Lets an address fail `allowed` sign-ins in `seconds`, then says how long to wait. An IPv6 /64 is one address."""

    def __init__(
        self,
        allowed: int = 8,
        seconds: float = 300,
        addresses: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allowed = allowed
        self._seconds = seconds
        self._addresses = addresses
        self._clock = clock
        self._failures: OrderedDict[str, list[float]] = OrderedDict()  # the address that failed last is at the end

    def wait_seconds(self, address: str) -> float:
        """0 when `address` may try now."""
        recent = self._recent(_network(address))
        return 0 if len(recent) < self._allowed else recent[-self._allowed] + self._seconds - self._clock()

    def failed(self, address: str) -> None:
        network = _network(address)
        self._failures[network] = [*self._recent(network), self._clock()][-self._allowed :]
        self._failures.move_to_end(network)
        if len(self._failures) > self._addresses:
            self._failures.popitem(last=False)

    def succeeded(self, address: str) -> None:
        self._failures.pop(_network(address), None)

    def _recent(self, network: str) -> list[float]:
        since = self._clock() - self._seconds
        return [at for at in self._failures.get(network, []) if at > since]


def _network(address: str) -> str:
    """The /64 of an IPv6 address (one customer's), any other address as it is."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
