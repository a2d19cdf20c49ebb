"""One timer for many watched things."""

import asyncio
from typing import Any

from gateway.rounds import Rounds
from tests.gateway.loops import on_both_loops
from tests.gateway.pooled import until


@on_both_loops
async def test_a_watched_thing_that_fails_leaves_the_others_watched() -> None:
    looks = 0

    class Fails:
        def look(self, now: float) -> None:
            raise ValueError

    class Counts:
        def look(self, now: float) -> None:
            nonlocal looks
            looks += 1

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    rounds: Rounds[Any] = Rounds(0.01)
    failing = [Fails() for _ in range(2)]
    for one in (*failing, Counts()):
        rounds.add(one)
    await asyncio.sleep(0.1)
    for one in failing:
        rounds.discard(one)
    looks = 0
    await until(lambda: looks > 1)
