"""fedrema deploy server: Flower's SuperLink and SuperExec, the nodes' keys, and a run that goes on until it is done."""

import os
import sys
import time
from collections.abc import Callable

from fedrema.base.processes import LogTail, StopRequested, SupervisedProcess, stopped_on_exit
from fedrema.deploy.control import Control, NotThere, controlling
from fedrema.deploy.flower_environment import environment
from fedrema.deploy.places import ServerPlace
from fedrema.deploy.presence import beside, reason, somebody_is_there
from fedrema.errors import BadInput, FedremaError
from fedrema.runs.directory import RunDirectory

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_APPEAR = 120.0
"""How long a run may take from being asked for to writing."""
MOST_VAIN_STARTS = 5


class Serving:
    """Keeps a federation going; whatever dies is started again, and the run goes on from its last closed round."""

    def __init__(self, place: ServerPlace, say: Callable[[str], None]) -> None:
        self.place, self.say = place, say
        flower = place.state / "flower"
        own = environment(flower, place.path)
        tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
        tls[1::2] = [str(place.path / name) for name in tls[1::2]]
        secret = ["--superexec-auth-secret-file", str(place.path / "superexec.secret")]
        self.children = (
            SupervisedProcess(
                "Flower's SuperLink",
                [
                    *(sys.executable, "-m", "fedrema.deploy.superlink", place.listen, str(place.port), "--"),
                    *("--host", "127.0.0.1", "--port", str(place.control_port), *tls, "--enable-supernode-auth"),
                    *("--database", str(place.state / "superlink.db"), "--isolation", "process", *secret),
                    "--disable-runtime-dependency-installation",
                ],
                own,
                place.state / "superlink.log",
            ),
            SupervisedProcess(
                "Flower's SuperExec",
                # Apart from the SuperLink: a run outlives an outage of it.
                [
                    *("flower-superexec", "--runtime-api-address", place.control, *secret),
                    *("--parent-pid", str(os.getpid())),
                    *("--root-certificates", str(place.path / "ca.crt")),
                ],
                {**own, "FEDREMA_TIED": "1"},
                place.state / "superexec.log",
            ),
        )
        self.told = LogTail(beside(place.run, "log"))
        self.seen: dict[str, bytes] | None = None
        """The keys as they were when the server was last told of them."""
        self.asked = 0.0
        """When a run was last asked for; 0: none is awaited."""
        self.vain, self.rounds = 0, self._rounds()
        self.answered = False
        """Whether the SuperLink has ever answered."""

    def serve(self) -> int:
        """Serve until all rounds have been played (0), the federation has given up (2), or somebody stops it (130).

        1 says that Flower does not start here: a service manager tries again, a demonstration ends.
        """
        self.place.state.mkdir(exist_ok=True)
        beside(self.place.run, "stopped").unlink(missing_ok=True)
        try:
            with stopped_on_exit(*self.children):
                return self._loop()
        except StopRequested:
            self.say("stopped; the same command goes on from the last closed round")
            return 130

    def _loop(self) -> int:
        while True:
            for child in self.children:
                if sentence := child.supervise():
                    self.say(sentence)
            for line in self.told.lines():
                self.say(line)
            if self.place.finished() and not somebody_is_there(self.place.run):
                self.say(f"all rounds have been played: {self.place.run}")
                return 0
            if (why := reason(self.place.run)) and not somebody_is_there(self.place.run):
                raise FedremaError(why)
            try:
                with controlling(self.place.control, self.place.path / "ca.crt") as control:
                    self._tend(control)
                    self.answered = True
            except NotThere:  # it is just being started, or cannot be
                superlink = self.children[0]
                if superlink.early_exits >= MOST_VAIN_STARTS and not self.answered:
                    self.say(
                        f"{superlink.name} was started {superlink.early_exits} times and never answered; "
                        f"{superlink.log} tells why"
                    )
                    return 1
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _tend(self, control: Control) -> None:
        keys = {file.stem: file for file in sorted(self.place.keys.glob("*.pub"))}
        seen = {name: file.read_bytes() for name, file in keys.items()}
        if seen != self.seen:
            try:
                for change in control.admit(keys):
                    self.say(change)
            except BadInput as error:  # one bad file is no reason to end the federation
                self.say(f"keys stay as they were: {error}")
            self.seen = seen
        if somebody_is_there(self.place.run):
            self.asked = 0.0
            return
        if self.asked and time.monotonic() - self.asked < SECONDS_TO_APPEAR:
            return
        self._start(control)

    def _start(self, control: Control) -> None:
        """Start a run that begins, or goes on after one that was killed."""
        if self.vain >= MOST_VAIN_STARTS and self._rounds() == self.rounds:
            raise FedremaError(
                f"The federation was started {MOST_VAIN_STARTS} times without closing a round; "
                f"{beside(self.place.run, 'log')} and {self.place.state / 'superexec.log'} tell why."
            )
        control.stop_all()
        control.start(self.place.app, {"folder": str(self.place.run)})
        before, self.rounds = self.rounds, self._rounds()
        self.vain = 1 if self.rounds > before else self.vain + 1
        self.asked = time.monotonic()

    def _rounds(self) -> int:
        return len(RunDirectory(self.place.run).rounds())
