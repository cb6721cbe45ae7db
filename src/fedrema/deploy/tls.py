"""The federation's certificate authority, the server's TLS certificate, and the key of each node."""

import base64
import binascii
import hashlib
import ipaddress
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedrema.base.files import atomic_file, regular_file
from fedrema.errors import BadInput

AUTHORITY_DAYS, SERVER_DAYS = 3650, 825
"""How long the certificates of the authority and of the server are valid."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1", "fedrema-server")
"""Names by which the server is reached from its own machine, and by the containers of the compose file."""


def make_authority(folder: Path, name: str) -> None:
    """Create the certificate authority of a federation: its key and its certificate."""
    key = ec.generate_private_key(ec.SECP384R1())
    # While an authority is renewed, the old and the new one must have different names.
    unique = f"{name[:50]} {secrets.token_hex(4)}"
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, unique)])
    builder = _certificate(subject, subject, key.public_key(), AUTHORITY_DAYS)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA384())
    )
    write_secret(folder / "ca.key", _pem(key))
    write_certificates(folder / "ca.crt", certificate)


def make_server_certificate(authority: Path, folder: Path, hosts: tuple[str, ...]) -> None:
    """Create the server's key, and its certificate for all host names and addresses by which it is reached."""
    try:
        issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
        signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{authority} holds no certificate authority: {_reason(error)}.") from error
    if not isinstance(signer, ec.EllipticCurvePrivateKey) or signer.public_key() != issuer.public_key():
        raise BadInput(f"{authority} holds no certificate authority: ca.key does not belong to ca.crt.")
    try:
        trusted = read_certificates(folder / "ca.crt")  # while the authority is renewed, there are two
    except BadInput:
        trusted = []
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    names = x509.SubjectAlternativeName([_name(host) for host in dict.fromkeys((*hosts, *LOCAL_NAMES))])
    certificate = (
        _certificate(subject, issuer.subject, key.public_key(), SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(names, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )
    # A running server loads both files once they fit together.
    write_secret(folder / "server.key", _pem(key))
    write_certificates(folder / "server.crt", certificate)
    if issuer not in trusted:
        write_certificates(folder / "ca.crt", issuer)


def make_node_key(private: Path) -> bytes:
    """Create the key with which a node authenticates itself; return its public half, which the server needs."""
    key = ec.generate_private_key(ec.SECP384R1())
    unencrypted = serialization.NoEncryption()
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, unencrypted)
    write_secret(private, text)
    return public_half(private)


def public_half(private: Path) -> bytes:
    """Return the public half of a node's key, as one line."""
    return _openssh(_private_key(private).public_key()) + b"\n"


def read_public_key(file: Path) -> bytes:
    """Return a node's public key in the format that Flower expects."""
    try:
        key = serialization.load_ssh_public_key(regular_file(file).read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{file} holds no public key: {_reason(error)}.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise BadInput(f"{file} must hold a key on a NIST curve: create it with fedrema deploy key FOLDER.")
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def fingerprint(public: bytes) -> str:
    """Return the fingerprint of a public key in any of its formats, as `ssh-keygen -l` shows it."""
    try:
        if public.lstrip().startswith(b"-----"):
            key = serialization.load_pem_public_key(public)
            assert isinstance(key, ec.EllipticCurvePublicKey)
            public = _openssh(key)
        content = base64.b64decode(public.split()[1], validate=True)
    except (ValueError, IndexError, AssertionError, UnsupportedAlgorithm, binascii.Error):
        content = public  # not a key; the same bytes still have the same fingerprint
    return "SHA256:" + base64.b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def signature(private: Path, message: bytes) -> tuple[bytes, bytes]:
    """Sign a message with a node's key; return its public half in PEM, and the signature."""
    key = _private_key(private)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return public, key.sign(message, ec.ECDSA(hashes.SHA256()))


def is_signed_by(public: bytes, message: bytes, signed: bytes) -> bool:
    """Whether the owner of a public key (PEM) has signed a message."""
    try:
        key = serialization.load_pem_public_key(public)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signed, message, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


def read_certificate(file: Path) -> x509.Certificate:
    """Read a certificate; refuses a file that holds none."""
    try:
        return x509.load_pem_x509_certificate(regular_file(file).read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{file} holds no certificate: {_reason(error)}.") from error


def valid_until(certificate: Path) -> datetime:
    """Return when a certificate expires."""
    return read_certificate(certificate).not_valid_after_utc


def read_certificates(file: Path) -> list[x509.Certificate]:
    """Read all certificates in a file; refuses a file that holds none."""
    try:
        return x509.load_pem_x509_certificates(regular_file(file).read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{file} holds no certificate: {_reason(error)}.") from error


def write_certificates(file: Path, *certificates: x509.Certificate) -> None:
    """Write certificates to one file, completely or not at all."""
    with atomic_file(file) as temporary:
        temporary.write_bytes(b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates))


def write_secret(file: Path, content: bytes) -> None:
    """Write a file that only its owner can read, completely or not at all."""
    with atomic_file(file) as temporary:
        temporary.chmod(0o600)  # before it has any content
        temporary.write_bytes(content)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    begin = datetime.now(UTC) - timedelta(minutes=5)  # the clocks of other machines may be behind
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(begin).not_valid_after(begin + timedelta(days=days))


def _private_key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_ssh_private_key(regular_file(file).read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{file} holds no private key: {_reason(error)}.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadInput(f"{file} must hold a key on a NIST curve: create it with fedrema deploy key FOLDER.")
    return key


def _openssh(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def _reason(error: Exception) -> str:
    """Return the first sentence of an error as text inside a sentence."""
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    return (str(error).splitlines() or ["its format is unknown"])[0].split(". ")[0].rstrip(".")


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
