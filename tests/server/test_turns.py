"""Long work in turns: in order, to its end, a part at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lamina.server import turns
from lamina.server.turns import Chores, Pace, Turns, at_once, each_part, in_turns


@pytest.fixture(autouse=True)
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "CHUNKS_PER_TURN", 2)
    monkeypatch.setattr(turns, "KEYS_PER_TURN", 3)


def noting(noted: list[str], names: str) -> Turns[None]:
    for name in names:
        noted.append(name)
        yield None


def test_a_part_has_as_many_items_as_a_turn_may_do() -> None:
    called: list[Sequence[str]] = []
    assert len(list(each_part("abcdefg", called.append))) == 2
    assert called == ["abc", "def", "g"]
    called.clear()
    at_once(each_part("abcd", called.append, are_chunks=True))
    assert called == ["ab", "cd"]
    assert list(each_part("", called.append)) == []


def test_the_pace_begins_anew_with_every_turn() -> None:
    pace = Pace()
    assert [pace.is_spent() for _ in range(5)] == [False, True, False, True, False]
    assert pace.is_spent(100)
    assert not pace.is_spent()


def test_others_have_their_turn_between_two_parts() -> None:
    noted: list[str] = []

    async def main() -> None:
        await asyncio.gather(in_turns(noting(noted, "abc")), in_turns(noting(noted, "xyz")))

    asyncio.run(main())
    assert noted == list("axbycz")


def test_a_work_that_waits_goes_on_with_what_it_waited_for_and_its_failure() -> None:
    async def main() -> tuple[str, str]:
        loop = asyncio.get_running_loop()
        good, bad = loop.create_future(), loop.create_future()

        def work() -> Turns[tuple[str, str]]:
            yield good
            try:
                yield bad
                bad.result()
            except OSError as error:
                return good.result(), str(error)
            return good.result(), ""

        loop.call_soon(good.set_result, "result")
        loop.call_soon(bad.set_exception, OSError("failure"))
        return await in_turns(work())

    assert asyncio.run(main()) == ("result", "failure")


def test_chores_begin_at_once_and_go_on_one_after_another() -> None:
    noted: list[str] = []

    async def main() -> None:
        chores = Chores()
        chores.add(noting(noted, "abc"))
        chores.add(noting(noted, "xyz"))
        assert noted == ["a", "x"]
        running = asyncio.ensure_future(chores.run())
        await in_turns(chores.backlog())
        assert noted == list("axbcyz")
        assert list(chores.backlog()) == []
        chores.add(noting(noted, "12"))
        await in_turns(chores.backlog())
        assert noted[-2:] == ["1", "2"]
        running.cancel()

    asyncio.run(main())


def test_the_backlog_is_what_was_added_before() -> None:
    async def main() -> None:
        noted: list[str] = []
        chores = Chores()
        chores.add(noting(noted, "ab"))
        backlog = chores.backlog()
        next(backlog)
        chores.add(noting(noted, "x" * 1000))
        running = asyncio.ensure_future(chores.run())
        await in_turns(backlog)
        assert "b" in noted
        assert noted.count("x") < 10
        running.cancel()

    asyncio.run(main())


def test_a_chore_that_breaks_is_logged_and_the_next_one_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noted: list[str] = []

    def broken() -> Turns[None]:
        yield None
        raise OSError("it broke")

    async def main() -> None:
        chores = Chores()
        chores.add(broken())
        chores.add(noting(noted, "ab"))
        running = asyncio.ensure_future(chores.run())
        await in_turns(chores.backlog())
        running.cancel()

    asyncio.run(main())
    assert noted == ["a", "b"]
    assert "work after a request broke" in caplog.text
