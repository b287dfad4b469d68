"""What a flood of one owner does to others, on virtual time: the embedded broker, without and with owners told apart.

    .venv/bin/python bench/fairness.py

640 requests/s are served (batches of 64, one each 100 ms) for 30 s. One owner sends 1,000/s, ten others 20/s each. Who
waits longer than 2 s for a slot has left by then.
"""

from collections import defaultdict

from carpool.broker.memory import MemoryBroker
from carpool.core.request import QUEUED, Request
from carpool.testing import FakeClock, Witness, make_request

BATCH, EVERY_S, SECONDS = 64, 0.1, 30
RATES = {"flood": 1000} | {f"other {number}": 20 for number in range(10)}


def run(are_owners_known: bool) -> dict[str, list[float]]:
    """Seconds in the queue of those who were served; inf for those who gave up."""
    clock, witness = FakeClock(), Witness()
    broker = MemoryBroker(waiting_max=10**6, bytes_max=10**9, lanes_max=9, tiers=1, clock=clock)
    broker.when_work_arrives("m", lambda lane: None)
    waits: defaultdict[str, list[float]] = defaultdict(list)
    sent: list[Request] = []
    for step in range(round(SECONDS / EVERY_S)):
        for turn in range(100):  # the arrivals of 100 ms, evenly mixed
            for who, rate in RATES.items():
                if (step * 100 + turn) * rate % 1000 < rate:
                    owner = who if are_owners_known else ""
                    request = make_request(who, witness, now=clock() + turn / 1000, owner=owner, total_timeout_s=60.0)
                    broker.submit(request)
                    sent.append(request)
        clock.advance(EVERY_S)
        for request in sent:
            if request.phase == QUEUED and clock() - request.arrived > 2.0:
                waits[request.id].append(float("inf"))
                broker.cancel(request)
        sent = [request for request in sent if request.phase == QUEUED]
        (lane,) = broker.lanes("m")
        for request in broker.take(lane, BATCH, clock()):
            waits[request.id].append(clock() - request.arrived)
    return waits


def told(waits: list[float]) -> str:
    """In ms, and how many gave up."""
    waits.sort()
    p50, p99 = (waits[int(len(waits) * share)] * 1000 for share in (0.5, 0.99))
    return f"p50 {p50:5.0f} ms, p99 {p99:5.0f} ms, served {sum(wait < 60 for wait in waits):6d} of {len(waits)}"


if __name__ == "__main__":
    for are_owners_known in (False, True):
        waits = run(are_owners_known)
        print("owners share" if are_owners_known else "in order of arrival")
        print("  flood ", told(waits.pop("flood")))
        print("  others", told([wait for each in waits.values() for wait in each]))
