"""A server over two fake models, for the tests of the engine's HTTP side."""

from collections.abc import Iterator

import httpx
import pytest

from engine.hosted import HostedModel
from tests.engine.fake_model import fake_model
from tests.engine.serving import serving


@pytest.fixture(scope="module")
def model() -> HostedModel:
    return fake_model(num_blocks=32, max_context=400)


@pytest.fixture(scope="module")
def url(model: HostedModel) -> Iterator[str]:
    with serving(model, fake_model("other", num_blocks=8)) as url:
        yield url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client
