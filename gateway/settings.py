"""The gateway's configuration: a TOML file, overridden by FARTHING_* variables (`__` goes one level down).

Secrets and places come from the environment alone: FARTHING_DATABASE_URL, FARTHING_ADMIN_KEY_HASH, FARTHING_DATA_DIR.
An upstream's key comes from a variable or a file that the configuration names. `gateway.settings_file` reads all of it.
"""

from collections.abc import Iterator
from decimal import Decimal
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from billing.charge import amortised_hour
from billing.retention import Keep
from gateway.oidc_settings import OidcSettings
from gateway.secret_settings import read_secret
from gateway.upstreams.kinds import KINDS, KindName, Place

Amount = Annotated[Decimal, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Positive = Annotated[int, Field(gt=0)]
Network = Annotated[IPv4Network | IPv6Network, BeforeValidator(ip_network)]
Balance = Literal["weighted", "least_busy", "latency", "prefix_affine"]
SharedBy = Literal["org", "team", "key"]
Role = Literal["small", "large"]
ROLES: tuple[Role, ...] = ("small", "large")


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
    per_request: Amount | None = None
    """For each answer, on top of its tokens."""
    per_image: Amount | None = None
    """For each image of the prompt, on top of its tokens."""
    per_cached_answer: Amount | None = None
    """All that an answer from the response cache is billed; nothing where it is not given."""

    def complete(self) -> dict[str, Decimal | None]:
        """All five classes with their defaults, and the other parts where they are given."""
        prices: dict[str, Decimal | None] = dict(self)
        if prices["input_cache_write"] is None:
            prices["input_cache_write"] = self.input_fresh
        if prices["output_reasoning"] is None:
            prices["output_reasoning"] = self.output_text
        return prices


class UsageSettings(_Section):
    """Where an upstream counts what it reports: inside the prompt's or completion's total, or beside it."""

    cache: Place = "inside"
    reasoning: Place = "inside"


class DeviceSettings(_Section):
    """A device of one's own, in place of its price by the hour."""

    purchase_price: Amount
    years: Annotated[Decimal, Field(gt=0, allow_inf_nan=False)]
    """How long it will be used."""
    watts: Amount
    """Drawn while it is on, cooling included."""
    price_per_kwh: Amount


class UpstreamSettings(_Section):
    kind: KindName
    """`engine`: Farthing's own. `openai`: OpenAI, or with a base_url any address that speaks its dialect."""
    base_url: str = ""
    """Up to where `/chat/completions` follows; the kind's usual address where it is not given."""
    device_price_per_hour: Amount | None = None
    """Price of the device an engine runs on; its cost is the device seconds of each request at this price."""
    device: DeviceSettings | None = None
    """The same for a device of one's own."""
    api_key_env: str | None = None
    """Name of the environment variable that holds this upstream's key."""
    api_key_file: Path | None = None
    """A file that holds it; read again at every reload."""
    usage: UsageSettings | None = None
    """How it reports usage, where that is not how its kind does."""
    stream_options: bool = True
    """Whether it understands `stream_options`; where not, streams are not asked for usage, and it is estimated."""
    connect_seconds: Seconds = 5.0
    first_byte_seconds: Seconds = 300.0
    """From the request to the answer's headers: for a whole answer, as long as it takes to compute."""
    idle_seconds: Seconds = 300.0
    """Longest silence in the middle of an answer."""
    total_seconds: Seconds | None = None
    """A whole attempt, from the request to the answer's end."""
    connect_window_seconds: Seconds = 60.0
    """How long a request waits for an upstream that refuses connections or says 503 (a restart) before its own 503."""

    @property
    def device_hour(self) -> Decimal | None:
        """What the device costs by the hour."""
        return self.device_price_per_hour if self.device is None else amortised_hour(**dict(self.device))

    def api_key(self) -> SecretStr | None:
        """Raises ValueError when it cannot be had."""
        return read_secret(self.api_key_env, self.api_key_file, "api_key")

    @field_validator("base_url", mode="after")
    @classmethod
    def _is_an_address(cls, url: str, info: ValidationInfo) -> str:
        kind = info.data.get("kind")
        if not url and kind is not None:
            return KINDS[kind].base_url
        if url and not url.startswith(("http://", "https://")):
            raise ValueError(f"it must start with http:// or https://, not {url!r}")
        parts = urlsplit(url)
        if url and (not parts.hostname or parts.port == 0 or " " in url or not url.isprintable()):
            raise ValueError("it must be http(s)://HOST[:PORT][/PATH]")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("it must have no user name, ? or #; name a key by api_key_env or api_key_file")
        return url.rstrip("/")

    @model_validator(mode="before")
    @classmethod
    def _has_an_address(cls, values: Any) -> Any:
        return {"base_url": "", **values} if isinstance(values, dict) else values  # so that its default is validated

    @model_validator(mode="after")
    def _fits_together(self) -> "UpstreamSettings":
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("give api_key_env or api_key_file, not both")
        if self.device_price_per_hour is not None and self.device is not None:
            raise ValueError("give device_price_per_hour or device, not both")
        if self.kind != "engine" and self.device_hour is not None:
            name = "device" if self.device is not None else "device_price_per_hour"
            raise ValueError(f"{name} is for an engine; give each model's `cost` on this upstream")
        return self


class TargetSettings(_Section):
    """One of a model's upstreams."""

    upstream: str
    upstream_model: str | None = None
    """The upstream's name for the model, where it differs."""
    weight: Positive = 1
    """Its share beside the model's other upstreams."""
    max_concurrent: Positive | None = None
    """Requests of this model that it is given at the same time."""
    cost: ClassPrices | None = None
    """What the operator pays for the model there."""
    priority_cost: ClassPrices | None = None
    """The same for requests with `service_tier: "priority"`; without it their cost is unknown."""


class ResponseCacheSettings(_Section):
    """Answers are kept in memory, and given again to whoever asks the very same."""

    seconds: Seconds
    """How long an answer is given again."""
    shared_by: SharedBy = "org"
    """Who gets each other's answers: all of an org, or only a team, or only a key. A key without a team shares with
    none. Orgs never share."""


class ModelSettings(_Section):
    upstreams: tuple[TargetSettings, ...]
    """Each a table, or just the name of an upstream."""
    balance: Balance = "prefix_affine"
    """How one of several upstreams is chosen."""
    price: ClassPrices | None = None
    """What callers are billed. Without it the model is unpriced: NULL in the ledger, refused under a hard budget."""
    batch_price: ClassPrices | None = None
    """The same for requests of a batch; `price` where it is not given."""
    priority_price: ClassPrices | None = None
    """The same for requests with `service_tier: "priority"`, which are refused where it is not given."""
    context: Positive | None = None
    """Context length in tokens, for upstreams that do not tell; bounds what a hard budget reserves."""
    max_output: Positive | None = None
    """The most tokens that it writes in one answer. Bounds what is reserved where the caller sets no max_tokens, and is
    what an Anthropic upstream, which wants a limit, is told then."""
    drop_params: bool = False
    """Leave out parameters that an upstream cannot honour, and name them in a header, rather than answer 400."""
    fallbacks: tuple[str, ...] = ()
    """Models that answer, in this order, when none of the upstreams can; billed at the price of this one."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Further attempts after one that failed before its first byte."""
    response_cache: ResponseCacheSettings | None = None
    """Without it every request is computed."""
    hedge_after_seconds: Seconds | None = None
    """Ask a second upstream too when the first has not begun to answer by then; the slower one is called back."""

    @field_validator("upstreams", mode="before")
    @classmethod
    def _names_are_tables(cls, values: Any) -> Any:
        if not isinstance(values, list | tuple):
            return values
        if not values:
            raise ValueError("name at least one of [upstreams]")
        return [{"upstream": value} if isinstance(value, str) else value for value in values]


class RouterSettings(_Section):
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Scores at or above it go to the large model."""


class LimitSettings(_Section):
    body_bytes: Positive = 32 * 1024 * 1024
    body_seconds: Seconds = 60.0
    header_seconds: Seconds = 10.0
    drain_seconds: Seconds = 3.0
    """How long the rest of an aborted generation is awaited for its account."""
    keep_alive_seconds: Seconds = 15.0
    """After so much silence of the upstream a stream's caller gets a comment, for what may stand between."""
    file_bytes: Positive = 100 * 1024 * 1024
    """Largest file that `/v1/files` takes."""
    response_cache_bytes: Positive = 64 * 1024 * 1024
    """How much memory answers of the response cache take in one gateway process, of all models."""
    batch_lines: Positive = 8
    """How many lines of batches one gateway process runs at once."""
    grace_seconds: Seconds = 30.0
    """How long open answers may go on after SIGTERM."""


class RetentionSettings(_Section):
    """For how many days each is kept, by whole days; unset: for ever. What is older goes by itself."""

    operations_days: Positive | None = None
    """Operations with their attempts. What they came to stays in the rollups."""
    payloads_days: Positive | None = 30
    """Bodies of requests and answers, of keys that record them."""
    rollups_days: Positive | None = None
    """Sums by hour and day, by whole months; at least as long as operations."""

    @model_validator(mode="after")
    def _goes_together(self) -> "RetentionSettings":
        self.keep()
        return self

    def keep(self) -> Keep:
        return Keep(operations=self.operations_days, payloads=self.payloads_days, rollups=self.rollups_days)


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
    trusted_proxies: tuple[Network, ...] = ()
    """Where X-Forwarded-For is believed from: it names the caller's address."""
    router: RouterSettings = RouterSettings()
    limits: LimitSettings = LimitSettings()
    retention: RetentionSettings = RetentionSettings()
    oidc: OidcSettings | None = None
    """Where administrators sign in; without it they have the admin key and tokens."""
    roles: dict[Role, str]
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

    @model_validator(mode="after")
    def _adds_up(self) -> "Settings":
        problems = [*_role_problems(self), *_model_problems(self), *_key_problems(self)]
        if problems:
            raise ContradictionError(problems)
        return self


class ContradictionError(ValueError):
    """Parts of the configuration that do not go together: (where, what) each."""

    def __init__(self, problems: list[tuple[tuple[str | int, ...], str]]) -> None:
        super().__init__("; ".join(text for _, text in problems))
        self.problems = problems


Problems = Iterator[tuple[tuple[str | int, ...], str]]


def _role_problems(settings: Settings) -> Problems:
    for role in ROLES:
        target = settings.roles.get(role)
        if target is None:
            yield ("roles",), f"[roles] must name a model for `{role}`"
        elif target not in settings.models:
            yield ("roles", role), f"{target!r} is not among [models]: {', '.join(settings.models)}"


def _model_problems(settings: Settings) -> Problems:
    for name, model in settings.models.items():
        if name in (*ROLES, "auto"):
            yield ("models", name), f"a model cannot be called `{name}`: that word means a role"
        if model.batch_price is not None and model.batch_price.per_cached_answer is not None:
            text = "lines of a batch are never answered from the response cache: give it in `price`"
            yield ("models", name, "batch_price", "per_cached_answer"), text
        seen: set[str] = set()
        for index, target in enumerate(model.upstreams):
            here = ("models", name, "upstreams", index)
            upstream = settings.upstreams.get(target.upstream)
            if upstream is None:
                known = ", ".join(settings.upstreams)
                yield here, f"the upstream {target.upstream!r} is not among [upstreams]: {known}"
            elif upstream.kind == "engine" and (target.cost or target.priority_cost) is not None:
                given = "cost" if target.cost is not None else "priority_cost"
                yield (*here, given), f"an engine's cost is its device_price_per_hour, remove `{given}`"
            for of, cost in (("cost", target.cost), ("priority_cost", target.priority_cost)):
                if cost is not None and cost.per_cached_answer is not None:
                    text = "an answer from the response cache costs no upstream anything: give it in `price`"
                    yield (*here, of, "per_cached_answer"), text
            if target.upstream in seen:
                yield here, f"the upstream {target.upstream!r} is there twice; give it a larger weight instead"
            seen.add(target.upstream)
        if model.hedge_after_seconds is not None and len(model.upstreams) == 1:
            yield ("models", name, "hedge_after_seconds"), "hedging needs a second upstream to ask"
        for index, other in enumerate(model.fallbacks):
            place = ("models", name, "fallbacks", index)
            if other not in settings.models:
                yield place, f"{other!r} is not among [models]: {', '.join(settings.models)}"
            elif other == name or other in model.fallbacks[:index]:
                yield place, f"{other!r} is tried already"


def _key_problems(settings: Settings) -> Problems:
    for name, upstream in settings.upstreams.items():
        try:
            upstream.api_key()
        except ValueError as error:
            place = "api_key_env" if upstream.api_key_env is not None else "api_key_file"
            yield ("upstreams", name, place), str(error)
    if settings.oidc is not None:
        try:
            settings.oidc.client_secret()
        except ValueError as error:
            place = "client_secret_env" if settings.oidc.client_secret_env is not None else "client_secret_file"
            yield ("oidc", place), str(error)
