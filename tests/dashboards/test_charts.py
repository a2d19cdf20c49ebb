from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec
import plotly.graph_objects as go

from billing.records import TokenClasses
from dashboards.web.charts import HEIGHT, Chart, cache_chart, spending_chart, tokens_chart
from dashboards.web.overview import NO_SPENDING
from dashboards.web.site import static_path

DAYS = [datetime(2026, 11, day, tzinfo=UTC) for day in (27, 28, 29)]
SPENDING = [
    (DAYS[0], msgspec.structs.replace(NO_SPENDING, billed=Decimal("0.000123"), cost=Decimal("0.0001"), operations=2)),
    (DAYS[1], msgspec.structs.replace(NO_SPENDING, billed=Decimal("2.5"), cost=None, cost_unknown=1, operations=1)),
    (DAYS[2], NO_SPENDING),
]
TOKENS = [
    (DAYS[0], TokenClasses(input_fresh=60, input_cached=40, output_text=100)),
    (DAYS[1], TokenClasses()),
    (DAYS[2], TokenClasses(input_cached=9, input_fresh=1)),
]


def check(chart: Chart) -> None:
    """Plotly itself accepts every property, once the colours are real ones; every colour is in the style sheet."""
    text = msgspec.json.encode(chart.figure).decode()
    sheet = static_path("farthing.css").read_text()
    while "var(" in text:
        start = text.index("var(")
        name = text[start + 4 : text.index(")", start)]
        assert sheet.count(f"{name}: #") == 2, f"{name} is not there for both schemes"
        text = text.replace(f"var({name})", "#123456")
    go.Figure(msgspec.json.decode(text))


def test_money_reaches_the_chart_exactly_and_unknown_as_a_gap() -> None:
    chart = spending_chart(SPENDING, "day", "USD")
    check(chart)
    billed, cost = chart.figure["data"]
    assert billed["y"] == ["0.000123", "2.5", "0"]
    assert cost["y"] == ["0.0001", None, "0"]
    assert cost["customdata"] == ["0.000100 USD", "unknown", "0.000000 USD"]
    assert chart.summary == "Most was billed on 28 Nov: 2.500000 USD."


def test_tokens_are_stacked_by_class_and_empty_classes_left_out() -> None:
    chart = tokens_chart(TOKENS, "day")
    check(chart)
    assert [(trace["name"], trace["y"]) for trace in chart.figure["data"]] == [
        ("Input, fresh", [60, 0, 1]),
        ("Input, cached", [40, 0, 9]),
        ("Output, text", [100, 0, 0]),
    ]
    assert chart.summary == "210 tokens: 29.0% input, fresh, 23.3% input, cached, 47.6% output, text."


def test_the_hit_rate_has_a_gap_where_there_was_no_prompt() -> None:
    chart = cache_chart(TOKENS, "day")
    check(chart)
    assert chart.figure["data"][0]["y"] == ["40.000", None, "90.000"]
    assert chart.summary == "Between 40.0% (on 27 Nov) and 90.0% (on 29 Nov)."


def test_hours_and_emptiness_are_said_in_words() -> None:
    hours = [(DAYS[0] + timedelta(hours=9), SPENDING[1][1])]
    assert spending_chart(hours, "hour", "EUR").summary == "Most was billed at 09:00: 2.500000 EUR."
    assert spending_chart([(DAYS[0], NO_SPENDING)], "hour", "EUR").summary == "Nothing billed in any hour."
    assert tokens_chart([(DAYS[0], TokenClasses())], "day").summary == "No tokens in any day."
    assert cache_chart([(DAYS[0], TokenClasses())], "day").summary == "No prompt tokens in any day."


def test_the_style_sheet_keeps_the_room_that_a_figure_takes() -> None:
    assert f"height: {HEIGHT}px" in static_path("farthing.css").read_text()


def test_the_running_step_has_a_tick_and_room_for_its_bar() -> None:
    days = [DAYS[2] - timedelta(days=ago) for ago in range(29, -1, -1)]
    axis = tokens_chart([(at, TokenClasses(output_text=1)) for at in days], "day").figure["layout"]["xaxis"]
    assert axis["tickvals"] == [f"2026-11-{day:02} 00:00" for day in (4, 9, 14, 19, 24, 29)]
    assert axis["range"] == ["2026-10-30 06:00", "2026-11-29 18:00"]
    alone = spending_chart(SPENDING[:1], "hour", "USD").figure["layout"]["xaxis"]
    assert alone["tickvals"] == ["2026-11-27 00:00"]
