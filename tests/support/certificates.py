"""Certificates for tests, made with openssl."""

import ssl
import subprocess
from pathlib import Path

from support.processes import PATIENCE_S


class Certificates:
    """Files made with openssl: an authority, what it signed, and an authority that nobody should trust."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Without the defaults of the system's file, which would make everything an authority.
        (folder / "openssl.cnf").write_text("[req]\ndistinguished_name = dn\n[dn]\n")
        self.make("ca", "", "basicConstraints=critical,CA:TRUE")
        self.make("stranger", "", "basicConstraints=critical,CA:TRUE")
        self.make("server", "ca", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        self.make("elsewhere", "ca", "subjectAltName=DNS:elsewhere.test")
        self.make("client", "ca", "extendedKeyUsage=clientAuth")
        self.make("other-client", "ca", "extendedKeyUsage=clientAuth")
        self.make("forged-client", "stranger", "extendedKeyUsage=clientAuth")
        # A part of the client's private key.
        self.secret_line = (folder / "client.key").read_text().splitlines()[1]

    def make(self, name: str, signer: str, extension: str, *, is_rsa: bool = False) -> None:
        kind = ["rsa:2048"] if is_rsa else ["ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        command = ["openssl", "req", "-x509", "-newkey", *kind, "-nodes"]
        command += ["-config", "openssl.cnf", "-days", "2", "-subj", f"/CN={name}", "-addext", extension]
        command += ["-out", f"{name}.pem", "-keyout", f"{name}.key"]
        if signer:
            command += ["-CA", f"{signer}.pem", "-CAkey", f"{signer}.key"]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder, timeout=PATIENCE_S)

    def pem(self, name: str) -> str:
        return str(self.folder / f"{name}.pem")

    def key(self, name: str) -> str:
        return str(self.folder / f"{name}.key")

    def of_server(self, name: str = "server", *, asks_for_client: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.pem(name), self.key(name))
        if asks_for_client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.pem("ca"))
        return context
