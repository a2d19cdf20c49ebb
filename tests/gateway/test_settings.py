"""The configuration file, its overrides, and a clear sentence for each mistake."""

from decimal import Decimal
from pathlib import Path

import pytest

from billing.charge import amortised_hour
from gateway.prices import configured
from gateway.settings_file import ConfigurationError, load

EXAMPLE = Path(__file__).parents[2] / "farthing.example.toml"
SAMPLE = """\
currency = "USD"
[router]
threshold = 0.5
[roles]
small = "m"
large = "big"
[upstreams.engine]
kind = "engine"
base_url = "http://127.0.0.1:8001/v1"
device_price_per_hour = "0.20"
[models.m]
upstreams = ["engine"]
price = { input_fresh = "0.05", input_cached = "0.01", output_text = "0.20" }
[models.big]
upstreams = ["engine"]
price = { input_fresh = "0.15", input_cached = "0.03", output_text = "0.60" }
"""
DEVICE = 'device = { purchase_price = "2400.60", years = "4", watts = "450", price_per_kwh = "0.31" }'


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARTHING_DATABASE_URL", "postgresql+asyncpg://x@/x")
    monkeypatch.setenv("FARTHING_ADMIN_KEY_HASH", "ab" * 32)
    monkeypatch.setenv("FARTHING_DATA_DIR", "/nowhere")
    monkeypatch.setenv("FARTHING_MODELS", "/models")  # the engine's folder, none of the gateway's business


