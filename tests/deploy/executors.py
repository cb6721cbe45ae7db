"""A federation in this process whose nodes answer with their executors, as `fedrema deploy client` does."""

from fedrema.cli import main
from fedrema.deploy.approval import approve, approved_plan, proposed_plan
from fedrema.deploy.flower_conductor import Conductor
from fedrema.deploy.flower_executor import Executor
from fedrema.deploy.folder import NodeFolder, ServerFolder
from fedrema.deploy.run_config import read_run_config
from fedrema.deploy.run_state import locked_run
from tests.deploy.flower_in_process import InProcessGrid

NAMES = ("north", "south", "west")
SETTINGS = (
    *("--epochs", "1", "--samples", "40", "--hidden", "6", "--seed", "3"),
    *("--device", "cpu", "--precision", "float64", "--backend", "loop"),
)


class Approved:
    """A federation that `fedrema deploy init` created, whose plan every owner has approved."""

    def __init__(self, folder, method="fedrema", rounds=3, more=(), edit=lambda node: None):
        words = ["--deal", "--nodes", ",".join(NAMES), "--rounds", str(rounds), "--wait-seconds", "0", *SETTINGS, *more]
        assert main(["deploy", "init", str(folder), method, *words]) == 0
        self.folder, self.place = folder, ServerFolder.open(folder)
        for name in NAMES:
            edit(self.node(name).path)
            node = self.node(name)
            node.kept.mkdir()
            approve(node, proposed_plan(node))
        self.start()

    def node(self, name):
        return NodeFolder.open(self.folder / "nodes" / name)

    def start(self):
        """Start the processes of all nodes, or start them again."""
        self.executors = {name: Executor(self.node(name), approved_plan(self.node(name))) for name in NAMES}

    def permit(self, number):
        """Let the owners permit the server to repeat a round and later ones."""
        for name in NAMES:
            assert main(["deploy", "approve", str(self.node(name).path), "--repeat-from", str(number)]) == 0

    def log(self, name):
        file = self.folder / "nodes" / name / "node.log"
        return file.read_text() if file.exists() else ""

    def grid(self, spoil=lambda node, reply: reply, **changes):
        known = dict(zip((7, 8, 9), NAMES, strict=True))
        config = {**self.place.run_config(), "folder": str(self.place.run), **changes}
        return InProcessGrid(
            config,
            [{} for _ in NAMES],  # an executor takes the node's configuration from its own folder
            known,
            spoil,
            lambda node, message, context: self.executors[known[node]].reply_to(message, context),
        )

    def conduct(self, grid=None):
        """Run all rounds that are not completed."""
        grid = grid or self.grid()
        config = {**self.place.run_config(), "folder": str(self.place.run)}
        with locked_run(self.place.run) as lock:
            conductor = Conductor(grid, *read_run_config(config), pause=lambda seconds: None)
            conductor.conduct(lock)
        return conductor
