"""Renewed certificates: a running server uses them, and the authority itself is renewed in three steps."""

import ssl
import stat
import subprocess

import pytest

pytest.importorskip("flwr")

import uvicorn
from cryptography import x509

from fedrema.base.tls_server import RenewableServer, check_certificate
from fedrema.cli import main
from fedrema.deploy.tls import make_authority, make_server_certificate, read_certificate, read_certificates
from fedrema.errors import BadInput


def served(server, authority):
    """Return the serial number of the certificate that a client sees in a handshake, without a network."""
    context = ssl.create_default_context(cafile=authority)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server, server_hostname="localhost")
    other = server.config.ssl.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(5):
        for side in (client, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return x509.load_der_x509_certificate(client.getpeercert(binary_form=True)).serial_number


@pytest.fixture
def server(tmp_path):
    make_authority(tmp_path, "test")
    make_server_certificate(tmp_path, tmp_path, ("localhost",))
    files = {"ssl_certfile": tmp_path / "server.crt", "ssl_keyfile": tmp_path / "server.key"}
    return RenewableServer(uvicorn.Config(None, ws="none", **files))


def test_new_handshakes_use_the_renewed_certificate(server, tmp_path):
    first = served(server, tmp_path / "ca.crt")
    assert first == read_certificate(tmp_path / "server.crt").serial_number
    assert not server.load_renewed()
    make_server_certificate(tmp_path, tmp_path, ("localhost",))
    assert served(server, tmp_path / "ca.crt") == first
    assert server.load_renewed()
    assert served(server, tmp_path / "ca.crt") == read_certificate(tmp_path / "server.crt").serial_number != first
    assert not server.load_renewed()
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_files_that_do_not_fit_together_are_not_used(server, tmp_path, content):
    first = served(server, tmp_path / "ca.crt")
    key = (tmp_path / "server.key").read_bytes()
    make_server_certificate(tmp_path, tmp_path, ("localhost",))
    renewed = (tmp_path / "server.key").read_bytes()
    # The certificate is new; the key is the old one, damaged, or missing.
    (tmp_path / "server.key").write_bytes(key if content is None else content)
    assert not server.load_renewed()
    assert served(server, tmp_path / "ca.crt") == first
    (tmp_path / "server.key").unlink()
    assert not server.load_renewed()
    (tmp_path / "server.key").write_bytes(renewed)
    assert server.load_renewed()


def test_unusable_files_are_refused_in_one_sentence(tmp_path):
    make_authority(tmp_path, "test")
    make_server_certificate(tmp_path, tmp_path, ("localhost",))
    check_certificate(tmp_path / "server.crt", tmp_path / "server.key")
    with pytest.raises(BadInput, match=r"must be a certificate and its key without a password, in PEM format\.$"):
        check_certificate(tmp_path / "server.crt", tmp_path / "ca.key")
    with pytest.raises(BadInput, match=r"no\.key cannot be read as a key: No such file or directory\.$"):
        check_certificate(tmp_path / "server.crt", tmp_path / "no.key")
    encrypted = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", "server.key", "-out", "locked.key"]
    subprocess.run(encrypted, cwd=tmp_path, check=True, capture_output=True)
    with pytest.raises(BadInput, match="without a password"):
        check_certificate(tmp_path / "server.crt", tmp_path / "locked.key")


def test_the_authority_is_renewed_in_three_steps(tmp_path, capsys):
    folder = tmp_path / "federation"
    assert main(["deploy", "init", str(folder), "fedavg", "--deal", "--nodes", "north,south"]) == 0
    node, server = folder / "nodes" / "north", folder / "server"
    old = read_certificate(node / "ca.crt")

    def renewed(*step):
        code = main(["deploy", "renew", str(folder), *step])
        capsys.readouterr()
        return code

    def verified():
        context = ssl.create_default_context(cafile=node / "ca.crt")
        own = read_certificate(server / "server.crt")
        issuer = next(each for each in read_certificates(node / "ca.crt") if each.subject == own.issuer)
        own.verify_directly_issued_by(issuer)
        return len(context.get_ca_certs())

    for step in ("switch", "retire"):
        assert renewed("--authority", step) == 2
    assert renewed("--authority", "prepare") == 0
    assert renewed("--authority", "prepare") == 2
    assert renewed("--authority", "retire") == 2
    assert verified() == 2
    assert renewed() == 0  # an ordinary renewal in between
    assert read_certificate(server / "server.crt").issuer == old.subject
    assert renewed("--authority", "switch") == 0
    assert read_certificate(server / "server.crt").issuer != old.subject
    assert verified() == 2
    assert renewed() == 0
    assert read_certificate(server / "server.crt").issuer != old.subject
    assert renewed("--authority", "retire") == 0
    assert verified() == 1
    assert read_certificate(node / "ca.crt") != old
    assert sorted(file.name for file in (folder / "authority").iterdir()) == ["ca.crt", "ca.key"]
    assert stat.S_IMODE((folder / "authority" / "ca.key").stat().st_mode) == 0o600
    assert renewed() == 0
    assert verified() == 1
    assert main(["deploy", "audit", str(server)]) == 0
    assert "authority: switch" in capsys.readouterr().out
