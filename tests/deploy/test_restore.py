"""After an older checkpoint of the server was put back, the nodes continue from their states of that time."""

import shutil

import pytest
import torch

pytest.importorskip("flwr")

from fedrema.deploy.folder import NodeFolder
from fedrema.errors import BadInput
from fedrema.runs.run import Run
from tests.deploy.executors import NAMES, Approved


def with_line(line):
    """Return a function that appends a line to a node's node.toml."""

    def edit(node):
        file = node / "node.toml"
        file.write_text(f"{file.read_text()}{line}\n")

    return edit


def with_backup(made, number):
    """Return a function for `spoil` that copies the server's checkpoint after a round."""

    def copy(node, reply):
        if reply.metadata.group_id == str(number + 1) and not (made.folder / "backup").exists():
            shutil.copytree(made.place.run / "checkpoint", made.folder / "backup")
        return reply

    return copy


def restore(made):
    """Put the copy back, as docs/deploy.md says."""
    shutil.rmtree(made.place.run / "checkpoint")
    shutil.copytree(made.folder / "backup", made.place.run / "checkpoint")


def kept(made, name="north"):
    return [int(file.stem.removeprefix("round-")) for file in sorted(made.node(name).kept.glob("round-*"))]


# Ditto has private parameters, Local has nothing else, and FedAvg keeps its momentum.
@pytest.mark.parametrize("method", ["ditto", "local", "fedavg"])
@pytest.mark.parametrize("again", [False, True], ids=["running nodes", "restarted nodes"])
def test_a_restored_server_repeats_the_rounds_with_the_same_result(method, again, tmp_path):
    made = Approved(tmp_path / "federation", method, rounds=6)
    made.conduct(made.grid(with_backup(made, 2)))
    expected = {name: value.clone() for name, value in Run(made.place.run).state().params.merged().items()}
    records = [record["client_accuracy"] for record in Run(made.place.run).rounds]
    assert kept(made) == [1, 2, 3, 4, 5, 6]
    restore(made)
    if again:
        made.start()
    made.conduct()
    assert "the run resumes after round 2 of 6" in (made.folder / "server" / "run.log").read_text()
    assert [record["client_accuracy"] for record in Run(made.place.run).rounds] == records
    for name, value in Run(made.place.run).state().params.merged().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    assert "is lost" not in "".join(made.log(name) for name in NAMES)


def test_states_of_replaced_rounds_are_deleted(tmp_path):
    made = Approved(tmp_path / "federation", "local", rounds=5)
    made.conduct(made.grid(with_backup(made, 2)))
    restore(made)
    found = []
    made.conduct(made.grid(lambda node, reply: found.append(kept(made)) or reply))
    assert found[0] == [1, 2, 3]  # after the repeated round 3


def test_as_many_states_are_kept_as_the_owner_says(tmp_path):
    made = Approved(tmp_path / "federation", "ditto", rounds=6, edit=with_line("kept-rounds = 2"))
    made.conduct(made.grid(with_backup(made, 2)))
    assert kept(made) == [4, 5, 6]  # two that the server has used, and the last one
    restore(made)
    with pytest.raises(BadInput, match=r"state: it has lost its state after round 2: restore its folder"):
        made.conduct()
    assert "The state after round 2 is lost (there is round 4, 5, 6)" in made.log("north")


def test_an_owner_can_let_a_node_continue_from_what_it_has(tmp_path):
    line = "kept-rounds = 2\naccept-lost-state = true"
    made = Approved(tmp_path / "federation", "ditto", rounds=6, edit=with_line(line))
    made.conduct(made.grid(with_backup(made, 2)))
    restore(made)
    made.start()
    with pytest.raises(BadInput, match="repeated: the request for round 4 is not the one that the node has answered"):
        made.conduct()  # the nodes continue from other states, so that the model after round 3 is another one
    made.permit(4)
    made.conduct()
    assert [record["round"] for record in Run(made.place.run).rounds] == [1, 2, 3, 4, 5, 6]
    for name in NAMES:
        logged = made.log(name)
        assert logged.count("accept-lost-state") == 1
        assert (
            "round 3: the state after round 2 is lost; it continues from the state after round 4 (accept-lost-state)"
        ) in logged


def test_a_node_without_any_state_starts_from_the_initial_one_if_its_owner_accepts_that(tmp_path):
    made = Approved(tmp_path / "federation", "ditto", rounds=4, edit=with_line("accept-lost-state = true"))
    made.conduct(made.grid(with_backup(made, 2)))
    restore(made)
    shutil.rmtree(made.node("north").kept)
    made.node("north").kept.mkdir()
    made.permit(3)
    made.start()
    made.conduct()
    assert "the state after round 2 is lost; it continues from the initial state" in made.log("north")
    assert "is lost" not in made.log("south")


def test_an_invalid_number_of_rounds_is_refused(tmp_path):
    (tmp_path / "node.toml").write_text(
        'format = 1\nname = "north"\nserver = "localhost:1"\ndata = "data.npz"\nkept-rounds = 0\n'
    )
    with pytest.raises(BadInput, match="kept-rounds must be at least 1, got 0"):
        NodeFolder.open(tmp_path)
