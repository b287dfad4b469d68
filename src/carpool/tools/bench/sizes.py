"""How large the inputs of a run are.

All sizes are drawn before the run, and a request's number says which one it has. So sending a request draws nothing,
the verifier knows what it must get back, and the same seed gives the same sizes.
"""

from math import log
from random import Random

from carpool.tools.bench.payload import PAYLOAD_BYTES_MIN
from carpool.tools.bench.run import BadOption, parse_number
from carpool.tools.bench.tally import INPUT_BYTES_MAX as SIZE_MAX

FIXED, LOGNORMAL = "fixed", "lognormal:"
# So many are drawn; after them the same ones come again.
DRAWN = 65_536
SIGMA_MAX = 10
# The largest size where MAX is not given, as lengths are cut at a model's longest input.
MEDIANS_MAX = 16
FILE_BYTES_MAX = 8 * 1024 * 1024


def parse_sizes(text: str, seed: int) -> list[int]:
    """The sizes in bytes in the syntax of --sizes; none for `fixed`. Raises BadOption."""
    if text == FIXED:
        return []
    # Another sequence than that of the arrivals: long inputs must not come after long gaps.
    random = Random(f"sizes/{seed}")
    if not text.startswith(LOGNORMAL):
        return random.choices(_read_file(text), k=DRAWN)
    median, sigma, most = _parse_lognormal(text)
    drawn = (random.lognormvariate(log(median), sigma) for _ in range(DRAWN))
    return [int(min(max(size, PAYLOAD_BYTES_MIN), most)) for size in drawn]


def _parse_lognormal(text: str) -> tuple[float, float, float]:
    syntax = f"{text!r} is not lognormal:MEDIAN,SIGMA or lognormal:MEDIAN,SIGMA,MAX"
    numbers = [parse_number(part, syntax) for part in text.removeprefix(LOGNORMAL).split(",")]
    if len(numbers) == 2:
        numbers.append(min(MEDIANS_MAX * numbers[0], SIZE_MAX))
    if len(numbers) != 3:
        raise BadOption(syntax)
    median, sigma, most = numbers
    if not PAYLOAD_BYTES_MIN <= median <= most <= SIZE_MAX:
        raise BadOption(
            f"{text!r}: MEDIAN must be at least {PAYLOAD_BYTES_MIN} bytes, and MAX from MEDIAN to {SIZE_MAX}"
        )
    if not 0 <= sigma <= SIGMA_MAX:
        raise BadOption(f"{text!r}: SIGMA must be from 0 to {SIGMA_MAX}")
    return median, sigma, most


def _read_file(path: str) -> list[int]:
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as fault:
        raise BadOption(f"{path!r} is not fixed, not lognormal:…, and no file to read: {fault.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise BadOption(f"file {path!r} is over {FILE_BYTES_MAX} bytes")
    sizes: list[int] = []
    for number, line in enumerate(map(bytes.strip, data.split(b"\n")), 1):
        if not line:
            continue
        if not (line.isdigit() and len(line) < 10 and PAYLOAD_BYTES_MIN <= int(line) <= SIZE_MAX):
            raise BadOption(f"file {path!r}, line {number}: not a size from {PAYLOAD_BYTES_MIN} to {SIZE_MAX} bytes")
        sizes.append(int(line))
    if not sizes:
        raise BadOption(f"file {path!r} has no sizes in it")
    return sizes
