"""A server's own certificate: made once, known to clients by its fingerprint."""

from __future__ import annotations

import datetime
import hashlib
import ssl
from pathlib import Path

from kvstore.errors import InputInvalid
from kvstore.files import Pending, Root

_FILE = "certificate.pem"
_LIMIT = 1 << 16
_YEARS = 30


class Certificate:
    """Key and certificate in one PEM file of mode 0600 below ``folder``; made when it isn't there."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = Root(folder)
        try:
            root.make_folder("tmp")
            root.make_folder("book")
            with root.lock("book", exclusive=True):
                try:
                    pem = root.read(_FILE, _LIMIT)
                except FileNotFoundError:
                    pem = _made()
                    root.publish([Pending(_FILE, [pem])])
        finally:
            root.close()
        self.fingerprint = _fingerprint(pem, self._path)

    def context(self) -> ssl.SSLContext:
        """A server's TLS 1.3 with it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self._path)
        return context


def _made() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvferry")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def _fingerprint(pem: bytes, path: Path) -> str:
    try:
        text = pem.decode()
        start = text.index("-----BEGIN CERTIFICATE-----")
        der = ssl.PEM_cert_to_DER_cert(text[start:])
    except ValueError as error:
        raise InputInvalid(
            f"{path}: expected a key and a certificate, found something else. Move it away: a new one is made, and the devices are paired again."
        ) from error
    return hashlib.sha256(der).hexdigest()
