"""A batch while it is put together: how many more it takes, and how many bytes. Pure."""

from collections import deque

from carpool.core.request import DONE, RUNNING, Request


class BatchBuilder:
    """A batch while it is put together."""

    __slots__ = ("batch", "bytes_left", "expired", "now", "room", "room_bytes")

    def __init__(self, now: float, bytes_left: float, room_bytes: float) -> None:
        self.now = now
        # How many more there is room for, and how many bytes; below 0 if there is no room for the next one.
        self.room = 0
        self.bytes_left = bytes_left
        self.room_bytes = room_bytes
        self.batch: list[Request] = []
        self.expired: list[Request] = []

    def move(self, queue: deque[Request], bound: float) -> tuple[int, int, int]:
        """Move requests out of a queue while their place is not after `bound`: `accepts` for many, on the hot path.

        Returns how many, their bytes, and how many that were dead.
        """
        popleft, batch, expired = queue.popleft, self.batch, self.expired
        now, room, bytes_left = self.now, self.room, self.bytes_left
        before = len(batch) + len(expired)
        moved_bytes = dead = 0
        while queue and room and bytes_left >= 0:
            request = popleft()
            if request.phase == DONE:
                dead += 1
                continue
            if request.place > bound:
                queue.appendleft(request)
                break
            size = request.size
            if request.deadline <= now:
                expired.append(request)
            elif size > bytes_left and (batch or size > self.room_bytes):
                queue.appendleft(request)
                bytes_left = -1.0
                break
            else:
                bytes_left -= size
                room -= 1
                batch.append(request)
            request.phase = RUNNING
            request.taken = now
            moved_bytes += size
        self.room, self.bytes_left = room, bytes_left
        return len(batch) + len(expired) - before, moved_bytes, dead

    def accepts(self, request: Request) -> bool:
        """Take the next request, unless there is no room for it."""
        size = request.size
        if request.deadline <= self.now:
            self.expired.append(request)
        elif size > self.bytes_left and (self.batch or size > self.room_bytes):
            self.bytes_left = -1.0
            return False
        else:
            self.bytes_left -= size
            self.room -= 1
            self.batch.append(request)
        request.phase = RUNNING
        request.taken = self.now
        return True
