"""`[oidc]`: where administrators sign in."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from billing.roles import Role
from gateway.secret_settings import read_secret

CALLBACK = "/dashboard/sign-in/callback"


def _address(url: str) -> str:
    parts = urlsplit(url)
    if not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"it must be an address like https://login.example.com, not {url!r}")
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")):
        raise ValueError("it must start with https://: what signs people in may not be read on the way")
    return url


Address = Annotated[str, AfterValidator(_address)]


class OidcSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    issuer: Address
    """The provider, as it calls itself."""
    client_id: str
    client_secret_env: str | None = None
    """Name of the environment variable that holds the client's secret; without one it is a public client."""
    client_secret_file: Path | None = None
    public_url: Address
    """Where browsers see this gateway. The provider must know `<public_url>/dashboard/sign-in/callback`."""
    allowed_domains: tuple[str, ...] = ()
    """Of e-mail addresses that may sign in; any where it is empty."""
    role_claim: str | None = None
    """A claim of the id token that gives roles, like `groups`."""
    roles: dict[str, Role] = {}
    """Which role a value of it gives."""

    def client_secret(self) -> str | None:
        """Raises ValueError when it cannot be had."""
        found = read_secret(self.client_secret_env, self.client_secret_file, "client_secret")
        return None if found is None else found.get_secret_value()

    @property
    def redirect_uri(self) -> str:
        return self.public_url.rstrip("/") + CALLBACK

    @model_validator(mode="after")
    def _fits_together(self) -> "OidcSettings":
        if self.client_secret_env is not None and self.client_secret_file is not None:
            raise ValueError("give client_secret_env or client_secret_file, not both")
        if (self.role_claim is None) != (not self.roles):
            raise ValueError("role_claim and roles go together: the claim's name, and which role each value gives")
        if "member" in self.roles.values():
            raise ValueError("a claim cannot make members: `farthing admins create` says which user one is")
        return self
