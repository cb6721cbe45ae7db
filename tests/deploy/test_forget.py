"""fedrema deploy forget: nothing of a departed site remains, and the run can be read and resumed."""

import copy
import json
import shutil

import pytest
import torch

pytest.importorskip("flwr")

from fedrema.cli import main
from fedrema.cli.arguments import parse_settings
from fedrema.deploy import forget as forgetting
from fedrema.deploy.audit import verify
from fedrema.deploy.folder import NodeFolder, ServerFolder
from fedrema.deploy.run_state import locked_run
from fedrema.deploy.server import CentralServer
from fedrema.deploy.services import ServerService
from fedrema.deploy.status import read_status
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.runs.checkpoint import load_state, read_checkpoint, save_state
from fedrema.runs.directory import RunDirectory
from fedrema.runs.run import Run
from fedrema.runs.trained_clients import dummy_federation
from fedrema.tasks import Task
from tests.deploy.test_more_rounds import NAMES, Control, created, set_rounds
from tests.quick import quick_arguments

ROW = NAMES.index("west")  # the other two are peers, and have the same head
FORGOTTEN = f"(forgotten {ROW})"


def conducted(place, rounds):
    """Conduct the rounds that remain, in this process, with the folders of all nodes."""
    set_rounds(place, rounds)
    Control(place).start(place.app, {"folder": str(place.run)})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A federation after its last round, with its exported models, and with what a killed server leaves behind."""
    place = created(tmp_path_factory.mktemp("trained") / "f", "--rounds", "2")
    conducted(place, 2)
    head = b"".join(heads(place))
    place.state.mkdir(exist_ok=True)
    (place.state / "superlink.db").write_bytes(head)
    (place.run / "checkpoint" / ".state.safetensors.1234.part").write_bytes(head)
    assert main(["export", str(place.run)]) == 0
    return place


@pytest.fixture
def place(trained, tmp_path):
    shutil.copytree(trained.path.parent, tmp_path / "f")
    return ServerFolder.open(tmp_path / "f")


def forget(place, *more):
    return main(["deploy", "forget", str(place.path.parent), "west", *more])


def heads(place):
    """Return the bytes of the personal parameters in a row, tensor by tensor."""
    own = load_state(RunDirectory(place.run).checkpoint_file, None).params.own
    found = [value[ROW].numpy().tobytes() for value in own.values()]
    assert all(len(one) >= 32 for one in found)
    return found


def files_with(place, content):
    return [file.name for file in place.path.rglob("*") if file.is_file() and content in file.read_bytes()]


def test_no_byte_of_the_head_and_no_score_remains(place, capsys):
    before, records = heads(place), Run(place.run).rounds
    own = [record.client_accuracy[ROW] for record in records]
    assert all(value is not None for value in own)
    for one in before:
        assert {"state.safetensors", "superlink.db", ".state.safetensors.1234.part"} <= set(files_with(place, one))
    others = load_state(RunDirectory(place.run).checkpoint_file, None).params.own
    assert forget(place, "--remove-key") == 0
    printed = capsys.readouterr().out
    assert "west is forgotten" in printed
    assert "The shared parameters and the other nodes' parameters keep what they have learned" in printed
    for one in before:
        assert files_with(place, one) == []
        assert files_with(place, one[:24]) == []
    # Its name remains in the audit log alone.
    assert files_with(place, b"west") == ["audit.jsonl"]
    run = Run(place.run)
    assert run.names == ["north", "south", FORGOTTEN]
    assert [record.client_accuracy[ROW] for record in run.rounds] == [None, None]
    assert [record.client_accuracy[0] for record in run.rounds] == [record.client_accuracy[0] for record in records]
    assert [record.accuracy for record in run.rounds] == [record.accuracy for record in records]
    assert run.finished
    federation = RunDirectory(place.run).manifest().federation
    assert (federation.train_counts[ROW], federation.test_counts[ROW], federation.last_counted[ROW]) == (0, 0, 0)
    facts, _ = read_checkpoint(RunDirectory(place.run).checkpoint_file)
    assert "west" not in json.dumps(facts)
    after = load_state(RunDirectory(place.run).checkpoint_file, None)
    for name, value in others.items():
        torch.testing.assert_close(after.params.own[name][[0, 1]], value[[0, 1]], rtol=0, atol=0)
    dependencies = after.server["dependencies"]
    assert int(dependencies[ROW].sum() + dependencies[:, ROW].sum()) == 0
    assert [member.name for member in read_status(place).members] == ["north", "south"]
    lines, problems = verify(place.path)
    assert problems == []
    assert (lines[-1].entry.what, lines[-1].entry.site) == ("node forgotten", "west")
    assert not place.forgetting.exists()
    assert not (place.keys / "west.pub").exists()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_the_run_resumes_and_the_site_can_return_as_a_new_one(place, capsys):
    assert forget(place, "--remove-key") == 0
    conducted(place, 3)
    run = Run(place.run)
    assert len(run.rounds) == 3
    assert run.names == ["north", "south", FORGOTTEN, "west"]
    assert sorted(run.rounds[-1].participants) == [0, 1, 3]
    capsys.readouterr()
    assert main(["export", str(place.run)]) == 0
    index = json.loads((place.run / "models" / "index.json").read_text())
    assert [client["client"] for client in index["clients"]] == ["north", "south", "west"]


def test_what_is_not_allowed_is_one_sentence_and_changes_nothing(place, capsys):
    def content():
        return {file: file.read_bytes() for file in place.path.rglob("*") if file.is_file() and "lock" not in file.name}

    before = content()
    assert forget(place) == 2
    assert "Node west may still participate: add --remove-key, or delete" in capsys.readouterr().err
    assert main(["deploy", "forget", str(place.path), "east"]) == 2
    assert "There is no node 'east'; known are north, south, west." in capsys.readouterr().err
    assert main(["deploy", "forget", str(place.path), "../x"]) == 2
    assert "is not a valid name" in capsys.readouterr().err
    with locked_run(place.run):
        assert forget(place, "--remove-key") == 2
    assert "is in use by process" in capsys.readouterr().err
    assert content() == before


@pytest.mark.parametrize(
    "step", ["_forget_row", "_reset_row", "_delete_copies", "_redact_logs", "first", "second", "AuditLog"]
)
def test_after_a_crash_the_server_waits_and_the_same_command_continues(place, step, monkeypatch, capsys):
    before = heads(place)

    def crash(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        if step in ("first", "second"):  # before rounds.jsonl is replaced, and before the last checkpoint
            save = "fedrema.runs.directory.save_state"
            calls = iter([crash] if step == "first" else [save_state, crash])
            broken.setattr(save, lambda *arguments: next(calls)(*arguments))
        else:
            broken.setattr(forgetting, step, crash)
        assert forget(place, "--remove-key") == 130
    assert len(Run(place.run).rounds) == 2  # readable at every moment
    with pytest.raises(BadInput, match="the removal of a node was interrupted: repeat fedrema deploy forget"):
        ServerService(ServerFolder.open(place.path), print).serve()
    assert main(["deploy", "forget", str(place.path), "south"]) == 2
    assert "The removal of node west was interrupted: repeat it first." in capsys.readouterr().err
    assert forget(place) == 0
    assert [file for one in before for file in files_with(place, one)] == []
    assert files_with(place, b"west") == ["audit.jsonl"]
    assert Run(place.run).finished


def test_a_node_that_never_took_part_is_forgotten(tmp_path, capsys):
    place = created(tmp_path / "f", "--rounds", "2")
    assert forget(place, "--remove-key") == 0
    assert NodeFolder.open(place.path.parent / "nodes" / "west").name == "west"  # the owner's folder is not touched
    assert "still exists: delete it if it is only the operator's copy" in capsys.readouterr().out
    assert [member.name for member in read_status(place).members] == ["north", "south"]


@pytest.mark.parametrize("method", registry())
def test_the_row_of_every_method_becomes_one_that_was_never_used(method):
    arguments = ["--hidden", "6", "--epochs", "1", "--device", "cpu", *quick_arguments(method)]
    settings = parse_settings(method, arguments)
    clients, row = 7, 2  # no other dimension is 7
    central = CentralServer(settings, dummy_federation((1, 8, 8), Task(classes=10)), clients)
    initial, state = copy.deepcopy(central.state), central.state

    def tensors(found):
        groups = {"own": found.params.own, "inbox": found.inbox.own, "server": found.server}
        every = {(group, name): value for group, members in groups.items() for name, value in members.items()}
        return {name: value for name, value in every.items() if isinstance(value, torch.Tensor)}

    state.inbox.own["prototypes"] = torch.ones(clients, 3)
    for value in tensors(state).values():
        value.fill_(1)
    forgetting._reset_row(central, initial, row)
    rest = [other for other in range(clients) if other != row]
    for name, value in tensors(state).items():
        before = tensors(initial).get(name, torch.zeros(clients, 3))
        for axis in [axis for axis, size in enumerate(value.shape) if size == clients]:
            torch.testing.assert_close(value.select(axis, row), before.select(axis, row), rtol=0, atol=0)
            value, before = (each.index_select(axis, torch.tensor(rest)) for each in (value, before))
        assert (value == 1).all(), name
