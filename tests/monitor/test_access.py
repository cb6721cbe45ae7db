"""Who may see the pages: secrets, sessions, tokens, and attempts to guess them."""

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import time

import httpx
import pytest

from fedrema.cli import main
from fedrema.errors import BadInput
from fedrema.monitor import access
from fedrema.monitor.access import Failures, Secrets
from fedrema.monitor.watch import Protection, monitor_app, protection
from tests.reporting.folders import write_run

PASSWORD, TOKEN = "correct horse battery", "a-token-for-prometheus"
SECRETS = Secrets(PASSWORD, TOKEN)


@pytest.fixture
def secret_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text(f"{PASSWORD}\n")
    file.chmod(0o600)
    return file


class Browser:
    """Sends requests to the application for a folder with runs, without a network."""

    def __init__(self, folder, secrets=SECRETS, certificate=None):
        write_run(folder / "run")
        self.app = monitor_app(folder, "127.0.0.1", Protection(certificate, secrets))
        self.cookies = {}

    def __call__(self, method, path, **more):
        async def answer():
            transport = httpx.ASGITransport(self.app, client=("192.0.2.7", 5))
            async with httpx.AsyncClient(transport=transport, cookies=self.cookies) as client:
                return await client.request(method, f"http://127.0.0.1:8384{path}", **more)

        found = asyncio.run(answer())
        self.cookies = {**self.cookies, **found.cookies}
        return found

    def log_in(self, password, **more):
        return self("POST", "/login", data={"password": password}, **more)


@pytest.fixture
def browser(tmp_path, monkeypatch):
    monkeypatch.setattr(access, "FAILURE_SECONDS", 0.0)
    return Browser(tmp_path)


@pytest.mark.parametrize("path", ["/", "/parts/main", "/events", "/metrics", "/run/", "/login/x", "//login"])
def test_nothing_is_shown_without_a_session_or_a_token(browser, path):
    answer = browser("GET", path)
    assert (answer.status_code, answer.text) == (401, "Log in, or send a token.")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_browser_logs_in_and_out(browser):
    asked = browser("GET", "/", headers={"Accept": "text/html"})
    assert (asked.status_code, asked.headers["location"]) == (303, "login")
    form = browser("GET", "/login")
    assert form.status_code == 200
    assert "frame-ancestors 'none'" in form.headers["content-security-policy"]
    assert PASSWORD not in form.text
    entered = browser.log_in(PASSWORD)
    assert (entered.status_code, entered.headers["location"]) == (303, "./")
    cookie = entered.headers["set-cookie"].lower()
    assert all(word in cookie for word in ("httponly", "samesite=strict", "path=/", "max-age=43200"))
    assert PASSWORD not in cookie
    assert '"live":true' in browser("GET", "/").text
    assert ('action="logout" hidden' in form.text, 'action="logout" hidden' in browser("GET", "/login").text) == (
        True,
        False,
    )
    left = dict(browser.cookies)
    assert browser("POST", "/logout").status_code == 303
    browser.cookies = left  # a copy of the cookie is worthless afterwards
    assert browser("GET", "/").status_code == 401


def test_the_cookie_is_for_tls_only_if_there_is_tls(tmp_path):
    secure = access.Access(None, SECRETS, secure=True)
    answer = access.Response()
    secure._set_cookie(answer, "x", 9)
    assert answer.headers["set-cookie"].startswith("__Host-fedrema=x;")
    assert "Secure" in answer.headers["set-cookie"]
    assert "Secure" not in Browser(tmp_path).log_in(PASSWORD).headers["set-cookie"]


def test_programs_send_a_token(browser):
    def ask(value):
        return browser("GET", "/metrics", headers={"Authorization": value}).status_code

    assert ask(f"Bearer {TOKEN}") == 200
    assert ask(f"bearer  {TOKEN}") == 200
    assert [ask(value) for value in (f"Bearer {PASSWORD}", f"Basic {TOKEN}")] == [401, 401]
    assert browser("GET", f"/metrics?token={TOKEN}").status_code == 401  # addresses end up in logs


