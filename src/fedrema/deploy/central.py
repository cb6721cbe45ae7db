"""The central server: what it knows of each client by name, and what it makes of their replies."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedrema.core import Role
from fedrema.data import Federation
from fedrema.deploy.letters import Letter, Reply, Score
from fedrema.deploy.node import Node
from fedrema.engine import Stacked
from fedrema.engine.threads import torch_threads
from fedrema.errors import BadInput
from fedrema.harvest import Harvest
from fedrema.net import Tensors
from fedrema.score import accuracy_record, share
from fedrema.settings import Settings
from fedrema.simulate import plain_trace
from fedrema.world import World, on_device

ABSURD = 100.0
"""A reply whose change is this many times as long as that of the median client is not believed."""
ENOUGH_TO_COMPARE = 3


@dataclass
class Registry:
    """Which client has which row, for ever; and in which round its reply last counted."""

    names: list[str] = field(default_factory=list)
    accepted: dict[str, int] = field(default_factory=dict)
    founders: int = 0
    """How many of the names were there in the first round."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many training samples a client had when it joined."""
    tests: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many test samples it had then, in both halves."""

    def row(self, name: str) -> int:
        """Return a client's row; a new one gets the next."""
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


class Central:
    """Plays the server's part of a method, round by round, for clients that it knows by name."""

    def __init__(self, settings: Settings, shape: tuple[int, ...], classes: int, capacity: int) -> None:
        self.method, self.capacity = settings.method, capacity
        # A client of no importance: it knows the names and shapes of everything that will travel.
        nobody = Node(settings, _nobody(shape, classes))
        self.simulator = nobody.simulator
        self.net, begun = self.simulator.net, nobody.worlds[0]
        self.roles = {
            name: role for name, role in self.simulator.roles(begun.params).items() if role is not Role.PRIVATE
        }
        own = {
            name: value.expand(capacity, *value.shape[1:]).clone()
            for name, value in begun.params.own.items()
            if name in self.roles
        }
        server = on_device(self.method.server(self.net, capacity), self.simulator.device)
        self.world = World(capacity, 0, Stacked(own, dict(begun.params.common)), {}, Stacked(), {}, server)
        self.registry = Registry()
        self.expected = nobody.answer(self._letter(0, 0, 1))

    @property
    def round(self) -> int:
        """The last round that has been closed."""
        return self.world.round

    def letter(self, name: str, train: bool = True) -> Letter:
        """Return what a client needs for the next round."""
        row = self.registry.row(name)
        if row >= self.capacity:
            raise BadInput(f"Client {name!r} cannot join: --most-clients {self.capacity} are there already.")
        return self._letter(row, self.registry.accepted.get(name, 0), self.round + 1, train)

    def _letter(self, row: int, accepted: int, number: int, train: bool = True) -> Letter:
        world = self.world
        own = {name: value[row].cpu() for name, value in world.params.own.items()} if accepted else {}
        common = {name: value.cpu() for name, value in world.params.common.items()}
        mail = {name: value.cpu() for name, value in world.inbox.common.items()}
        own_mail = {name: value[row].cpu() for name, value in world.inbox.own.items()}
        late = number > 1 and not accepted and row >= self.registry.founders
        return Letter(number, accepted, common, own, mail, own_mail, train, late)

    def close(self, replies: Mapping[str, Reply], least: int = 1) -> dict[str, Any]:
        """Close a round with the replies that have come; returns its record, with who was rejected and why.

        With fewer than `least` usable replies the round stays open and nothing changes.
        """
        number = self.round + 1
        rejected = {name: why for name, reply in replies.items() if (why := self._fault(reply, number))}
        good = {name: reply for name, reply in replies.items() if name not in rejected}
        rejected |= dict.fromkeys(self._absurd(good), "its change is absurdly large")
        good = {name: reply for name, reply in good.items() if name not in rejected}
        record: dict[str, Any] = {"round": number, "participants": [], "rejected": rejected}
        if len(good) >= max(1, least):
            names = sorted(good, key=self.registry.row)
            with torch_threads(self.simulator.threads):
                self._learn(names, [good[name] for name in names], number, record)
            self.registry.accepted |= dict.fromkeys(names, number)
            if number == 1:
                self.registry.founders = len(self.registry.names)
            for name in names:
                self.registry.counts.setdefault(name, good[name].count)
                if (score := good[name].received) is not None:
                    self.registry.tests.setdefault(name, score.asked)
            self.world.round = number
        return record

    def _learn(self, names: list[str], replies: list[Reply], number: int, record: dict[str, Any]) -> None:
        simulator, moment = self.simulator, self.simulator.moment(number)
        rows = torch.tensor([self.registry.row(name) for name in names])
        counts = torch.tensor([reply.count for reply in replies], device=simulator.device, dtype=simulator.dtype)

        def stacked(group: str) -> Tensors:
            found = getattr(replies[0], group)
            return {
                name: torch.stack([getattr(one, group)[name] for one in replies]).to(counts.device) for name in found
            }

        params = stacked("params")
        harvest = Harvest(rows, counts, simulator.shelf, keep_heads=False)
        shared = {name: value for name, value in params.items() if self.roles[name] is Role.SHARED}
        harvest.mean.add(shared, harvest.weights)
        harvest.seen.put(0, {name: value for name, value in params.items() if name not in shared})
        harvest.extras.put(0, stacked("extras"))
        harvest.names += names
        uploads = replace(harvest.uploads(), everyone=len(self.registry.names))  # there may be room for more
        answer = simulator.answer_to(uploads, self.world, self.roles, {}, moment)
        self.world.hand_out(harvest, self.roles, answer)
        record["participants"] = rows.tolist()
        losses = [reply.loss for reply in replies if reply.loss is not None]
        record |= {"loss": float(np.mean(losses))} if losses else {}
        trained = [reply.trained for reply in replies if reply.trained is not None]
        if trained:
            asked = sum(sum(score.asked) for score in trained)
            record["trained_accuracy"] = share(sum(sum(score.correct) for score in trained), asked)
        spent = {name: reply.epsilon for name, reply in zip(names, replies, strict=True) if reply.epsilon is not None}
        record |= {"epsilon": spent} if spent else {}
        record["trace"] = plain_trace(answer)

    def _fault(self, reply: Reply, number: int) -> str:
        """Say what is wrong with a reply; empty where nothing is."""
        if reply.round != number:
            return f"it is for round {reply.round}, and this is round {number}"
        if reply.count < 1:
            return f"it says that it trained on {reply.count} samples"
        for group in ("params", "extras"):
            found, expected = getattr(reply, group), getattr(self.expected, group)
            if found.keys() != expected.keys():
                odd = sorted(found.keys() ^ expected.keys())[0]
                return f"{odd!r} is {'missing' if odd in expected else 'not expected'}"
            for name, value in found.items():
                if value.shape != expected[name].shape:
                    return f"{name!r} has shape {tuple(value.shape)} instead of {tuple(expected[name].shape)}"
                if value.dtype != expected[name].dtype:
                    return f"{name!r} holds {value.dtype} instead of {expected[name].dtype}"
                if not torch.isfinite(value).all():
                    return f"{name!r} is not finite"
        return ""

    def _absurd(self, replies: Mapping[str, Reply]) -> list[str]:
        """Return who sends parameters that lie far further from the common ones than other clients' do."""
        if len(replies) < ENOUGH_TO_COMPARE:
            return []
        common = self.world.params.common
        lengths = {}
        for name, reply in replies.items():
            changes = [value.to(common[key]) - common[key] for key, value in reply.params.items() if key in common]
            lengths[name] = float(sum(change.double().square().sum() for change in changes)) ** 0.5
        usual = float(np.median(list(lengths.values())))
        return [name for name, length in lengths.items() if usual > 0 and length > ABSURD * usual]

    def accuracies(self, scores: Mapping[str, Score | None]) -> dict[str, Any]:
        """Return a round's accuracies from what clients counted."""
        known = {name: score for name, score in scores.items() if score is not None}
        names = sorted(known, key=self.registry.row)
        correct, asked = (
            np.array([getattr(known[name], part) for name in names]).reshape(-1, 2) for part in ("correct", "asked")
        )
        return accuracy_record(correct, asked, [self.registry.row(name) for name in names], len(self.registry.names))


def _nobody(shape: tuple[int, ...], classes: int) -> Federation:
    samples = np.zeros((3, *shape), np.float32)  # two to train on: some layers refuse to look at one
    return Federation.from_arrays(samples, [0] * 3, ["nobody"] * 3, [False, False, True], classes=classes)
