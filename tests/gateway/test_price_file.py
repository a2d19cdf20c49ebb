"""Files of prices: three formats that say the same, and every mistake with its line."""

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from gateway.price_file import PriceFileError, read_prices

CSV = """model,upstream,tier,effective_at,input_fresh,output_text,per_image,device_hour,org,team,factor
small,,,2026-12-01,0.05,0.20,0.001,,,,
small,hosted,priority,2026-12-01T00:00:00+09:00,1,2,,,,,
,gpu,,,,,,2.50,,,
,,,,,,,,acme,search,0.8
"""
TOML = """
[[price]]
model = "small"
effective_at = 2026-12-01
input_fresh = 0.05
output_text = "0.20"
per_image = 0.001

[[price]]
model = "small"
upstream = "hosted"
tier = "priority"
effective_at = 2026-12-01T00:00:00+09:00
input_fresh = 1
output_text = 2

[[price]]
upstream = "gpu"
device_hour = 2.5

[[price]]
org = "acme"
team = "search"
factor = 0.8
"""
JSON = """[
  {"model": "small", "effective_at": "2026-12-01", "input_fresh": 0.05, "output_text": "0.20", "per_image": 0.001},
  {"model": "small", "upstream": "hosted", "tier": "priority", "effective_at": "2026-12-01T00:00:00+09:00",
   "input_fresh": 1, "output_text": 2},
  {"upstream": "gpu", "device_hour": 2.50},
  {"org": "acme", "team": "search", "factor": 0.8, "model": null}
]
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def said(folder: Path, name: str, text: str) -> list[str]:
    path = written(folder, name, text)
    with pytest.raises(PriceFileError) as caught:
        read_prices(path, "USD")
    return [line.removeprefix(f"{path}:") for line in str(caught.value).splitlines()]


def test_three_formats_say_the_same(tmp_path: Path) -> None:
    files = {"p.csv": CSV, "p.toml": TOML, "p.json": JSON}
    found = {name: read_prices(written(tmp_path, name, text), "USD") for name, text in files.items()}
    first, second, device, override = found["p.csv"]
    assert found["p.toml"] == [
        row._replace(line=line) for row, line in zip(found["p.csv"], (2, 9, 17, 21), strict=True)
    ]
    assert [row[1:] for row in found["p.json"]] == [row[1:] for row in found["p.csv"]]
    assert [row.line for row in found["p.json"]] == [2, 3, 5, 6]
    terms = first.entry.terms
    assert (terms.book, terms.input_fresh, terms.input_cache_write) == ("sale", Decimal("0.05"), Decimal("0.05"))
    assert (terms.output_reasoning, terms.per_image, terms.currency) == (Decimal("0.20"), Decimal("0.001"), "USD")
    assert first.entry.effective_at == datetime(2026, 12, 1, tzinfo=UTC)
    assert (second.entry.terms.book, second.entry.terms.tier) == ("cost", "priority")
    assert second.entry.effective_at == datetime(2026, 11, 30, 15, tzinfo=UTC)
    assert (device.entry.terms.device_hour, device.entry.effective_at) == (Decimal("2.50"), None)
    assert override.scope == ("team", "acme/search") and override.entry.terms.tier == ""


def test_every_row_with_a_mistake_is_told_with_its_line(tmp_path: Path) -> None:
    rows = [
        "fine,1,,",
        "bad,x,,",
        "none,,,",
        "later,1,2026-13-01,",
        "when,1,2026-12-01T00:00:00,",
        "minus,-1,,",
        "m,1,,yes",
    ]
    assert said(tmp_path, "p.csv", "\n".join(["model,input_fresh,effective_at,ends", *rows])) == [
        "3: input_fresh is 'x'; write an amount like 2.50",
        "4: it has no price; to end the one before, write ends = true",
        "5: '2026-13-01' is not a moment; write it like 2026-12-01T00:00:00Z, or a day",
        "6: 2026-12-01T00:00:00 needs a time zone, like 2026-12-01T00:00:00Z",
        "7: input_fresh is -1: an amount must be a finite number, 0 or more",
        "8: ends is 'yes'; write true or leave it out",
    ]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("p.csv", "modle,input_fresh\nsmall,1", "1: there is no column 'modle'; did you mean model?"),
        ("p.csv", "model,input_fresh\nsmall,1,2", "2: it has more cells than the header's 2"),
        ("p.csv", "", "1: there is no price in it"),
        ("p.csv", "model,tier,input_fresh\nsmall,fast,1", "2: Invalid enum value 'fast' - at `$.tier`"),
        ("p.csv", "model,factor\nsmall,2", "2: a factor is for an override of an org, team or key"),
        ("p.csv", "model,key,org,factor\nm,k,o,2", "2: an override is of one org, team or key"),
        ("p.csv", "model,input_fresh,ends\nm,1,true", "2: it ends, and has a price"),
        ("p.toml", "[[price]]\nmodel = \n", "2: it is no TOML: "),
        ("p.toml", "[[prices]]\nmodel = 'm'\n", "1: write each price as a table [[price]]"),
        ("p.toml", "[[price]]\nmodel = 'm'\ninput_fresh = true\n", "1: input_fresh is True; write an amount like 2.50"),
        ("p.json", "{}", "1: write a list of objects, one a price"),
        ("p.json", '[\n{"model": "m" "x": 1}]', "2: it is no JSON: "),
        ("p.json", '[\n{"model": 5, "input_fresh": 1}]', "2: model is 5; write a text"),
        ("p.json", '[{"model": "m", "input_fresh": 1}\n{}]', "2: it is no JSON: a comma or the list's end is missing"),
        ("p.json", '[{"model": "m", "input_fresh": 1}] x', "1: there is something after the list"),
        ("p.json", "[", "1: it is no JSON: "),
        ("p.yaml", "", "1: write prices as .csv, .toml, .json, not as '.yaml'"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (line,) = said(tmp_path, name, text)
    assert line.startswith(sentence)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(PriceFileError, match="it cannot be read: No such file"):
        read_prices(tmp_path / "p.csv", "USD")
    (tmp_path / "p.csv").write_bytes(b"\xff\xff")
    with pytest.raises(PriceFileError, match="not UTF-8"):
        read_prices(tmp_path / "p.csv", "USD")
