"""Peers for a part of the network each: its last layer, every layer, every class."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Answer, Moment, Role, State, Uploads, mix
from fedrema.core.similarity import draw_probes
from fedrema.methods.fedrema import maximum_difference_segmentation
from fedrema.models.body_and_head import Net, last_layer

from .common import Candidate, alike_in_learning, among_everyone


@dataclass(frozen=True)
class LastLayer(Candidate):
    """Layer by layer: peers share the last layer only, everything before it is global."""

    name: ClassVar[str] = "last-layer"
    title: ClassVar[str] = "last layer only"

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average all but the last layer over all."""
        weights, state, trace = self.match(net, state, uploads.params, uploads, moment)
        own = {name: uploads.params[name] for name in last_layer(net)}
        rest = {name: value for name, value in uploads.params.items() if name not in own}
        personal = {**mix(rest, among_everyone(uploads)), **mix(own, weights)}
        return Answer(dict(uploads.mean), personal, state, trace)


@dataclass(frozen=True)
class LayerWise(Candidate):
    """Layer by layer: each, of the body too, has peers of its own, by cosines between what that layer learned."""

    name: ClassVar[str] = "layer-wise"
    title: ClassVar[str] = "layer-wise peers"

    def role(self, net: Net, name: str) -> Role:
        """Everything travels, and comes back as one's own."""
        return Role.PERSONAL

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Cut at the largest gap for every layer."""
        layers: dict[str, dict[str, Tensor]] = {}
        for name, value in uploads.params.items():
            layers.setdefault(name.rpartition(".")[0], {})[name] = value
        personal: dict[str, Tensor] = {}
        for layer in layers.values():
            relevant, _ = maximum_difference_segmentation(alike_in_learning(layer))
            personal |= mix(layer, relevant * uploads.counts)
        return Answer({}, personal, state, {})


@dataclass(frozen=True)
class ClassWise(Candidate):
    """Class by class: each row of the last layer has peers of its own, whose chances of that class are alike."""

    name: ClassVar[str] = "class-wise"
    title: ClassVar[str] = "class-wise peers"
    probes: int = 64

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Cut at the largest gap for every class; all but the last layer is averaged over all."""
        heads = uploads.params
        probes = draw_probes(net, moment, self.probes, self.probe_high)[0]
        chances = torch.softmax(net.classify_all(heads, probes) / self.temperature, dim=-1)  # [k, probes, C]
        weight, bias = last_layer(net)
        rest = {name: value for name, value in heads.items() if name not in (weight, bias)}
        personal = mix(rest, among_everyone(uploads))
        rows: list[Tensor] = []
        shifts: list[Tensor] = []
        for c in range(net.classes):
            answers = functional.normalize(chances[..., c].log().clamp(min=-30), dim=1)
            relevant, _ = maximum_difference_segmentation(answers @ answers.T)
            mixed = mix({"w": heads[weight][:, c], "b": heads[bias][:, c]}, relevant * uploads.counts)
            rows.append(mixed["w"])
            shifts.append(mixed["b"])
        personal |= {weight: torch.stack(rows, dim=1), bias: torch.stack(shifts, dim=1)}
        return Answer(dict(uploads.mean), personal, state, {})
