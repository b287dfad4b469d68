"""An event loop that never sleeps."""

import asyncio
import time

import pytest

from carpool.virtual_time import VirtualClock, VirtualLoop


def test_a_hang_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="would hang for ever"):
        VirtualClock().run(main())


def test_there_are_no_threads() -> None:
    async def main() -> None:
        assert isinstance(asyncio.get_running_loop(), VirtualLoop)
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="no threads"):
        VirtualClock().run(main())


def test_a_monotonic_clock_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        VirtualClock().advance(-1.0)
