"""What was recorded stays as it was: no source changes or removes rows of the ledger or of the price book."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from billing.tables import metadata

ROOT = Path(__file__).parent.parent
FOLDERS = ("billing", "gateway", "dashboards")
RECORDED = {"operation", "attempt", "price_version"}
KNOWN = {
    # Moves the rows of a day out of the default partition into that day's own, in one statement.
    "billing/partitions.py: DELETE FROM {spare}",
    # Whole partitions that are older than retention keeps them.
    "billing/retention.py: DROP TABLE {', '.join(each.names)}",
    # A table out of those that the file lists: sums, which are computed anew; names of orgs, teams and users.
    "billing/rollups.py: delete(table)",
    "billing/directory.py: update(table)",
}
"""What may, and what takes a table that only its surroundings tell."""

_NAME = r"(?:\{[^{}]*\}|%\w|[\w\".])+"
_CHANGE = re.compile(
    r"\b(?:(?<!FOR )(?<!DO )(?<!NO KEY )UPDATE|DELETE FROM|MERGE INTO|TRUNCATE(?: TABLE)?|DROP TABLE(?: IF EXISTS)?"
    r"|INSERT INTO(?=(?:(?!INSERT INTO).)* DO UPDATE)|ALTER TABLE(?=[^;]* DETACH ))"
    rf"(?: ONLY)? ({_NAME}(?:, ?{_NAME})*|$)",
    re.IGNORECASE,
)
_PARTITION = re.compile(r"_(default|\d{8})$")


def may_be_recorded(name: str) -> bool:
    """Whether it is, or may turn out to be, one of these tables or a partition of one."""
    return not name or name[0] in "{%" or _PARTITION.sub("", name.replace('"', "").rpartition(".")[2]) in RECORDED


def in_sql(text: str) -> Iterator[str]:
    on_one_line = re.sub(r"\s+", " ", text)
    for found in _CHANGE.finditer(on_one_line):
        if any(may_be_recorded(name.strip()) for name in found[1].lower().split(",")):
            yield found[0].strip()


def strings(tree: ast.AST) -> Iterator[str]:
    """All of them; an f-string with the source of what it takes."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = (part.value for part in node.values if isinstance(part, ast.Constant | ast.FormattedValue))
            yield "".join(f"{{{ast.unparse(p)}}}" if isinstance(p, ast.expr) else str(p) for p in pieces)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def imported(tree: ast.AST, package: str) -> dict[str, str]:
    """What each name here is called in the package that it comes from; the package itself and its modules: ''."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}."):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            mine = [alias for alias in node.names if f"{alias.name}.".startswith(f"{package}.")]
            names |= {alias.asname or alias.name.partition(".")[0]: "" for alias in mine}
    return names


def in_calls(tree: ast.AST) -> Iterator[str]:
    """`update(table)`, `delete(table)` and the like of SQLAlchemy."""
    theirs, tables = imported(tree, "sqlalchemy"), imported(tree, "billing.tables")

    def table(node: ast.expr) -> str:
        """Its name, '' where that cannot be told."""
        if isinstance(node, ast.Attribute):
            return node.attr if node.attr in metadata.tables else ""
        return tables.get(node.id, "") if isinstance(node, ast.Name) else ""

    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Name(id=name) if theirs.get(name) in ("update", "delete"):
                pass
            case ast.Attribute(attr="update" | "delete", value=ast.Name(id=name)) if name in theirs:
                pass
            case ast.Attribute(attr="update" | "delete" | "drop", value=receiver) if table(receiver) in RECORDED:
                yield ast.unparse(call.func)
                continue
            case _:
                continue
        given = call.args or [keyword.value for keyword in call.keywords]
        if not given or may_be_recorded(table(given[0])):
            yield ast.unparse(call)

    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        added = {table(call.args[0]) for call in calls if call.args and ast.unparse(call.func).endswith("insert")}
        if added & RECORDED and any(ast.unparse(call.func).endswith("on_conflict_do_update") for call in calls):
            yield f"{function.name}: on_conflict_do_update"


def changes(source: str) -> set[str]:
    """Whatever in a Python source changes or removes recorded rows, or may."""
    tree = ast.parse(source)
    return {found for text in strings(tree) for found in in_sql(text)} | set(in_calls(tree))


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_changes_what_was_recorded(folder: str) -> None:
    found = set()
    for path in sorted((ROOT / folder).rglob("*.*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py":
            found |= {f"{name}: {change}" for change in changes(path.read_text(encoding="utf-8"))}
        elif path.suffix in (".json", ".html", ".js", ".sql"):
            found |= {f"{name}: {change}" for change in in_sql(path.read_text(encoding="utf-8"))}
    assert found == {known for known in KNOWN if known.startswith(f"{folder}/")}


def test_nothing_else_takes_them_along() -> None:
    """A foreign key could: ON DELETE CASCADE, ON UPDATE SET NULL."""
    keys = [key for name in RECORDED for key in metadata.tables[name].foreign_keys]
    assert [key.target_fullname for key in keys if key.ondelete or key.onupdate] == []


BEFORE = """
import sqlalchemy as sa
from sqlalchemy import delete, text, update as change
from sqlalchemy.dialects.postgresql import insert
from billing import tables
from billing.tables import attempt, operation as op, price_version, org
"""


@pytest.mark.parametrize(
    "line",
    [
        'text("UPDATE operation SET billed = 0")',
        'text("update only public.operation set billed = 0")',
        'text("WITH gone AS (DELETE\\n  FROM attempt a USING x RETURNING *) SELECT 1")',
        'text("DELETE FROM \\"price_version\\"")',
        'text("DELETE FROM operation_20261129")',
        'text(f"UPDATE {table} SET billed = 0")',
        'text("DELETE FROM %s" % table)',
        'text("DELETE FROM " + table)',
        'text("TRUNCATE org, attempt_default")',
        'text("DROP TABLE IF EXISTS operation")',
        'text("ALTER TABLE operation DETACH PARTITION operation_20261129")',
        'text("INSERT INTO price_version (id) SELECT 1 ON CONFLICT (id) DO UPDATE SET model = excluded.model")',
        'text("MERGE INTO attempt USING x ON true WHEN MATCHED THEN DELETE")',
        "change(op).values(billed=0)",
        "delete(attempt).where(attempt.c.number == 1)",
        "delete(table)",
        "delete(tables.attempt)",
        "sa.update(price_version)",
        "price_version.update()",
        "tables.operation.delete()",
        "attempt.drop(engine)",
        "def seed():\n    row = insert(price_version)\n    return row.on_conflict_do_update(set_={})",
    ],
)
def test_each_way_to_change_it_is_found(line: str) -> None:
    assert len(changes(BEFORE + line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        'text("SELECT * FROM operation FOR UPDATE SKIP LOCKED")',
        'text("INSERT INTO operation (id) VALUES (1) ON CONFLICT DO NOTHING")',
        'text("WITH a AS (INSERT INTO attempt SELECT 1) INSERT INTO org (id) VALUES (1) ON CONFLICT DO UPDATE")',
        'text("UPDATE operation_count SET n = 0")',
        "change(org).values(name='x')",
        "known.update(op)",
        "insert(op).on_conflict_do_nothing()",
    ],
)
def test_what_leaves_it_alone_is_not_found(line: str) -> None:
    assert changes(BEFORE + line) == set()
