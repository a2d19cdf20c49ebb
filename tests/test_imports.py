"""The one-way import table: a folder may import only what is listed for it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"engine", "billing", "gateway", "dashboards", "migrations", "benchmarks", "tests"}
MAY_IMPORT = {
    "engine": set(),
    "billing": set(),
    "gateway": {"billing"},
    "dashboards": {"billing"},
    "migrations": {"billing"},
}
EXTRA = {
    # (module that may, what it may): the exceptions, one line each
    ("gateway/app.py", "dashboards"),
}
ENGINE_WIRE_TYPES = "engine.protocol"


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, wherever in the file the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"{path}: relative import past its own folder"
            if node.level == 0 and node.module:
                names.add(node.module)
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(folder: str) -> list[str]:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for module in imported_modules(path):
            top = module.split(".")[0]
            if top not in OURS or top == folder or top in MAY_IMPORT[folder] or (name, top) in EXTRA:
                continue
            if folder == "gateway" and (module == ENGINE_WIRE_TYPES or module.startswith(ENGINE_WIRE_TYPES + ".")):
                continue
            found.append(f"{name} imports {module}")
    return found


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_imports_follow_the_table(folder: str) -> None:
    assert violations(folder) == []


def test_models_know_no_backend() -> None:
    """Only the interface, so that a model is written once for all of them."""
    files = [path for folder in ("models", "layers") for path in (ROOT / "engine" / folder).glob("*.py")]
    modules = {module for path in files for module in imported_modules(path)}
    machinery = {m for m in modules if m.startswith(("engine.backends.", "engine.kernels", "engine.native"))}
    assert machinery and all(m.startswith("engine.backends.base") for m in machinery)


def test_the_walk_sees_a_violation(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from engine import server\n")
    assert "engine.server" in imported_modules(bad)
