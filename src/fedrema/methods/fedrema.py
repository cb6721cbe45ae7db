"""FedReMa: a common body, and a head averaged with the most relevant peers."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.core import (
    Answer,
    Batch,
    Client,
    LocalTraining,
    Matrix,
    Method,
    Moment,
    Period,
    Phase,
    Reports,
    Role,
    State,
    Trace,
    Uploads,
    mix,
)
from fedrema.core.similarity import draw_probes, maximum_difference_segmentation, similarity_rows
from fedrema.errors import BadInput, above_zero, at_least
from fedrema.methods.shared.prototypes import Weighing, aligned_loss, global_prototypes, no_prototypes, own_prototypes
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedReMa(Method):
    """Personalised federated learning via the most relevant peers (Algorithms 1 and 2).

    The feature extractor is averaged over all clients (Eq. 6). While the critical co-learning period (CCP) lasts,
    each classifier is averaged with those whose answers to a random feature are most like its own (Eqs. 5 and 7),
    cut off at the largest gap (MDS, Algorithm 1); afterwards with the peers it chose most often (Eq. 10).

    The paper's extensions are settings: feature alignment (+F) is `align=1`, CE + λ · mean (1/d)‖h − c̄_y‖² with c̄ the
    global class prototypes, from the second round on; alternating training (+A) is `alternate=True`, E epochs of the
    head and then E of the body, twice the local work; with both (+A&F) alignment acts on the body's epochs.

    The defaults are what the paper says. Where its released code reads otherwise, a setting selects that reading:
    `probe_high=0.5, probe_per_client=True, peer_temperature=1.0, gap_to_self=False, include_below_gap=False,
    weigh="uniform", end_at_delta=False`.
    """

    name: ClassVar[str] = "fedrema"
    title: ClassVar[str] = "FedReMa"
    paper: ClassVar[str] = (
        "Liang et al., FedReMa: Improving Personalized Federated Learning via Leveraging the Most Relevant Clients,"
        " ECAI 2024"
    )
    reports: ClassVar[Reports] = Reports(
        colour="#D55E00",
        emphasis=1.7,
        traces=(
            Trace("mean_gap", "mean gap"),
            Trace("gap_ratio", "gap relative to its peak"),
            Trace("set_sizes", "relevant peers", per_client=True),
        ),
        period=Period("critical", "critical period", "critical", "by history", measure="gap_ratio", threshold="delta"),
        matrices=(
            Matrix("sets", "Relevant peers", "selection"),
            Matrix("G", "Who learns from whom", "counts", state="dependencies"),
        ),
    )

    delta: float = 0.5
    """δ: the critical period ends once the mean gap has fallen to this share of its peak."""
    temperature: float = 0.5
    """M: divides the logits before the softmax; smaller is sharper."""
    peer_temperature: float | None = None
    """Temperature of the peers' logits where it is not one's own (released code: 1.0)."""
    probes: int = 1
    """Random features per round; similarities are averaged over them."""
    probe_high: float = 1.0
    """Probes are drawn uniformly from [0, this) (released code: 0.5)."""
    probe_per_client: bool = False
    """Draw other probes for each client's row of similarities (released code) instead of the same for all."""
    gap_to_self: bool = True
    """Count the gap right below oneself; without it at least one peer is always chosen (released code)."""
    include_below_gap: bool = True
    """The client just below the largest gap still belongs to the set, as in Algorithm 1; not in the released code."""
    weigh: Weighing = "samples"
    """Average chosen heads (Eq. 7), and prototypes, by sample counts or equally (released code)."""
    end_at_delta: bool = True
    """A ratio of exactly δ ends the period (Eq. 9); in the released code it does not."""

    align: float = 0.0
    """λ of feature alignment (+F; the paper's is 1): draws features to their class's prototype; 0 switches it off."""
    alternate: bool = False
    """Alternating training (+A): the head for E epochs, then the body for E epochs, instead of both at once."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        if not 0 <= self.delta <= 1:
            raise BadInput(f"--delta must lie in [0, 1], got {self.delta}.")
        at_least(1, self, "probes")
        at_least(0, self, "align")
        above_zero(self, "temperature", "probe_high")
        if self.peer_temperature is not None:
            above_zero(self, "peer_temperature")

    def called(self) -> str:
        """Name the paper's variants as it does."""
        extensions = [letter for letter, on in (("A", self.alternate), ("F", self.align > 0)) if on]
        return f"{self.title}+{'&'.join(extensions)}" if extensions else self.title

    def role(self, net: Net, name: str) -> Role:
        """Everything travels; the head comes back as one's own."""
        return Role.PERSONAL if net.in_head(name) else Role.SHARED

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Train all at once, or (+A) the head and then the body."""
        training = Phase(local.epochs, local.rate(moment), local.momentum)
        if not self.alternate:
            return (training,)
        return replace(training, trains=Net.in_head, loss=super().loss), replace(training, trains=Net.in_body)

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Cross-entropy; with alignment (+F), + λ · mean (1/d)‖h − c̄_y‖²."""
        return aligned_loss(net, client, batch, self.align)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """With alignment, send the means of the trained features by class."""
        if not self.align:
            return client, {}
        return client, own_prototypes(net, client, data)

    def server(self, net: Net, clients: int) -> State:
        """Remember who chose whom how often (the dependency map G), and how far the period has come."""
        known = no_prototypes(net.classes, net.features_count) if self.align else {}
        # Sixteen bits count 32,767 critical rounds; with 10,000 clients G is then 200 MB.
        dependencies = torch.zeros(clients, clients, dtype=torch.int16)
        return {"dependencies": dependencies, "peak": 0.0, "critical": True, **known}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Lines 7 to 20 of Algorithm 2."""
        body, heads = uploads.mean, uploads.params  # θ ← Σ |D_i| θ̂_i / |D|  (Eq. 6)
        weights, state, trace = self.match(net, state, heads, uploads, moment)
        prototypes = global_prototypes(state, uploads, self.weigh) if self.align else {}
        return Answer({**body, **prototypes}, mix(heads, weights), {**state, **prototypes}, trace)

    def match(
        self, net: Net, state: State, heads: dict[str, Tensor], uploads: Uploads, moment: Moment
    ) -> tuple[Tensor, State, dict[str, object]]:
        """Return with which weight each client's head takes each other's [k, k], the new state, and the trace."""
        present = uploads.clients
        dependencies = torch.as_tensor(state["dependencies"])
        own_head = torch.eye(len(present), dtype=dependencies.dtype, device=dependencies.device)
        if len(present) < 2:
            return own_head, state, {"critical": state["critical"], "set_sizes": [1] * len(present)}

        if not state["critical"]:
            dependencies = self._introduce(net, dependencies, heads, uploads, moment)
            weights = _among(dependencies, present)  # φ_k ← Σ g_ki φ̂_i / Σ g_ki  (Eq. 10)
            weights = torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, own_head)
            trace = {"critical": False, "set_sizes": (weights > 0).sum(dim=1)}
            return weights, {**state, "dependencies": dependencies}, {**trace, "G": dependencies}

        relevant, gaps = self._relevant(net, heads, uploads, moment)  # S and A_k for each client
        count = uploads.counts if self.weigh == "samples" else torch.ones_like(uploads.counts)
        weights = relevant * count  # φ_k ← Σ_{i∈A_k} |D_i| φ̂_i / |D_{A_k}|  (Eq. 7)

        dependencies = dependencies.clone()
        if len(present) == len(dependencies):
            dependencies += relevant  # server counts G
        else:
            dependencies[present[:, None], present] += relevant.to(dependencies)
        mean_gap = float(gaps.mean())  # Δs̄  (Eq. 8)
        peak = max(float(state["peak"]), mean_gap)
        ratio = mean_gap / peak if peak > 0 else 1.0
        critical = ratio > self.delta or (ratio == self.delta and not self.end_at_delta)  # Eq. 9
        trace = {"mean_gap": mean_gap, "gap_ratio": ratio, "critical": True, "set_sizes": relevant.sum(dim=1)}
        state = {**state, "dependencies": dependencies, "peak": peak, "critical": critical}
        return weights, state, {**trace, "sets": relevant, "G": dependencies}

    def _relevant(self, net: Net, heads: dict[str, Tensor], uploads: Uploads, moment: Moment) -> tuple[Tensor, Tensor]:
        whose = uploads.names or tuple(str(client) for client in uploads.clients.tolist())
        names = whose if self.probe_per_client else ()
        probes = draw_probes(net, moment, self.probes, self.probe_high, names)
        sets: list[Tensor] = []
        gaps: list[Tensor] = []
        for rows in similarity_rows(net, heads, probes, self.temperature, self.peer_temperature):
            first = sum(map(len, sets))
            found = maximum_difference_segmentation(rows, self.gap_to_self, self.include_below_gap, first)
            sets.append(found[0])
            gaps.append(found[1])
        return torch.cat(sets), torch.cat(gaps)

    def _introduce(
        self, net: Net, dependencies: Tensor, heads: dict[str, Tensor], uploads: Uploads, moment: Moment
    ) -> Tensor:
        """Match clients that first appear after the critical period once, to give them a row of G."""
        present = uploads.clients
        newcomers = dependencies[present, present] == 0  # whoever was ever matched has chosen at least itself
        if not newcomers.any():
            return dependencies
        relevant, _ = self._relevant(net, heads, uploads, moment)
        dependencies = dependencies.clone()
        dependencies[present[newcomers][:, None], present] = relevant[newcomers].to(dependencies)
        return dependencies


def _among(matrix: Tensor, present: Tensor) -> Tensor:
    """Return the part of a matrix [K, K] that is among those present."""
    return matrix if len(present) == len(matrix) else matrix[present][:, present]
