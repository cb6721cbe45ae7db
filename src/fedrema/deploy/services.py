"""The service behind `fedrema deploy server`, which supervises Flower's processes and starts or resumes the run."""

import os
import sys
import time
from collections.abc import Callable

from fedrema.base.files import make_private
from fedrema.base.processes import LogTail, StopRequested, SupervisedProcess, stopped_on_exit
from fedrema.base.tls_server import check_certificate
from fedrema.deploy.audit import SERVER, AuditLog, Entry, Event
from fedrema.deploy.audit_service import audited_service, settings_change
from fedrema.deploy.flower_control import Control, NotResponding, connected_control
from fedrema.deploy.folder import ServerFolder
from fedrema.deploy.node_service import flower_environment
from fedrema.deploy.rejected_keys import RejectedKeys
from fedrema.deploy.run_state import log_file, stop_reason, stop_reason_file
from fedrema.deploy.tls import read_certificates
from fedrema.errors import BadInput, FedremaError
from fedrema.runs.directory import RunDirectory
from fedrema.runs.lock import RunLock

SECONDS_BETWEEN_CHECKS = 1.0
SECONDS_TO_START = 120.0
"""How long the server's app may take from its start until it holds the run's lock."""
MOST_FAILED_STARTS = 5
EXIT_WITH_PARENT = "FEDREMA_EXIT_WITH_PARENT"
"""Environment variable: the server's app exits with the process that started it."""


class ServerService:
    """Keeps the server of a federation running: restarts Flower's processes, and starts or resumes the run.

    `report` is called with each line for the operator.
    """

    def __init__(self, folder: ServerFolder, report: Callable[[str], None]) -> None:
        self.folder, self.report = folder, report
        self.superlink, self.superexec = self._superlink(), self._superexec()
        self.log = LogTail(log_file(folder.run))
        self.audit = AuditLog(folder.path, SERVER)
        self.rejected = RejectedKeys(folder)
        self.registered_keys: dict[str, bytes] | None = None
        """The contents of the key files when they were last registered, by node."""
        self.requested = 0.0
        """When the run's app was started, if it does not hold the run's lock yet; otherwise 0."""
        self.failed_starts, self.rounds = 0, self._completed_rounds()
        self.superlink_responded = False
        """Whether the SuperLink has ever responded."""

    def serve(self) -> int:
        """Serve until all rounds are completed; return the exit code.

        0: all rounds are completed; 130: stopped by the operator; 1: Flower does not start, and a service manager
        should try again. Raises `FedremaError` if the run cannot continue.
        """
        if self.folder.forgetting.is_file():
            raise BadInput(f"{self.folder.path}: the removal of a node was interrupted: repeat fedrema deploy forget.")
        check_certificate(self.folder.path / "server.crt", self.folder.path / "server.key")
        read_certificates(self.folder.path / "ca.crt")
        self.folder.state.mkdir(exist_ok=True)
        make_private(self.folder.path)
        stop_reason_file(self.folder.run).unlink(missing_ok=True)
        try:
            settings = settings_change(self.audit, self.folder.run_config())
            with audited_service(self.audit, settings), stopped_on_exit(self.superlink, self.superexec):
                return self._loop()
        except StopRequested:
            self.report("the server was stopped; the same command resumes after the last completed round")
            return 130

    def _superlink(self) -> SupervisedProcess:
        path, config = self.folder.path, self.folder.config
        files = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
        arguments = [
            *(sys.executable, "-m", "fedrema.deploy.flower_superlink", config.listen, str(config.port), "--"),
            *("--host", "127.0.0.1", "--port", str(config.control_port), "--enable-supernode-auth"),
            *(word for option, name in files.items() for word in (option, str(path / name))),
            *("--database", str(self.folder.state / "superlink.db"), "--isolation", "process"),
            *("--superexec-auth-secret-file", str(path / "superexec.secret")),
            "--disable-runtime-dependency-installation",
        ]
        return SupervisedProcess(
            "Flower's SuperLink", arguments, self._environment(), self.folder.state / "superlink.log"
        )

    def _superexec(self) -> SupervisedProcess:
        """Return the process that starts the server's app, which then survives a restart of the SuperLink."""
        path = self.folder.path
        arguments = [
            *("flower-superexec", "--runtime-api-address", self.folder.control_address),
            *("--superexec-auth-secret-file", str(path / "superexec.secret")),
            *("--parent-pid", str(os.getpid()), "--root-certificates", str(path / "ca.crt")),
        ]
        environment = {**self._environment(), EXIT_WITH_PARENT: "1"}
        return SupervisedProcess("Flower's SuperExec", arguments, environment, self.folder.state / "superexec.log")

    def _environment(self) -> dict[str, str]:
        return flower_environment(self.folder.state / "flower", self.folder.path)

    def _loop(self) -> int:
        run = self.folder.run
        while True:
            for process in (self.superlink, self.superexec):
                if message := process.supervise():
                    self.report(message)
            for line in (*self.log.lines(), *self.rejected.news()):
                self.report(line)
            if not RunLock(run).is_held():
                if self.folder.is_finished():
                    self.report(f"all rounds are completed: {run}")
                    return 0
                if why := stop_reason(run):
                    raise FedremaError(why)
            try:
                with connected_control(self.folder.control_address, self.folder.path / "ca.crt") as control:
                    self._control(control)
                    self.superlink_responded = True
            except NotResponding:  # it is starting, or cannot start
                failed = self.superlink.early_exits
                if failed >= MOST_FAILED_STARTS and not self.superlink_responded:
                    self.report(
                        f"{self.superlink.name} was started {failed} times and never responded; "
                        f"see {self.superlink.log}"
                    )
                    return 1
            time.sleep(SECONDS_BETWEEN_CHECKS)

    def _control(self, control: Control) -> None:
        """Register changed keys, and start a run if none is running."""
        files = {file.stem: file for file in sorted(self.folder.keys.glob("*.pub"))}
        keys = {name: file.read_bytes() for name, file in files.items()}
        if keys != self.registered_keys:
            try:
                for change in control.admit(files):
                    self.report(str(change))
                    what = Event.NODE_ADDED if change.admitted else Event.NODE_REMOVED
                    self.audit.append(Entry(what, change.name, change.fingerprint))
            except BadInput as error:  # one bad file must not stop the federation
                self.report(f"the registered keys stay as they are: {error}")
            self.registered_keys = keys
        if RunLock(self.folder.run).is_held():
            self.requested = 0.0
        elif not self.requested or time.monotonic() - self.requested >= SECONDS_TO_START:
            self._start_run(control)

    def _start_run(self, control: Control) -> None:
        """Start the server's app, which begins or resumes the run."""
        if self.failed_starts >= MOST_FAILED_STARTS and self._completed_rounds() == self.rounds:
            raise FedremaError(
                f"The run was started {MOST_FAILED_STARTS} times without completing a round; see "
                f"{log_file(self.folder.run)} and {self.superexec.log}."
            )
        control.stop_all()
        control.start(self.folder.app, {"folder": str(self.folder.run)})
        before, self.rounds = self.rounds, self._completed_rounds()
        self.failed_starts = 1 if self.rounds > before else self.failed_starts + 1
        self.requested = time.monotonic()

    def _completed_rounds(self) -> int:
        return len(RunDirectory(self.folder.run).rounds())