def broken(tmp_path: Path, change: tuple[str, str]) -> str:
    """What is said about the sample with the first occurrence of a text replaced."""
    assert change[0] in SAMPLE
    path = tmp_path / "farthing.toml"
    path.write_text(SAMPLE.replace(*change, 1), encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    return str(caught.value)


def test_the_example_is_a_configuration() -> None:
    settings = load(EXAMPLE)
    assert settings.roles == {"small": "qwen2.5-coder-0.5b", "large": "qwen2.5-coder-1.5b"}
    assert settings.upstreams["engine"].device_price_per_hour == Decimal("0.20")
    assert "ab" * 32 not in str(settings.database_url)


def test_its_prices_are_exact_and_complete() -> None:
    terms = {(t.book, t.model): t for t in configured(load(EXAMPLE)) if not t.unpriced}
    sale = terms["sale", "qwen2.5-coder-0.5b"]
    assert (sale.input_fresh, sale.input_cached, sale.output_text) == (
        Decimal("0.05"),
        Decimal("0.01"),
        Decimal("0.20"),
    )
    assert (sale.input_cache_write, sale.output_reasoning) == (Decimal("0.05"), Decimal("0.20"))
    assert terms["cost", ""].device_hour == Decimal("0.20")


def test_a_device_of_ones_own_has_its_price_by_the_hour(tmp_path: Path) -> None:
    path = tmp_path / "farthing.toml"
    path.write_text(SAMPLE.replace('device_price_per_hour = "0.20"', DEVICE), encoding="utf-8")
    terms = {(t.book, t.upstream, t.model): t for t in configured(load(path))}
    by_hand = (Decimal("2400.60") / (4 * 8766) + Decimal("0.45") * Decimal("0.31")).quantize(Decimal("1e-18"))
    assert terms["cost", "engine", ""].device_hour == by_hand == Decimal("0.207963381245722108")
    assert by_hand == amortised_hour(Decimal("2400.60"), Decimal(4), Decimal(450), Decimal("0.31"))


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARTHING_ROUTER__THRESHOLD", "0.7")
    monkeypatch.setenv("FARTHING_UPSTREAMS__ENGINE__BASE_URL", "http://elsewhere:1/v1")
    settings = load(EXAMPLE)
    assert settings.router.threshold == 0.7
    assert settings.upstreams["engine"].base_url == "http://elsewhere:1/v1"
    assert settings.upstreams["engine"].device_price_per_hour == Decimal("0.20")


@pytest.mark.parametrize(
    ("change", "place", "said"),
    [
        (('small = "m"', 'small = "x"'), "5:9", "roles.small: 'x' is not among [models]"),
        (("small = ", "# small = "), "4:1", "roles: [roles] must name a model for `small`"),
        (('["engine"]', '["motor"]'), "12:14", "upstreams.0: the upstream 'motor' is not among [upstreams]: engine"),
        (('["engine"]', "[]"), "12:13", "upstreams: name at least one of [upstreams]"),
        (('["engine"]', '["engine", "engine"]'), "12:24", "upstreams.1: the upstream 'engine' is there twice"),
        (("threshold = 0.5", "threshold = 5"), "3:13", "router.threshold: Input should be less than or equal to 1"),
        (("threshold =", "threshhold ="), "3:1", "router.threshhold is not a setting; did you mean `threshold`?"),
        (("threshold =", "zzz ="), "3:1", "router.zzz is not a setting; known here: threshold"),
        (("threshold = 0.5", "threshold = = 0.5"), "3:13", "this is not valid TOML"),
        (('currency = "USD"', 'currency = "US$"'), "1:12", "currency: String should match"),
        (('currency = "USD"', 'trusted_proxies = ["10.0.0.1/8"]'), "1:20", "10.0.0.1/8 has host bits set"),
        (
            ('currency = "USD"', 'data_dir = "/x"'),
            "1:1",
            "`data_dir` is not for the file: set the env",
        ),
        (('"http://127.0.0.1:8001/v1"', '"127.0.0.1:8001"'), "9:12", "must start with http:// or https://"),
        (('"http://127.0.0.1:8001/v1"', '"http:///v1"'), "9:12", "it must be http(s)://HOST"),
        (('"http://127.0.0.1:8001/v1"', '"http://a:99999"'), "9:12", "Port out of range"),
        (('"http://127.0.0.1:8001/v1"', '"http://a b/v1"'), "9:12", "it must be http(s)://HOST"),
        (('"http://127.0.0.1:8001/v1"', '"http://me:secret@a/v1"'), "9:12", "it must have no user name"),
        (('"http://127.0.0.1:8001/v1"', '"http://a/v1?x=y"'), "9:12", "it must have no user name, ? or #"),
        (('kind = "engine"', 'kind = "engin"'), "8:8", "upstreams.engine.kind: Input should be 'engine', 'openai'"),
        (('kind = "engine"', 'kind = "vllm"'), "7:1", "device_price_per_hour is for an engine"),
        (
            ('kind = "engine"', f'kind = "engine"\n{DEVICE}'),
            "7:1",
            "give device_price_per_hour or device, not both",
        ),
        (('device_price_per_hour = "0.20"', DEVICE.replace('"4"', '"0"')), "10:48", "years: Input should be greater"),
        (('input_fresh = "0.05"', 'input_fresh = "-1"'), "13:25", "price.input_fresh: Input should be greater"),
        (('input_fresh = "0.05"', 'input_fresh = "NaN"'), "13:25", "finite"),
        (('input_fresh = "0.05"', 'input_fesh = "1"'), "13:11", "price.input_fesh is not a setting; did you mean"),
        (('["engine"]', '["engine"]\nfallbacks = ["x"]'), "13:14", "fallbacks.0: 'x' is not among [models]"),
        (('["engine"]', '["engine"]\nhedge_after_seconds = 1'), "13:23", "hedging needs a second upstream"),
        (('["engine"]', '[{ upstream = "engine", wieght = 2 }]'), "12:37", "did you mean `weight`?"),
        (('["engine"]', '["engine"]\nbatch_price.per_cached_answer = "1"'), "13:33", "lines of a batch are never"),
        (('["engine"]', '["engine"]\nresponse_cache = {}'), "13:1", "response_cache.seconds is missing"),
        (('["engine"]', '["engine"]\nresponse_cache = { seconds = 0 }'), "13:30", "greater than 0"),
        (
            ('["engine"]', '["engine"]\nresponse_cache = { seconds = 9, shared_by = "all" }'),
            "13:45",
            "shared_by: Input should be 'org', 'team' or 'key'",
        ),
        (
            ('["engine"]', '[{ upstream = "engine", priority_cost = { per_cached_answer = "1" } }]'),
            "12:53",
            "costs no upstream anything: give it in `price`",
        ),
        (
            ('["engine"]', '[{ upstream = "engine", cost = {} }]'),
            "12:44",
            "an engine's cost is its device_price",
        ),
        (('kind = "engine"', 'kind = "engine"\napi_key_env = "NO_SUCH"'), "9:15", "api_key_env is not set"),
        (
            ('kind = "engine"', 'kind = "engine"\napi_key_file = "/no/such"'),
            "9:16",
            "/no/such cannot be read: No",
        ),
    ],
)
def test_mistakes_are_named_with_line_and_column(
    tmp_path: Path, change: tuple[str, str], place: str, said: str
) -> None:
    text = broken(tmp_path, change)
    assert f"farthing.toml:{place}: " in text and said in text


def test_two_mistakes_of_one_model_have_their_own_places(tmp_path: Path) -> None:
    both = '[{ upstream = "engine", cost = {} }]\nhedge_after_seconds = 1\nfallbacks = ["x"]'
    lines = broken(tmp_path, ('["engine"]', both)).splitlines()
    assert [line.split(":")[1:3] for line in lines] == [["12", "44"], ["13", "23"], ["14", "14"]]


def test_all_mistakes_are_named_at_once_from_top_to_bottom(tmp_path: Path) -> None:
    path = tmp_path / "farthing.toml"
    path.write_text(SAMPLE.replace("threshold = 0.5", "thresh = 1").replace('"0.60"', '"-1"').replace('"USD"', "7"))
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines] == ["1", "3", "16"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (('"0.05", input_cached', '"0.05" input_cached'), "13:32"),
        (('output_text = "0.20" }', 'output_text = "0.20", }'), "13:78"),
        (('"0.05"', '"0,05"'), "13:25"),
        (('["engine"]', '["engine" "engine"]'), "12:23"),
    ],
)
def test_one_comma_is_shown_where_it_is(tmp_path: Path, change: tuple[str, str], place: str) -> None:
    assert f"farthing.toml:{place}: " in broken(tmp_path, change)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'currency = "\xff"', "farthing.toml: it is not UTF-8 text (byte 12)"),
        (b'roles = "x"', "farthing.toml:1:1: `roles` must be a table"),
        (b"models = 5", "farthing.toml:1:1: `models` must be a table"),
        (b"upstreams = []", "farthing.toml:1:1: `upstreams` must be a table"),
        (b"[models", "farthing.toml:1:8: this is not valid TOML"),
        (b"", "farthing.toml: upstreams is missing"),
        (None, "farthing.toml: it cannot be read: Is a directory"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "farthing.toml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert said in str(caught.value)


def written(tmp_path: Path, upstreams: str, models: str) -> Path:
    path = tmp_path / "farthing.toml"
    path.write_text(f'roles = {{ small = "m", large = "m" }}\n{upstreams}\n{models}\n')
    return path


def test_a_kind_knows_its_address_and_a_key_comes_from_a_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-1\n")
    upstreams = f'[upstreams.a]\nkind = "deepseek"\napi_key_file = "{key}"'
    settings = load(written(tmp_path, upstreams, '[models.m]\nupstreams = ["a"]'))
    found = settings.upstreams["a"]
    assert found.base_url == "https://api.deepseek.com/v1"
    secret = found.api_key()
    assert secret is not None and secret.get_secret_value() == "sk-1" and "sk-1" not in repr(secret)


@pytest.mark.parametrize(
    ("content", "said"), [("", "is empty"), ("a b\nc", "characters that no HTTP header can carry")]
)
def test_a_key_that_cannot_be_sent_is_refused(tmp_path: Path, content: str, said: str) -> None:
    key = tmp_path / "key"
    key.write_text(content)
    upstreams = f'[upstreams.a]\nkind = "openai"\napi_key_file = "{key}"'
    with pytest.raises(ConfigurationError, match=said) as caught:
        load(written(tmp_path, upstreams, '[models.m]\nupstreams = ["a"]'))
    assert "a b" not in str(caught.value)


def test_a_model_has_several_upstreams_each_with_its_terms(tmp_path: Path) -> None:
    upstreams = '[upstreams.a]\nkind = "openai"\n[upstreams.b]\nkind = "engine"\ndevice_price_per_hour = "1"'
    models = """[models.m]
        balance = "weighted"
        [[models.m.upstreams]]
        upstream = "a"
        upstream_model = "gpt"
        weight = 3
        cost = { input_fresh = "2", output_text = "8" }
        [[models.m.upstreams]]
        upstream = "b"
        max_concurrent = 4"""
    settings = load(written(tmp_path, upstreams, models))
    first, second = settings.models["m"].upstreams
    assert (first.upstream_model, first.weight, second.weight, second.max_concurrent) == ("gpt", 3, 1, 4)
    costs = {terms.upstream: terms for terms in configured(settings) if terms.book == "cost" and not terms.unpriced}
    assert (costs["a"].output_text, costs["b"].device_hour) == (Decimal(8), Decimal(1))


def test_missing_secrets_are_named_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARTHING_DATABASE_URL")
    with pytest.raises(ConfigurationError, match="FARTHING_DATABASE_URL is not set"):
        load(EXAMPLE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no\.toml"):
        load(tmp_path / "no.toml")
