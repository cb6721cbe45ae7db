"""The page of a deployment, whose server never sees a sample."""

import pytest

pytest.importorskip("flwr")

from fedrema.page.live_runs import LiveRuns
from tests.deploy.test_flower import Federated, node


def test_a_deployment_is_shown_while_it_runs_and_afterwards(tmp_path):
    def spoil(whose, reply):
        return None if whose == node(1) and reply.metadata.group_id == "1" else reply

    conductor = Federated(tmp_path, spoil=spoil).conductor()
    live = LiveRuns(tmp_path / "server")
    conductor.run.open()
    conductor._round()
    live.refresh()
    (run,) = live.part("main")["runs"]
    assert run["status"]["state"] == "running"
    conductor._round()  # a round's record is complete after the replies to the next round
    live.refresh()
    (run,) = live.part("main")["runs"]
    assert (run["status"]["done"], run["status"]["rounds"], run["status"]["state"]) == (1, 3, "running")
    assert run["status"]["failed"][0].startswith("1 (no reply")
    (clients,) = live.part("clients")["runs"]
    assert clients["labels"] is None
    (pairs,) = live.part("relations")["runs"]
    assert (pairs["rounds"], sorted(pairs["clients"])) == ([2], [0, 1, 2, 3])
    conductor._round()
    conductor.run.finish({})
    live.refresh()
    (run,) = live.part("main")["runs"]
    assert (run["status"]["done"], run["status"]["state"]) == (3, "finished")
    assert run["true_groups"] is None
    assert not (tmp_path / "server" / "running.json").exists()
