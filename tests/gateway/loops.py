"""Tests that run on asyncio's own loop and on uvloop's, which the gateway is served by."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test as one that pytest runs twice, each time on a loop of its own and for at most a minute."""
    own = inspect.Parameter("new_loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(test)

    def run(new_loop: Callable[[], asyncio.AbstractEventLoop], **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(asyncio.wait_for(test(**fixtures), 60))  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    loops = [asyncio.SelectorEventLoop, uvloop.new_event_loop]
    return pytest.mark.parametrize("new_loop", loops, ids=["asyncio", "uvloop"])(run)
