"""README.zh-CN.md says what README.md says: as many headings and table rows, and the same commands."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
CODE = re.compile(r"^```(?:sh|python|js)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r" +# .*$", re.MULTILINE)


def code(text: str) -> list[str]:
    return [COMMENT.sub("", block) for block in CODE.findall(text)]


def outline(text: str) -> list[str]:
    """A # for each level of each heading, a | for each row of a table."""
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^(?:#+ |\|)", without_code, re.MULTILINE)


def test_the_same_commands() -> None:
    assert code(CHINESE) == code(ENGLISH) != []


def test_the_same_headings_and_tables() -> None:
    assert outline(CHINESE) == outline(ENGLISH) != []
