"""One stack for all tests that can share it."""

from collections.abc import Iterator

import pytest
from stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The quick start, with both demo models, for all tests that can share it."""
    running = Stack(tmp_path_factory.mktemp("e2e") / "demo", "--demo")
    try:
        yield running.wait_until_up()
    finally:
        running.stop()
