"""fedrema deploy init, add, key, renew: the files that they write, their permissions, and invalid input."""

import re
import shutil
import ssl
import stat
import subprocess
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

import fedrema
from fedrema.cli import main
from fedrema.cli.arguments import parse_settings
from fedrema.cli.deploy import COMMANDS
from fedrema.data import load_user_data
from fedrema.deploy.folder import NodeFolder, ServerFolder
from fedrema.deploy.node_data import own_samples
from fedrema.deploy.run_config import read_run_config
from fedrema.deploy.tls import make_authority, make_server_certificate, public_half, read_public_key, valid_until
from fedrema.errors import BadInput


@pytest.fixture
def made(tmp_path, capsys):
    folder = tmp_path / "federation"
    arguments = ["--deal", "--nodes", "north,south", "--host", "fl.example.org,10.0.0.7", "--rounds", "7"]
    assert main(["deploy", "init", str(folder), "fedavg", *arguments]) == 0
    capsys.readouterr()
    return folder


def refused(capsys, *arguments):
    assert main(["deploy", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    return printed


def test_a_new_federation_has_all_its_files(made):
    server, node = made / "server", made / "nodes" / "north"
    for file in ("README.md", "compose.yaml", "Dockerfile", ".dockerignore", "authority/ca.key", "authority/ca.crt"):
        assert (made / file).is_file()
    for file in ("server.toml", "server.crt", "server.key", "ca.crt", "start.sh", "fedrema-server.service"):
        assert (server / file).is_file()
    for file in ("node.toml", "node.key", "node.pub", "ca.crt", "start.sh", "fedrema-north.service", "data.npz"):
        assert (node / file).is_file()
    assert sorted(file.name for file in (server / "keys").iterdir()) == ["north.pub", "south.pub"]
    assert not [file for file in made.rglob("*") if file.is_file() and "$" in file.name]


def test_only_the_owner_can_read_secrets(made):
    for file in ("authority/ca.key", "server/server.key", "server/superexec.secret", "nodes/north/node.key"):
        assert stat.S_IMODE((made / file).stat().st_mode) == 0o600
    for folder in ("authority", "nodes/north"):
        assert stat.S_IMODE((made / folder).stat().st_mode) == 0o700
    # No node's folder holds another's key, nor the authority's.
    texts = [file.read_bytes() for file in (made / "nodes" / "north").iterdir() if file.is_file()]
    assert not any((made / "nodes" / "south" / "node.key").read_bytes() in text for text in texts)
    assert sum(b"PRIVATE KEY" in text for text in texts) == 1


def test_the_certificate_is_for_the_servers_names_and_signed_by_the_authority(made):
    certificate = x509.load_pem_x509_certificate((made / "server" / "server.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((made / "authority" / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"fl.example.org", "localhost"} <= set(names.get_values_for_type(x509.DNSName))
    assert {"10.0.0.7", "127.0.0.1"} <= {str(ip) for ip in names.get_values_for_type(x509.IPAddress)}
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    left = valid_until(made / "server" / "server.crt") - datetime.now(UTC)
    assert timedelta(days=820) < left < timedelta(days=826)
    context = ssl.create_default_context(cafile=made / "nodes" / "north" / "ca.crt")  # a node accepts this authority
    assert len(context.get_ca_certs()) == 1


def test_openssl_agrees(made):
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver"]
    files = ["-CAfile", "authority/ca.crt", "server/server.crt"]
    verified = subprocess.run([*command, *files], cwd=made, capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr


def test_a_nodes_key_has_the_format_of_flower(made):
    public = made / "server" / "keys" / "north.pub"
    assert public.read_bytes() == public_half(made / "nodes" / "north" / "node.key")
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = load_pem_public_key(read_public_key(public))
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp384r1"
    assert public.read_bytes() != (made / "server" / "keys" / "south.pub").read_bytes()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own
def test_the_app_holds_the_settings_and_flower_can_build_it(made):
    from flwr.cli.build import build_fab_from_disk

    config = tomllib.loads((made / "server" / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    settings, plan = read_run_config(config)
    assert settings.method.name == "fedavg"
    assert settings.simulation.rounds == 7
    assert (plan.shape, plan.classes, plan.least_clients) == ((1, 8, 8), 10, 2)
    content = build_fab_from_disk(made / "server" / "app")
    assert len(content) < 20_000
    assert b"PRIVATE" not in content


def test_each_node_gets_its_own_samples_and_no_others(made):
    parts = [load_user_data(str(made / "nodes" / name / "data.npz"), 0, 0.5) for name in ("north", "south")]
    assert [len(part) for part in parts] == [1, 1]
    assert parts[0].names != parts[1].names
    first, second = (np.load(made / "nodes" / name / "data.npz")["x"] for name in ("north", "south"))
    assert len(first) == len(second) == 60
    assert not {row.tobytes() for row in first} & {row.tobytes() for row in second}


def test_folders_are_read_back(made):
    server, node = ServerFolder.open(made), NodeFolder.open(made / "nodes" / "south")
    assert (server.config.port, server.config.control_port, server.control_address) == (9092, 9093, "127.0.0.1:9093")
    assert ServerFolder.open(made / "server") == server
    assert (node.name, node.config.server) == ("south", "fl.example.org:9092")
    assert node.node_config()["data"] == str(made / "nodes" / "south" / "data.npz")


def test_a_node_is_added_and_its_key_replaced(made, capsys):
    assert main(["deploy", "add", str(made), "west"]) == 0
    first = (made / "server" / "keys" / "west.pub").read_bytes()
    assert NodeFolder.open(made / "nodes" / "west").config.server == "fl.example.org:9092"
    assert main(["deploy", "key", str(made / "nodes" / "west")]) == 0
    assert (made / "nodes" / "west" / "node.pub").read_bytes() != first
    assert "as keys/west.pub" in capsys.readouterr().out
    assert "already exists" in refused(capsys, "add", str(made), "west")
    assert "'../x' is not a valid name" in refused(capsys, "add", str(made), "../x")


def test_the_certificate_is_renewed_by_the_same_authority(made, capsys):
    before = (made / "server" / "server.crt").read_bytes()
    assert main(["deploy", "renew", str(made), "--host", "new.example.org"]) == 0
    after = x509.load_pem_x509_certificate((made / "server" / "server.crt").read_bytes())
    assert before not in (made / "server" / "server.crt").read_bytes()
    after.verify_directly_issued_by(x509.load_pem_x509_certificate((made / "nodes" / "north" / "ca.crt").read_bytes()))
    names = after.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "new.example.org" in names.get_values_for_type(x509.DNSName)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fedavg"], "--sample-shape and --classes must describe the nodes' own data"),
        (["fedavg", "--deal", "--nodes", "a,a"], "--nodes must name each node once"),
        (["fedavg", "--deal", "--nodes", "a b"], "'a b' is not a valid name"),
        (["fedavg", "--deal", "--nodes", "0"], "--clients must be at least 1, got 0"),
        (["fedavg", "--deal", "--port", "70000"], "--port must be from 1 to 65534, got 70000"),
        (["fedavg", "--deal", "--host", ","], "--host must name the server"),
        (["fedwho", "--deal"], "fedwho"),
        (["fedavg", "--deal", "--roundz", "3"], "--roundz"),
        (["fedavg", "--deal", "--clients", "5"], "the data has 5 clients, but --nodes names 3: use --clients 3."),
        (["fedavg", "--sample-shape", "6", "--classes", "2", "--class-names", "a,b"], "exclude each other"),
        (
            ["fedavg", "--sample-shape", "6", "--class-names", "a,a"],
            "--class-names must name each class once, got 'a,a'",
        ),
        (["fedavg", "--sample-shape", "8by8", "--classes", "3"], "sample-shape must be written as 3x32x32"),
    ],
)
def test_invalid_arguments_are_refused_and_leave_no_files(arguments, sentence, tmp_path, capsys):
    assert sentence in refused(capsys, "init", str(tmp_path / "new"), *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--host", "--nodes"])
@pytest.mark.parametrize(
    "text", ["$(reboot)", "a'b", 'a"b', "münchen", "x" * 300, "a b", "a\nb", "-x", "a/b", "../a", "`id`", "a;b"]
)
def test_names_that_could_be_commands_or_paths_are_refused(option, text, tmp_path, capsys):
    printed = refused(capsys, "init", str(tmp_path / "new"), "fedavg", "--deal", f"{option}={text}")
    assert "is not a valid name" in printed or "is not a host name or an IP address" in printed
    assert len(printed) < 300
    assert list(tmp_path.iterdir()) == []


def test_hosts_can_be_ipv6_addresses_and_punycode(tmp_path, capsys):
    folder = tmp_path / "federation"
    arguments = ["--deal", "--host", "::1,xn--mnchen-3ya.example.org"]
    assert main(["deploy", "init", str(folder), "fedavg", *arguments]) == 0
    assert NodeFolder.open(folder / "nodes" / "node-1").config.server == "[::1]:9092"
    assert "is not a host name" in refused(capsys, "renew", str(folder), "--host", "$(reboot)")


def test_units_use_the_environment_in_which_they_were_created(made):
    unit = (made / "nodes" / "north" / "fedrema-north.service").read_text()
    assert f'ExecStart="{sys.executable}" -m fedrema deploy client /opt/fedrema/north\n' in unit
    if shutil.which("systemd-analyze"):
        subprocess.run(["systemd-analyze", "verify", str(made / "nodes" / "north" / "fedrema-north.service")])


def test_containers_run_without_root_and_with_a_read_only_file_system(made):
    lines = (made / "Dockerfile").read_text().splitlines()
    targets = {line.split()[3]: line.split()[1] for line in lines if line.startswith("FROM")}
    assert targets == {"fedrema": "python:3.12-slim", "server": "fedrema", "node": "fedrema"}
    assert "USER 10001:10001" in lines[: lines.index("FROM fedrema AS server")]
    assert sum(line.startswith("HEALTHCHECK") for line in lines) == 2
    assert any(f"'fedrema[deploy]=={fedrema.__version__}'" in line for line in lines)
    assert (made / ".dockerignore").read_text().splitlines()[-1] == "*"  # no key gets into an image
    compose = (made / "compose.yaml").read_text()
    shared, services = compose.split("\nservices:\n")
    for line in ("read_only: true", 'cap_drop: ["ALL"]', 'security_opt: ["no-new-privileges:true"]'):
        assert f"  {line}\n" in shared
    assert services.count("<<: *hardened") == 3
    # Each container sees its own folder only.
    assert re.findall(r'volumes: \["(.*)"\]', services) == [
        "./server:/federation",
        "./nodes/north:/node",
        "./nodes/south:/node",
    ]
    assert "$" not in compose
    if shutil.which("docker-compose"):
        subprocess.run(["docker-compose", "config", "--quiet"], cwd=made, check=True)
    if shutil.which("hadolint"):
        subprocess.run(["hadolint", "Dockerfile"], cwd=made, check=True)


WITHOUT_FLOWER = """
import importlib.util, sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "flwr" else find_spec(name, *rest)
sys.modules["flwr"] = None
from fedrema.cli import main

for command in ([], *([name] for name in sys.argv[1:])):
    try:
        code = main(["deploy", *command, "--help"])
    except SystemExit as stop:  # argparse exits after a help text
        code = stop.code
    print("exit code", code)
sys.exit(main(["deploy", "status", "x"]))
"""


def test_help_works_without_flower():
    ended = subprocess.run([sys.executable, "-c", WITHOUT_FLOWER, *COMMANDS], capture_output=True, text=True)
    assert ended.stdout.count("usage: ") == ended.stdout.count("exit code 0\n") == 1 + len(COMMANDS), ended.stderr
    assert (ended.returncode, ended.stderr) == (
        2,
        "fedrema: fedrema deploy needs Flower: pip install 'fedrema[deploy]'.\n",
    )


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\xfe\x00", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END"])
@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("server/server.crt", ("status", ".")),
        ("server/server.crt", ("server", ".")),
        ("server/server.key", ("server", ".")),
        ("server/ca.crt", ("server", ".")),
        ("authority/ca.key", ("renew", ".")),
        ("authority/ca.crt", ("renew", ".")),
        ("nodes/north/node.toml", ("client", "nodes/north")),
        ("nodes/north/node.key", ("client", "nodes/north")),
        ("server/server.toml", ("status", ".")),
        ("server/app/pyproject.toml", ("status", ".")),
    ],
)
def test_damaged_files_are_one_sentence(made, file, command, content, capsys):
    (made / file).write_bytes(content)
    printed = refused(capsys, command[0], str(made / command[1]))
    assert Path(file).name in printed or "authority" in printed
    assert "Error" not in printed


def test_a_foreign_authority_key_is_refused(made, tmp_path, capsys):
    make_authority(tmp_path, "another federation")
    shutil.copy(tmp_path / "ca.key", made / "authority" / "ca.key")
    assert "ca.key does not belong to ca.crt" in refused(capsys, "renew", str(made))


def test_an_existing_folder_is_not_changed(made, capsys):
    before = sorted(made.rglob("*"))
    assert "already exists" in refused(capsys, "init", str(made), "fedavg", "--deal")
    assert sorted(made.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('name = "n"\nserver = "a:1"\ndata = "d.npz"\nport = 3\n', "port is unknown; valid are name, server, data"),
        ('name = "n"\nserver = 3\ndata = "d.npz"\n', "server must be a text, got 3"),
        ('name = "n"\nserver = "a:1"\ndata = "d.npz"\nprivacy-clip = "much"\n', "privacy-clip must be a number"),
        ('name = "n"\nserver = "a:1"\ndata = "d.npz"\nprivacy-noise = 1\n', "privacy-noise needs privacy-clip"),
        ('name = "n"\ndata = "d.npz"\n', "server is missing; name, server, data must be given"),
        ("name = ", "is not valid TOML"),
        (
            'format = 9\nname = "n"\nserver = "a:1"\ndata = "d.npz"\n',
            "format must be 1, which this version of fedrema reads, got 9",
        ),
    ],
)
def test_an_invalid_node_toml_is_refused(text, sentence, tmp_path, capsys):
    (tmp_path / "node.toml").write_text(text)
    assert sentence in refused(capsys, "client", str(tmp_path))


def test_a_folder_without_a_federation_is_refused(tmp_path, capsys):
    assert "has no node.toml" in refused(capsys, "client", str(tmp_path))
    assert "has no server.toml" in refused(capsys, "server", str(tmp_path))
    assert "has no server.toml" in refused(capsys, "status", str(tmp_path))
    assert "holds no nodes" in refused(capsys, "add", str(tmp_path), "x")
    assert "'serve' is unknown; perhaps you meant server; valid are init, server" in refused(capsys, "serve")
    (tmp_path / "x.pub").write_text("ssh-rsa nonsense")
    with pytest.raises(BadInput, match="holds no public key"):
        read_public_key(tmp_path / "x.pub")
    with pytest.raises(BadInput, match="holds no certificate authority"):
        make_server_certificate(tmp_path, tmp_path, ("a",))


def test_missing_samples_and_keys_are_refused(made, capsys):
    (made / "nodes" / "north" / "data.npz").unlink()
    assert "data = 'data.npz' does not exist" in refused(capsys, "client", str(made / "nodes" / "north"))
    (made / "nodes" / "south" / "node.key").unlink()
    assert "has no node.key" in refused(capsys, "client", str(made / "nodes" / "south"))


def test_another_authority_has_not_issued_the_certificate(made, tmp_path):
    make_authority(tmp_path, "another federation")
    certificate = x509.load_pem_x509_certificate((made / "server" / "server.crt").read_bytes())
    other = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    with pytest.raises(ValueError, match="does not match certificate issuer"):
        certificate.verify_directly_issued_by(other)


def test_help_lists_all_commands(capsys):
    assert main(["deploy"]) == 0
    printed = capsys.readouterr().out
    for command in ("init", "server", "client", "status", "add", "key", "renew", "demo"):
        assert f"  {command} " in printed


def test_nodes_with_their_own_data_get_the_defaults_of_own_data(tmp_path, capsys):
    folder = tmp_path / "federation"
    assert main(["deploy", "init", str(folder), "fedavg", "--sample-shape", "6", "--classes", "4"]) == 0
    assert "--lr 0.02, a batch that each node chooses" in capsys.readouterr().out
    config = tomllib.loads((folder / "server" / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert not {"dataset", "clients", "samples"} & config.keys()
    settings, plan = read_run_config(config)
    assert (settings.local.batch, settings.local.lr, settings.local.drop_incomplete) == (0, 0.02, False)
    simulated = parse_settings("fedavg", ["--federation", "mine.npz"])
    assert settings.data.test_share == simulated.data.test_share == 0.2
    np.savez(tmp_path / "data.npz", x=np.zeros((50, 6), "float32"), y=np.arange(50) % 4)
    assert own_samples(str(tmp_path / "data.npz"), settings, "node-1", plan).test.sum() == 10


def test_class_names_become_part_of_the_plan(tmp_path, capsys):
    folder = tmp_path / "federation"
    assert main(["deploy", "init", str(folder), "fedavg", "--sample-shape", "6", "--class-names", "sick, well"]) == 0
    config = tomllib.loads((folder / "server" / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    _, plan = read_run_config(config)
    assert (plan.classes, plan.names) == (2, ("sick", "well"))


def test_all_nodes_compute_in_one_precision_whatever_their_devices_are(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = tmp_path / "federation"
    assert main(["deploy", "init", str(made), "fedavg", "--deal", "--nodes", "2", "--host", "fl.example.org"]) == 0
    config = tomllib.loads((made / "server" / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["precision"] == "float32"
    for precision, effective in (("auto", "float32"), ("bf16", "bf16")):
        settings, _ = read_run_config({**config, "precision": precision})
        assert settings.simulation.precision == effective
