"""A certificate authority of a fleet, and a certificate for each node: ECDSA P-256, files in PEM.

The key of the authority stays on the machine that makes the certificates, and goes to Ray's head where nodes are added
there for the load.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shapeshift import files
from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.node import check_node_name
from shapeshift.triton.endpoint import Tls

Key = ec.EllipticCurvePrivateKey

CA_FILE = "ca.pem"
_CA_KEY_FILE = "ca.key"
# Clocks of nodes may differ by so much.
_SKEW = datetime.timedelta(days=1)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def ensure(folder: Path, node: str, hosts: Sequence[str] = (), days: float = 365) -> Tls:
    """The files of the node in `folder`; those that are missing are made, readable only by their owner.

    A certificate is made anew in the last third of its time, and where it is damaged or does not name all `hosts`.
    Without the key of the authority it stays as it is.

    hosts: names and addresses at which others reach the node; its own name and loopback are added. days: how long a
    new certificate is valid; that of the authority is for ten times as long. Raises InvalidInputError for an invalid
    node name, ShapeshiftError where the key of the authority is missing or not that of a fleet.
    """
    check_node_name(node)
    tls = Tls(folder / CA_FILE, folder / f"{node}.pem", folder / f"{node}.key")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with files.exclusive_lock(folder / ".lock"):
        names = [node, *_LOOPBACK, *hosts]
        is_there = tls.certificate.is_file() and tls.key.is_file()
        if is_there and (not (folder / _CA_KEY_FILE).is_file() or _is_fresh(tls.certificate, names)):
            return tls
        authority, signer = _authority(folder, 10 * days)
        key = _new_key()
        files.replace_private(tls.key, _key_text(key))
        files.replace_private(tls.certificate, _certificate(node, key, authority, signer, days, names))
    return tls


def _is_fresh(file: Path, hosts: Sequence[str]) -> bool:
    """Whether the certificate names `hosts` and has more than a third of its time left; False where it is damaged."""
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    is_young = end - datetime.datetime.now(datetime.UTC) > (end - begin) / 3
    return is_young and all(_general_name(host) in names for host in hosts)


def _authority(folder: Path, days: float) -> tuple[x509.Certificate, Key]:
    """Certificate and key of the authority in `folder`, made if they are missing."""
    key_file, file = folder / _CA_KEY_FILE, folder / CA_FILE
    if file.is_file() and not key_file.is_file():
        # A new authority would not be trusted by the nodes that run.
        raise ShapeshiftError(f"no {key_file}, which signs certificates; put it back, or remove {folder} for new ones")
    if not file.is_file():
        key = _new_key()
        files.replace_private(key_file, _key_text(key))
        files.replace_private(file, _certificate("shapeshift fleet", key, None, key, days, []))
    signer = serialization.load_pem_private_key(key_file.read_bytes(), None)
    if not isinstance(signer, Key):
        raise ShapeshiftError(f"{key_file} is no ECDSA key; remove it and {file} to have new ones made")
    return x509.load_pem_x509_certificate(file.read_bytes()), signer


def _certificate(
    name: str,
    key: Key,
    authority: x509.Certificate | None,
    signer: Key,
    days: float,
    hosts: Sequence[str],
) -> bytes:
    """The certificate of `key`, signed by `signer`: an authority's own one where `authority` is None."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if authority is None else authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts:
        names = [_general_name(host) for host in dict.fromkeys(hosts)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def _key_text(key: Key) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
