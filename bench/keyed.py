"""Clients with API keys, of several tiers: a configuration with the hashes, and files with the keys for the load."""

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

# Per cent of the requests.
SHARES = {"enterprise": 5, "paid": 25, "free": 70}


class Keyed(NamedTuple):
    """A gateway's configuration, and the keys that it knows."""

    config: Path
    # By tier: a file with the key of its first owner.
    files: Mapping[str, Path]
    # All keys of all tiers, each as often as its tier's share says: a line each, in an order without a pattern.
    mixed: Path

    @property
    def tiers(self) -> str:
        """What `carpool bench --tiers` wants."""
        return ",".join(f"{tier}={self.files[tier]}:{share}" for tier, share in SHARES.items())


def keyed(
    directory: Path, settings: str = "", *, owners: int = 1, per_minute: int = 0, burst: int = 1_000_000
) -> Keyed:
    """So many owners in each tier, each with this limit (0 a minute: none); `settings` is further TOML."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = ['[auth]\nmode = "keys"', settings]
    files: dict[str, Path] = {}
    mixed: list[str] = []
    for tier, share in SHARES.items():
        for number in range(owners):
            key = f"cp_{secrets.token_hex(20)}"
            digest = hashlib.sha256(key.encode()).hexdigest()
            lines.append(f'[keys.{tier}-{number}]\nsha256 = "{digest}"\ntier = "{tier}"')
            lines.append(f"per_minute = {per_minute}\nburst = {burst}")
            mixed += [key] * share
            if not number:
                files[tier] = directory / f"{tier}.key"
                files[tier].write_text(key)
    secrets.SystemRandom().shuffle(mixed)
    config, all_keys = directory / "carpool.toml", directory / "mixed.keys"
    config.write_text("\n".join(lines) + "\n")
    all_keys.write_text("\n".join(mixed) + "\n")
    return Keyed(config, files, all_keys)


@contextmanager
def temporary_keys() -> Iterator[Keyed]:
    """One owner in each tier, without limits, until the block ends."""
    with TemporaryDirectory() as directory:
        yield keyed(Path(directory))
