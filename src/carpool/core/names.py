"""Names that the configuration and several stages have in common."""

from typing import Literal

import msgspec

# What a process does: everything, only the clients' side of Redis, or only the side of the endpoints.
Role = Literal["serve", "gateway", "batcher"]

# The wire formats of upstreams.
ProtocolName = Literal[
    "json", "kserve_v1", "kserve_v2", "kserve_v2_grpc", "openai_embeddings", "openai_completions", "tei_embed"
]

# What `POST /v1/inference` does where its client does not say.
ModeName = Literal["sync", "async"]

# What bytes of clients are to a model: what its protocol has for bytes, texts, or JSON. "": clients send no bytes.
BytesForm = Literal["", "base64", "text", "json"]


class TlsFiles(msgspec.Struct, frozen=True):
    """The PEM files that protect a connection; each is optional."""

    # The authorities whose certificates are accepted, in place of the system's.
    ca: str = ""
    # The certificate chain that Carpool shows, and its key; both or none.
    cert: str = ""
    key: str = ""
