"""Credentials, plugged together: as they are configured, and the places that they are read from again."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.admission.credentials import Credentials, TierTerms
from carpool.composition.runtime import Runtime
from carpool.core.api_key import KeyStoreError
from carpool.core.ports import RateLimit
from carpool.settings import Settings, configured_keys, is_loopback
from carpool.upstream.tls import read_file

if TYPE_CHECKING:
    from carpool.admission.tokens import TokenRules

logger = logging.getLogger("carpool")

# Keys and the keys of tokens are looked at this often: a change is known within two seconds.
LOOK_S = 1.0
TAKES_KEYS, TAKES_TOKENS = ("keys", "both"), ("jwt", "both")


def make_credentials(settings: Settings) -> Credentials | None:
    """As configured; None where no client needs a credential."""
    mode = settings.auth.mode
    if mode == "off":
        return None
    return Credentials(
        tier_terms(settings),
        settings.tiers[-1].name,
        takes_keys=mode in TAKES_KEYS,
        configured=configured_keys(settings),
    )


def tier_terms(settings: Settings) -> dict[str, TierTerms]:
    """What a credential of each tier has, where it has nothing of its own."""
    limits = settings.limits
    return {
        tier.name: TierTerms(
            number,
            RateLimit(
                limits.per_minute if tier.per_minute is None else tier.per_minute,
                limits.burst if tier.burst is None else tier.burst,
                limits.concurrent if tier.concurrent is None else tier.concurrent,
            ),
        )
        for number, tier in enumerate(settings.tiers)
    }


def watch_token_keys(runtime: Runtime, credentials: Credentials) -> None:
    """Read the keys that sign tokens, now and when their file changes; raises ValueError or OSError the first time."""
    if runtime.settings.auth.mode not in TAKES_TOKENS:
        return
    from carpool.admission.tokens import TokenKeys

    path, rules = runtime.settings.auth.jwt_file, token_rules(runtime.settings)
    # Its version is its content: clocks of file systems are too coarse to tell two writes apart.
    watch = FileWatch(
        path, partial(read_file, path), lambda content: credentials.change_token_keys(TokenKeys(content, rules))
    )
    watch.read()
    runtime.do_every(LOOK_S, watch.look)


def watch_key_file(runtime: Runtime, credentials: Credentials) -> None:
    """Read the API keys beside the journal, now and when they change."""
    if runtime.settings.auth.mode not in TAKES_KEYS:
        return
    from carpool.admission.key_file import FILE_NAME, LOOK_BUSY_S, KeyFile

    credentials.expect_stored_keys()
    path = Path(runtime.settings.tasks.data_dir) / FILE_NAME
    file = KeyFile(path)
    watch = FileWatch(str(path), file.version, lambda _: credentials.change_stored_keys(file.all(LOOK_BUSY_S)))
    runtime.do_every(LOOK_S, watch.look)


def warn_if_open(settings: Settings) -> None:
    """Log a warning where any client on the network may come in."""
    gateway = settings.gateway
    if settings.auth.mode == "off" and not is_loopback(gateway.host):
        logger.warning(
            "whoever reaches %s may come in: no credential is asked for (auth.mode is off)", gateway.host or "this host"
        )


def token_rules(settings: Settings) -> "TokenRules":
    """What a token must say."""
    from carpool.admission.tokens import TokenRules

    auth = settings.auth
    return TokenRules(
        auth.jwt_algorithms,
        auth.jwt_issuer,
        auth.jwt_audience,
        owner_claim=auth.jwt_owner_claim,
        tier_claim=auth.jwt_tier_claim,
    )


class FileWatch:
    """Uses a file with keys when it has changed: when `version` gives another text.

    A file that cannot be used changes nothing, and is logged once.
    """

    def __init__(self, path: str, version: Callable[[], bytes], use: Callable[[bytes], None]) -> None:
        self._path = path
        self._version = version
        self._use = use
        self._used: bytes | None = None
        self._trouble = ""

    def read(self) -> None:
        """Use what the file has; raises ValueError, OSError or KeyStoreError."""
        version = self._version()
        if version != self._used:
            self._use(version)
            # The version from before: what came in between is seen at the next look.
            self._used = version
            logger.info("keys were read: %s", self._path)

    def look(self) -> None:
        """See whether there is something new."""
        try:
            self.read()
        except (OSError, ValueError, KeyStoreError) as failure:
            trouble = (failure.strerror or "") if isinstance(failure, OSError) else str(failure)
            if trouble != self._trouble:
                logger.error("%s cannot be used, the keys known stay: %s", self._path, trouble)
        else:
            trouble = ""
        self._trouble = trouble
