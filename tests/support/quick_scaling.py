"""A process whose rules of scaling decide within a second."""

# One request a call, five calls a second; decisions come quickly.
SLOW = "sim:?latency_ms=200&slots=1"
QUICK: dict[str, object] = {
    "batching.max_batch": 1,
    "carpool.composition.scaling.DECIDE_S": 0.1,
    "carpool.composition.scaling.MEASURE_S": 0.2,
    "carpool.core.scaling.STANDS_S": 0.5,
}
