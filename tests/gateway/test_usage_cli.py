"""`farthing usage`, `export`, `invoices` and `reconcile` on a month of a small company."""

import asyncio
import csv
import json
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import sample_ledger
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from typer.testing import CliRunner, Result

from gateway.cli import app
from gateway.usage_options import period

NOW = datetime(2026, 10, 30, 12, tzinfo=UTC)
DAYS = ["--from", "2026-10-01", "--to", "2026-10-31"]
Run = Callable[..., Result]


@pytest.fixture
def run(database_url: str) -> Run:
    in_database(database_url, lambda connection: sample_ledger.fill(connection, NOW, operations=300))
    return shell(database_url)


def shell(database_url: str) -> Run:
    environment = {"FARTHING_DATABASE_URL": database_url.replace("+asyncpg", ""), "COLUMNS": "200"}
    return lambda *arguments: CliRunner().invoke(app, [str(each) for each in arguments], env=environment)


def in_database(url: str, work: Callable[[Any], Any]) -> Any:
    async def inside() -> Any:
        engine = create_async_engine(url)
        async with engine.begin() as connection:
            answer = await work(connection)
        await engine.dispose()
        return answer

    return asyncio.run(inside())


def test_who_cost_what(run: Run) -> None:
    by_user = json.loads(run("usage", "--by", "user", *DAYS, "--json").stdout)
    [total] = json.loads(run("usage", "--by", "org", *DAYS, "--json").stdout)
    assert total["org"] == "Wren & Sons"
    assert sum(Decimal(row["billed"]) for row in by_user) == Decimal(total["billed"])
    assert sum(row["operations"] for row in by_user) == total["operations"] > 250
    assert sum(row["cost_unknown"] for row in by_user) == total["cost_unknown"] > 0
    table = run("usage", "--by", "user,model", *DAYS).stdout
    assert "李雯" in table and "hosted-70b" in table and "unknown" in table and "total" in table
    only = json.loads(run("usage", "--by", "user", *DAYS, "--org", "Wren & Sons", "--user", "李雯", "--json").stdout)
    assert [row["user"] for row in only] == ["李雯"]
    assert run("usage", "--last", "6h").stdout == "none\n"


def test_the_operator_s_questions(database_url: str) -> None:
    """Who cost what, with what margin, and what would the month be: each from the shell, and they agree."""
    now, run = datetime.now(UTC), shell(database_url)
    days = (now - now.replace(day=1, hour=0, minute=2, second=0)) / timedelta(days=1)
    if days < 0.005:
        pytest.skip("the month has only begun, nobody can have spent anything in it")
    in_database(database_url, lambda connection: sample_ledger.fill(connection, now, 600, min(days, 30)))
    month = ["--from", f"{now:%Y-%m}-01", "--to", f"{now:%Y-%m-%d}"]
    by_user = json.loads(run("usage", "--by", "user", *month, "--json").stdout)
    for by in ("user", "model", "tag:app"):
        margins = json.loads(run("margins", "--by", by, *month, "--json").stdout)
        assert by != "user" or {row["user"] for row in by_user} >= {row["user"] for row in margins} != set()
        for name in ("billed", "cost"):
            assert (
                sum(Decimal(row[name] or 0) for row in by_user) == sum(Decimal(row[name] or 0) for row in margins) > 0
            )
        assert all(
            row["margin"] is None
            if row["billed_unknown"] or row["cost_unknown"]
            else Decimal(row["margin"]) == Decimal(row["billed"]) - Decimal(row["cost"])
            for row in margins
        )
    assert json.loads(run("margins", "--json").stdout) and run("devices", "--last", "1d").stdout == "none\n"
    months = json.loads(run("usage", "forecast", "--json").stdout)
    assert [row["amount"] for row in months] == ["billed", "cost", "margin"]
    for row in months:
        assert row["month"] == f"{now:%Y-%m}" and Decimal(row["so_far"]) > 0
        assert Decimal(row["so_far"]) == sum(Decimal(each[row["amount"]] or 0) for each in by_user)
        assert row["low"] is None or Decimal(row["low"]) <= Decimal(row["expected"]) <= Decimal(row["high"])
    told_by = "each expected to bring" if now.day > 1 else "there is no whole day of usage yet to tell the rest by"
    assert told_by in run("usage", "forecast").stdout


def test_why_one_call_cost_what_it_did(run: Run, database_url: str) -> None:
    query = text("SELECT id FROM operation WHERE status = 'ok' AND cost IS NOT NULL ORDER BY id LIMIT 1")
    identifier = in_database(database_url, lambda connection: connection.scalar(query))
    lines = run("usage", "explain", identifier).stdout
    assert re.search(r"input fresh +\d+ tokens x 0\.\d+ per 1,000,000 += 0\.\d+", lines)
    assert re.search(r"device +[\d.]+ seconds x 0\.2 an hour += 0\.\d+", lines)
    explained = json.loads(run("usage", "explain", identifier, "--json").stdout)
    assert Decimal(explained["margin"]) == Decimal(explained["billed"]) - Decimal(explained["cost"])
    nothing = run("usage", "explain", "01a229bf-3a93-770b-ba5a-af56b79fb50a")
    assert nothing.exit_code == 1 and "there is no operation 01a229bf" in nothing.stderr


