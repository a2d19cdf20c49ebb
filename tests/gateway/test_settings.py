"""The configuration file, its overrides, and a clear sentence for each mistake."""

from decimal import Decimal
from pathlib import Path

import pytest

from gateway.prices import configured
from gateway.settings import ConfigurationError, Settings

EXAMPLE = Path(__file__).parents[2] / "farthing.example.toml"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARTHING_DATABASE_URL", "postgresql+asyncpg://x@/x")
    monkeypatch.setenv("FARTHING_ADMIN_KEY_HASH", "ab" * 32)
    monkeypatch.setenv("FARTHING_DATA_DIR", "/nowhere")
    monkeypatch.setenv("FARTHING_MODELS", "/models")  # the engine's folder, none of the gateway's business


def broken(tmp_path: Path, change: tuple[str, str]) -> str:
    """What is said about the example with one text replaced."""
    text = EXAMPLE.read_text(encoding="utf-8")
    assert change[0] in text
    path = tmp_path / "farthing.toml"
    path.write_text(text.replace(*change), encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        Settings.load(path)
    return str(caught.value)


def test_the_example_is_a_configuration() -> None:
    settings = Settings.load(EXAMPLE)
    assert settings.roles == {"small": "qwen2.5-coder-0.5b", "large": "qwen2.5-coder-1.5b"}
    assert settings.upstreams["engine"].device_price_per_hour == Decimal("0.20")
    assert "ab" * 32 not in str(settings.database_url)


def test_its_prices_are_exact_and_complete() -> None:
    terms = {(t.book, t.model): t for t in configured(Settings.load(EXAMPLE))}
    sale = terms["sale", "qwen2.5-coder-0.5b"]
    assert (sale.input_fresh, sale.input_cached, sale.output_text) == (
        Decimal("0.05"),
        Decimal("0.01"),
        Decimal("0.20"),
    )
    assert (sale.input_cache_write, sale.output_reasoning) == (Decimal("0.05"), Decimal("0.20"))
    assert terms["cost", "qwen2.5-coder-1.5b"].device_hour == Decimal("0.20")


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARTHING_ROUTER__THRESHOLD", "0.7")
    monkeypatch.setenv("FARTHING_UPSTREAMS__ENGINE__BASE_URL", "http://elsewhere:1/v1")
    settings = Settings.load(EXAMPLE)
    assert settings.router.threshold == 0.7
    assert settings.upstreams["engine"].base_url == "http://elsewhere:1/v1"
    assert settings.upstreams["engine"].device_price_per_hour == Decimal("0.20")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('small = "qwen2.5-coder-0.5b"', 'small = "missing"'), "'missing' is not among [models]"),
        (("small = ", "# small = "), "[roles] must name a model for `small`"),
        (('upstream = "engine"', 'upstream = "motor"'), "upstream that is not configured: 'motor'"),
        (("threshold = 0.5", "threshold = 5"), "router.threshold: Input should be less than or equal to 1"),
        (("threshold = 0.5", "threshhold = 0.5"), "router.threshhold: Extra inputs are not permitted"),
        (("threshold = 0.5", "threshold = = 0.5"), "is not valid TOML"),
        (('currency = "USD"', 'currency = "US$"'), "currency: String should match"),
        (('"http://127.0.0.1:8001/v1"', '"127.0.0.1:8001"'), "must start with http:// or https://"),
        (('input_fresh = "0.05"', 'input_fresh = "-1"'), "greater than or equal to 0"),
        (('input_fresh = "0.05"', 'input_fresh = "NaN"'), "finite"),
        (('kind = "engine"', 'kind = "engine"\napi_key_env = "NO_SUCH"'), "NO_SUCH named by api_key_env is not set"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert said in broken(tmp_path, change)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'currency = "\xff"', "farthing.toml is not UTF-8 text (byte 12)"),
        (b'roles = "x"', "farthing.toml: `roles` must be a table"),
        (b"models = 5", "farthing.toml: `models` must be a table"),
        (b"upstreams = []", "farthing.toml: `upstreams` must be a table"),
        (None, "farthing.toml: Is a directory"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "farthing.toml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        Settings.load(path)
    assert said in str(caught.value)


def test_missing_secrets_are_named_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARTHING_DATABASE_URL")
    with pytest.raises(ConfigurationError, match="FARTHING_DATABASE_URL is not set"):
        Settings.load(EXAMPLE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no\.toml"):
        Settings.load(tmp_path / "no.toml")
