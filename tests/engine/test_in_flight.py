"""How many steps may be dispatched and not finished."""

from typing import Any

import pytest

from jaxlit.engine.compiled_program import Bound


class Token:
    def __init__(self) -> None:
        self.waited = False

    def block_until_ready(self) -> None:
        self.waited = True


@pytest.mark.parametrize("limit", (1, 2, 3, 4, 32))
def test_steps_in_flight_are_bounded(limit) -> None:
    bound, tokens = Bound(limit), list[Any]()
    for _ in range(200):
        tokens.append(Token())
        bound(tokens[-1])
        # Steps run in order, so all before a step that was waited for are done.
        done = max((i + 1 for i, t in enumerate(tokens) if t.waited), default=0)
        # So that there is room for the next, and the devices have something to do.
        assert min(len(tokens), limit // 2) <= len(tokens) - done < limit
    assert sum(token.waited for token in tokens) <= 200 // max(1, limit // 2)


def test_draining_waits_for_the_newest_step_once_a_period() -> None:
    bound, tokens = Bound(4), [Token() for _ in range(6)]
    for token in tokens:
        bound.drain(token)  # type: ignore[arg-type]
    assert [token.waited for token in tokens] == [False, True] * 3