def test_files(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage, focus = tmp_path / "usage.parquet", tmp_path / "focus.csv"
    assert run("export", "usage", "-o", usage, *DAYS).exit_code == 0
    assert run("export", "focus", "--out", focus, *DAYS).exit_code == 0
    billed = sum(amount for amount in pq.read_table(usage)["billed"].to_pylist() if amount is not None)
    with focus.open(encoding="utf-8", newline="") as file:
        assert sum(Decimal(row["BilledCost"]) for row in csv.DictReader(file)) == billed
    assert run("export", "usage", "-o", "-", *DAYS).stdout.startswith("operation_id,started_at,")
    focus.write_text("before")
    nowhere = run("export", "focus", "-o", tmp_path / "nowhere" / "x.csv", *DAYS)
    assert nowhere.exit_code == 1 and "cannot write" in nowhere.stderr
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    without = run("export", "focus", "-o", focus, "--format", "parquet", *DAYS)
    assert without.exit_code == 1 and "`pip install pyarrow` beside Farthing, or export as CSV" in without.stderr
    assert focus.read_text() == "before" and not list(tmp_path.glob("*.part"))


def test_an_invoice_from_its_issue_to_its_void(run: Run, tmp_path: Path) -> None:
    made = run("invoices", "create", "--org", "Wren & Sons", "--month", "2026-10", "--issuer", "Ops\\nBerlin", "--json")
    invoice = json.loads(made.stdout)
    assert invoice["issuer"] == "Ops\nBerlin"
    label = invoice["label"]
    assert f"Invoice {label} to Wren & Sons" in run("invoices", "show", label).stdout
    pdf, table = tmp_path / "invoice.pdf", tmp_path / "invoice.csv"
    assert (
        run("invoices", "pdf", label, "-o", pdf).exit_code == run("invoices", "csv", label, "-o", table).exit_code == 0
    )
    assert pdf.read_bytes().startswith(b"%PDF") and label in table.read_text(encoding="utf-8")
    again = run("invoices", "create", "--org", "Wren & Sons", "--month", "2026-10")
    assert again.exit_code == 1 and f"on invoice {label} already" in again.stderr
    assert run("invoices", "void", label, "--reason", "wrong address").exit_code == 0
    [row] = json.loads(run("invoices", "list", "--json").stdout)
    assert (row["status"], row["void_reason"]) == ("void", "wrong address")
    assert run("invoices", "time-zone", "Asia/Shanghai", "--org", "Wren & Sons").exit_code == 0
    assert "there is no invoice 'nothing'" in run("invoices", "show", "nothing").stderr
    assert "there is no organisation 'nobody'" in run("invoices", "list", "--org", "nobody").stderr


def test_a_bill_that_agrees_and_one_that_does_not(run: Run, tmp_path: Path) -> None:
    rows = json.loads(run("usage", "--by", "day,model", *DAYS, "--json").stdout)
    bill = tmp_path / "bill.csv"
    lines = [f"{row['day']},{row['model'].upper()},{row['cost']}" for row in rows if row["model"] and row["cost"]]
    bill.write_text("\n".join(["Day,Model,Cost", *lines]))
    names = [f"--rename={each.upper()}={each}" for each in (sample_ledger.SMALL, sample_ledger.LARGE)]
    command = ["reconcile", bill, "--upstream", "engine", "--columns", "day=Day,model=Model,cost=Cost", *names]
    agrees = run(*command)
    assert agrees.exit_code == 0 and "0 differences" in agrees.stdout, agrees.output
    bill.write_text("\n".join(["Day,Model,Cost", *lines, "2026-10-20,new,5"]))
    differs = run(*command, "--json")
    found = json.loads(differs.stdout)
    assert differs.exit_code == 1 and [each["model"] for each in found["differences"]] == ["new"]
    assert "new" in run(*command).stdout
    assert "cannot read" in run("reconcile", tmp_path / "none.csv", "--upstream", "engine").stderr


def test_bad_options_say_what_to_do(database_url: str) -> None:
    environment = {"FARTHING_DATABASE_URL": database_url.replace("+asyncpg", "")}
    for arguments, problem in (
        (["--by", "colour"], "cannot be shown by 'colour'"),
        (["--last", "soon"], "'soon' is no length of time"),
        (["--from", "1.2."], "'1.2.' is not a date"),
        (["--to", "2026-10-01"], "--to needs --from"),
        (["--from", "2026-10-02", "--to", "2026-10-01"], "the period is empty"),
        (["--from", "2026-10-02", "--last", "3d"], "give --last or --from"),
        (["--team", "Search"], "--team needs --org"),
        (["--org", "nobody"], "there is no organisation 'nobody'"),
        (["--tag", "editor"], "'editor' is not a tag"),
        (["--time-zone", "Mars/Base"], "is not a time zone"),
    ):
        answer = CliRunner().invoke(app, ["usage", *arguments], env=environment)
        assert answer.exit_code == 1 and problem in answer.stderr, arguments


def test_a_period_ends_with_its_last_day() -> None:
    start, end = period(None, "2026-03-29", "2026-03-29", "Europe/Paris")
    assert (start, end) == (datetime(2026, 3, 28, 23, tzinfo=UTC), datetime(2026, 3, 29, 22, tzinfo=UTC))
    start, end = period("1d", None, None, "UTC")
    assert start.hour == start.minute == 0 and timedelta(0) <= end - start < timedelta(days=1)
    start, end = period("2w", None, None, "UTC")
    assert timedelta(days=13) <= end - start < timedelta(days=14)
