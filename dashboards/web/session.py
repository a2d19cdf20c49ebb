"""The signed cookies that keep a person signed in, and the brake on guessing the admin key."""

import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

LIFETIME_SECONDS = 12 * 60 * 60
COOKIE = "farthing_session"


class Sessions:
    """Makes and checks cookie values `<payload>.<expiry, Unix seconds>.<HMAC-SHA256 of both and of what it is for>`.

    The signing secret derives from the admin key's hash, so every replica accepts the cookies of the others and a
    changed admin key ends all sessions. Nothing is stored; who a session's person is, and whether they still may do
    anything, is looked up each time.
    """

    def __init__(self, admin_key_hash: bytes, clock: Callable[[], float] = time.time) -> None:
        if len(admin_key_hash) != hashlib.sha256().digest_size:
            raise ValueError(f"admin_key_hash must be a SHA-256 digest of 32 bytes, not {len(admin_key_hash)}")
        self._key_hash = admin_key_hash
        self._secret = hmac.digest(admin_key_hash, b"farthing dashboard session, version 2", "sha256")
        self._clock = clock

    def key_matches(self, key: str) -> bool:
        """Whether `key` is the admin key, in constant time."""
        return hmac.compare_digest(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest(), self._key_hash)

    def issue(self, person: str) -> str:
        """A session of `person`: an administrator's id, or `billing.administrators.ADMIN_KEY`."""
        return self.seal("session", person, LIFETIME_SECONDS)

    def read(self, cookie: str) -> str | None:
        """Whose session it is; None when it is void."""
        return self.unseal("session", cookie)

    def seal(self, purpose: str, payload: str, seconds: int) -> str:
        """`payload` (no dots in it) for a cookie: anybody can read it, and only we can have made it."""
        signed = f"{payload}.{int(self._clock()) + seconds}"
        return f"{signed}.{self._signature(purpose, signed)}"

    def unseal(self, purpose: str, cookie: str) -> str | None:
        """The payload; None when we did not make it, for this purpose, or its time is over."""
        signed, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(purpose, signed).encode()):
            return None
        payload, _, expiry = signed.partition(".")
        return payload if int(expiry) > self._clock() else None

    def _signature(self, purpose: str, signed: str) -> str:
        return hmac.new(self._secret, f"{purpose}:{signed}".encode(), "sha256").hexdigest()


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
