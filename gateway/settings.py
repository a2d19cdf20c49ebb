"""The gateway's configuration: a TOML file, overridden by FARTHING_* variables (`__` goes one level down).

Secrets and places come from the environment alone: FARTHING_DATABASE_URL, FARTHING_ADMIN_KEY_HASH, FARTHING_DATA_DIR.
"""

import os
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

Amount = Annotated[Decimal, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ROLES = ("small", "large")
SECTIONS = ("router", "limits", "roles", "upstreams", "models")


class ConfigurationError(ValueError):
    """The configuration cannot be used; the message lists every reason, one a line."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClassPrices(_Section):
    """Price of each token class, per million tokens. Unset means unpriced, except the two with a stated default."""

    input_fresh: Amount | None = None
    input_cached: Amount | None = None
    input_cache_write: Amount | None = None
    """Defaults to input_fresh."""
    output_text: Amount | None = None
    output_reasoning: Amount | None = None
    """Defaults to output_text."""

    def complete(self) -> dict[str, Decimal | None]:
        """All five classes, defaults filled in."""
        prices: dict[str, Decimal | None] = dict(self)
        if prices["input_cache_write"] is None:
            prices["input_cache_write"] = self.input_fresh
        if prices["output_reasoning"] is None:
            prices["output_reasoning"] = self.output_text
        return prices


class UpstreamSettings(_Section):
    kind: Literal["engine", "openai"]
    """`engine`: Farthing's own. `openai`: any OpenAI-compatible address."""
    base_url: str
    """With its `/v1`."""
    device_price_per_hour: Amount | None = None
    """Price of the device an engine runs on; its cost is the device seconds of each request at this price."""
    api_key_env: str | None = None
    """Name of the environment variable that holds this upstream's key."""
    connect_window_seconds: Seconds = 60.0
    """How long a request waits for an upstream that refuses connections or says 503 (a restart) before its own 503."""
    read_timeout_seconds: Seconds = 300.0
    """Longest silence from the upstream."""

    def api_key(self) -> SecretStr | None:
        return SecretStr(os.environ[self.api_key_env]) if self.api_key_env else None

    @model_validator(mode="after")
    def _check(self) -> "UpstreamSettings":
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, not {self.base_url!r}")
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise ValueError(f"the environment variable {self.api_key_env} named by api_key_env is not set")
        return self


class ModelSettings(_Section):
    upstream: str
    upstream_model: str | None = None
    """The upstream's name for it, where it differs."""
    price: ClassPrices | None = None
    """What callers are billed. Without it the model is unpriced: NULL in the ledger, refused under a hard budget."""
    cost: ClassPrices | None = None
    """What the operator pays an upstream of kind `openai`."""
    context: Annotated[int, Field(gt=0)] | None = None
    """Context length in tokens, for upstreams that do not tell; bounds what a hard budget reserves."""


class RouterSettings(_Section):
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Scores at or above it go to the large model."""


class LimitSettings(_Section):
    body_bytes: Annotated[int, Field(gt=0)] = 32 * 1024 * 1024
    body_seconds: Seconds = 60.0
    header_seconds: Seconds = 10.0
    drain_seconds: Seconds = 3.0
    """How long the rest of an aborted generation is awaited for its account."""
    grace_seconds: Seconds = 30.0
    """How long open answers may go on after SIGTERM."""


class _Environment(EnvSettingsSource):
    """FARTHING_MODELS is the engine's model folder, not this configuration's `models` table."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return {} if field_name == "models" else super().decode_complex_value(field_name, field, value)


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="FARTHING_", env_nested_delimiter="__", extra="forbid", frozen=True)

    database_url: SecretStr
    admin_key_hash: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")]
    """SHA-256 of the admin key, in hex."""
    data_dir: Path
    """The spool lives in `<data-dir>/spool`."""
    currency: Annotated[str, Field(pattern="^[A-Z]{3}$")] = "USD"
    router: RouterSettings = RouterSettings()
    limits: LimitSettings = LimitSettings()
    roles: dict[Literal["small", "large"], str]
    upstreams: dict[str, UpstreamSettings]
    models: dict[str, ModelSettings]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return _Environment(settings_cls), init_settings

    @classmethod
    def load(cls, path: Path) -> "Settings":
        """Read `path` and the environment. Raises ConfigurationError with a sentence for each thing that is wrong."""
        try:
            with path.open("rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{path} is not valid TOML: {error}") from error
        for name in SECTIONS:  # before a variable such as FARTHING_ROLES__SMALL takes the place of what is no table
            if not isinstance(values.get(name, {}), dict):
                raise ConfigurationError(f"{path}: `{name}` must be a table, like [{name}], not {values[name]!r}")
        try:
            return cls(**values)
        except ValidationError as error:
            lines = [_explain(problem["loc"], problem["msg"], problem["type"]) for problem in error.errors()]
            raise ConfigurationError("\n".join(f"{path}: {line}" for line in lines)) from None

    @model_validator(mode="after")
    def _names_exist(self) -> "Settings":
        for role in ROLES:
            target = self.roles.get(role)  # type: ignore[call-overload]
            if target is None:
                raise ValueError(f"[roles] must name a model for `{role}`")
            if target not in self.models:
                raise ValueError(f"[roles] {role} = {target!r} is not among [models]: {', '.join(self.models)}")
        for name, model in self.models.items():
            if name in (*ROLES, "auto"):
                raise ValueError(f"a model cannot be called `{name}`: that word means a role")
            upstream = self.upstreams.get(model.upstream)
            if upstream is None:
                raise ValueError(f"model {name!r} names an upstream that is not configured: {model.upstream!r}")
            if upstream.kind == "engine" and model.cost is not None:
                raise ValueError(f"model {name!r}: an engine's cost is device_price_per_hour, remove `cost`")
        return self


def _explain(location: tuple[int | str, ...], message: str, kind: str) -> str:
    place = ".".join(str(part) for part in location)
    environment = {"database_url", "admin_key_hash", "data_dir"}
    if kind == "missing" and place in environment:
        return f"the environment variable FARTHING_{place.upper()} is not set"
    return f"{place}: {message}" if place else message
