"""A gateway whose clients say in a header which tier they are of, to measure traffic of several tiers.

    .venv/bin/python bench/tiered_gateway.py gateway --broker redis://… [flags of `carpool gateway`]

The same gateway but for that header: credentials, which will tell the tier, are still to come. Until then every caller
is of the lowest one. Here so is a caller without the header.
"""

import sys

from carpool.admission.gate import Gate
from carpool.cli import main
from carpool.core.ports import Caller, Peer

TIER_HEADER = b"x-bench-tier"
# As a table of credentials would be: one look a request, nothing is made anew. Loopback has few addresses.
_callers: dict[tuple[str, bytes], Caller] = {}
_identify_by_address = Gate.identify


def identify(gate: Gate, headers: dict[bytes, bytes], peer: Peer) -> Caller:
    """The caller by its address, of the tier that it asks for."""
    caller = _identify_by_address(gate, headers, peer)
    tier = headers.get(TIER_HEADER)
    if tier is None:
        return caller
    tiered = _callers.get((caller.owner, tier))
    if tiered is None:
        tiered = _callers[caller.owner, tier] = Caller(caller.owner, int(tier))
    return tiered


setattr(Gate, "identify", identify)  # noqa: B010 - put in place of the real one
sys.exit(main())