def test_one_secret_serves_both_purposes(tmp_path):
    browser = Browser(tmp_path, Secrets(token=TOKEN))
    assert browser("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert browser.log_in(TOKEN).status_code == 303


@pytest.mark.parametrize("password", ["", "wrong", PASSWORD.upper(), PASSWORD + " ", TOKEN, "x" * 3000, "\x00\ud7ff"])
def test_a_wrong_password_is_refused(browser, password):
    answer = browser.log_in(password)
    assert answer.status_code == 401
    assert "The password is wrong." in answer.text
    assert "set-cookie" not in answer.headers


def test_guessing_is_slowed_down_also_for_the_right_secret(browser):
    for _ in range(access.FREE_FAILURES + 1):
        browser.log_in("wrong")
    answer = browser.log_in(PASSWORD)
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 3
    token = browser("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert token.status_code == 429


def test_each_failure_doubles_the_wait_of_an_address():
    now = 0.0
    failures = Failures(lambda: now)
    waits = []
    for _ in range(14):
        failures.add("192.0.2.1")
        waits.append(failures.seconds_to_wait("192.0.2.1"))
    assert waits == [0, 0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert failures.seconds_to_wait("192.0.2.2") == 0
    failures.clear("192.0.2.1")
    assert failures.seconds_to_wait("192.0.2.1") == 0
    for number in range(4):  # all addresses of an IPv6 network are one machine's
        failures.add(f"2001:db8::{number}")
    assert failures.seconds_to_wait("2001:db8::ffff") > 0
    assert failures.seconds_to_wait("2001:db8:1::1") == 0
    for number in range(5000):
        failures.add(f"10.0.{number // 256}.{number % 256}")
    assert len(failures.found) <= access.MOST_ADDRESSES + 1
    assert failures.seconds_to_wait("10.255.0.1") > 0  # too many: the others share one entry


def test_forms_of_other_sites_and_large_forms_are_refused(browser):
    assert browser.log_in(PASSWORD, headers={"Origin": "https://evil.example"}).status_code == 403
    assert browser("POST", "/logout", headers={"Origin": "null"}).status_code == 403
    assert browser.log_in(PASSWORD, headers={"Origin": "http://127.0.0.1:8384"}).status_code == 303
    assert browser.log_in("x" * 5000).status_code == 413


def test_requests_for_other_host_names_are_refused_before_everything_else(browser):
    assert browser("GET", "/login", headers={"Host": "evil.example"}).status_code == 400


def test_secrets_are_read_from_files_and_the_environment(secret_file, monkeypatch):
    assert Secrets.read(secret_file, None).is_password(PASSWORD)
    assert PASSWORD not in repr(Secrets.read(secret_file, None))
    assert not Secrets.read(None, None)
    assert not Secrets().is_password("")
    monkeypatch.setenv(access.TOKEN_VARIABLE, TOKEN)
    assert Secrets.read(None, None).is_token(TOKEN)
    secret_file.chmod(0o640)
    with pytest.raises(BadInput, match=r"must be readable by its owner only, got mode 0640: run chmod 600"):
        Secrets.read(secret_file, None)


@pytest.mark.parametrize(
    "content", [b"", b"short\n", b"a line of text\nand another\n", b" spaces around it \n", b"\xff\xfe" * 9]
)
def test_unusable_secrets_are_one_sentence_without_the_secret(secret_file, content):
    secret_file.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        Secrets.read(None, secret_file)
    assert str(refused.value).startswith(f"--token-file {secret_file} ")
    assert content.decode("latin1").strip() not in str(refused.value) or not content


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_other_addresses_need_tls_and_a_secret(tmp_path, host, secret_file, capsys):
    assert main(["watch", str(tmp_path), "--host", host, "--port", "0"]) == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    assert f"--host {host} can be reached by other machines and needs TLS and a secret: add --tls-cert" in sentence
    assert main(["watch", str(tmp_path), "--host", host, "--password-file", str(secret_file)]) == 2
    assert capsys.readouterr().err.endswith("a secret: add --tls-cert and --tls-key.\n")
    assert main(["watch", str(tmp_path), "--tls-cert", str(secret_file)]) == 2
    assert "--tls-cert and --tls-key must be given together." in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--tls-cert", str(secret_file), "--tls-key", str(secret_file)]) == 2
    assert "must be a certificate and its key without a password, in PEM format." in capsys.readouterr().err


def test_the_certificate_of_a_federation_is_used_for_its_page(tmp_path):
    tls = pytest.importorskip("fedrema.deploy.tls")
    tls.make_authority(tmp_path, "test")
    tls.make_server_certificate(tmp_path, tmp_path, ("fl.example.org",))
    (tmp_path / "server.toml").write_text("format = 1\nport = 9092\ncontrol-port = 9093\n")
    found = protection(tmp_path, "0.0.0.0", None, None, SECRETS)
    assert found.certificate == (tmp_path / "server.crt", tmp_path / "server.key")
    with pytest.raises(BadInput, match=r"add --password-file or --token-file"):
        protection(tmp_path, "0.0.0.0", None, None, Secrets())
    assert protection(tmp_path, "127.0.0.1", None, None, Secrets()) == Protection()


def test_a_real_server_with_tls_uses_a_renewed_certificate_and_logs_no_secret(tmp_path, secret_file):
    tls = pytest.importorskip("fedrema.deploy.tls")
    tls.make_authority(tmp_path, "test")
    tls.make_server_certificate(tmp_path, tmp_path, ("localhost",))
    write_run(tmp_path / "run")
    files = ["--tls-cert", str(tmp_path / "server.crt"), "--tls-key", str(tmp_path / "server.key")]
    command = [sys.executable, "-m", "fedrema", "watch", str(tmp_path), "--host", "0.0.0.0", "--port", "0", *files]
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    environment = {**os.environ, access.TOKEN_VARIABLE: TOKEN}
    with subprocess.Popen(
        [*command, "--password-file", str(secret_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as server:
        try:
            address = server.stdout.readline().split()[2].replace("0.0.0.0", "localhost")
            assert address.startswith("https://")

            def serial():
                with httpx.Client(verify=context) as client, client.stream("GET", f"{address}login") as answer:
                    tls_object = answer.extensions["network_stream"].get_extra_info("ssl_object")
                    return answer.status_code, tls_object.getpeercert()["serialNumber"]

            code, first = serial()
            assert code == 200
            with httpx.Client(verify=context, base_url=address) as client:
                assert client.get("metrics").status_code == 401
                assert client.get("metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
                entered = client.post("login", data={"password": PASSWORD})
                assert entered.headers["set-cookie"].startswith("__Host-fedrema=")
                assert "Secure" in entered.headers["set-cookie"]
                tls.make_server_certificate(tmp_path, tmp_path, ("localhost",))
                end = time.monotonic() + 30
                while serial()[1] == first and time.monotonic() < end:
                    client.get("login")  # the old connection continues
                    time.sleep(0.2)
                assert int(serial()[1], 16) == tls.read_certificate(tmp_path / "server.crt").serial_number
                assert '"live":true' in client.get("/").text
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
            printed = server.stdout.read()
            assert PASSWORD not in printed
            assert TOKEN not in printed
            assert printed == ""
        finally:
            server.kill()
