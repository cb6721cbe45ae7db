"""FedReMa: a shared body, and a head averaged with those of the most relevant clients."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.base.options import option
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
from fedrema.methods.shared.prototypes import (
    Weighting,
    aligned_loss,
    client_prototypes,
    global_prototypes,
    initial_prototypes,
)
from fedrema.models.body_and_head import Net, Tensors
from fedrema.tasks import Task


@dataclass(frozen=True)
class FedReMa(Method):
    """Personalised federated learning via the most relevant clients (Algorithms 1 and 2).

    The feature extractor is averaged over all clients (Eq. 6). During the critical co-learning period (CCP), each
    classifier is averaged with those whose soft predictions for a random feature are most similar to its own (Eqs. 5
    and 7); the ranking is cut at its largest gap (MDS, Algorithm 1). After the CCP, each peer
    is weighted by the number of rounds in which the client selected it (Eq. 10).

    The paper's extensions are settings. Feature alignment (+F) is `align=1`: CE + λ · mean (1/d)‖h − c̄_y‖² with c̄ the
    global class prototypes, from the second round on. Alternating training (+A) is `alternate=True`: E epochs of the
    head and then E of the body, twice the local work. With both (+A&F), alignment applies to the body's epochs.

    The paper compares classifiers. Our extension to other tasks also takes cosines between predictive distributions
    for random features at temperature M: distributions over levels (ordinal); two-class distributions, averaged over
    labels (multi-label); and for quantities and counts the normal density with mean φ(h̃) and variance M, whose cosine
    is exp(−(φ_i(h̃) − φ_j(h̃))² / 4M); φ(h̃) is in standard deviations of the quantity, or the logarithm of the rate.

    The defaults follow the paper. Where its released code differs, a setting selects that behaviour: `probe_high=0.5,
    probe_per_client=True, peer_temperature=1.0, gap_to_self=False, include_below_gap=False, weigh="uniform",
    end_at_delta=False`.
    """

    name: ClassVar[str] = "fedrema"
    title: ClassVar[str] = "FedReMa"
    paper: ClassVar[str] = (
        "Liang et al., FedReMa: Improving Personalized Federated Learning via Leveraging the Most Relevant Clients,"
        " ECAI 2024"
    )
    absence_revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#D55E00",
        emphasis=1.7,
        traces=(
            Trace("mean_gap", "mean gap"),
            Trace("gap_ratio", "gap relative to its peak", percent=True),
            Trace(
                "set_sizes",
                "number of peers",
                per_client=True,
                description="Number of clients, including itself, whose classifiers are averaged for each client. After"
                " the critical period, a client keeps every peer that it has ever chosen, weighted by how often.",
            ),
        ),
        period=Period(
            "critical",
            "critical period",
            "critical",
            "fixed peers",
            measure="gap_ratio",
            threshold="delta",
            description="At first, the gap between the similarities of relevant and other peers is wide. As training"
            " proceeds, all classifiers become similar and the gap closes. The critical period ends when the gap falls"
            " to the share δ of its peak: no new peers are chosen, and the gap is no longer measured.",
        ),
        matrices=(
            Matrix(
                "sets", "Chosen peers", "selection", description="Peers that the client of a row chose in this round."
            ),
            Matrix(
                "G",
                "Dependency map",
                "counts",
                state="dependencies",
                description="How often the client of a row has chosen the client of a column. After the critical"
                " period, these counts are the weights with which classifiers are averaged.",
            ),
        ),
    )

    delta: float = option(0.5, joint=True)
    """δ: the critical period ends when the mean gap has decreased to this share of its maximum."""
    temperature: float = 0.5
    """M: divides the logits before the softmax; a smaller value gives sharper predictions."""
    peer_temperature: float | None = None
    """Temperature of the peers' logits (released code: 1.0); default: the same as --temperature."""
    probes: int = 1
    """Number of random features per round; similarities are averaged over them. Tasks without a softmax use at least
    16."""
    probe_high: float = 1.0
    """Upper bound of the uniform distribution [0, bound) of the random features (released code: 0.5)."""
    probe_per_client: bool = False
    """Draw separate random features for each client, as the released code does, instead of the same for all."""
    gap_to_self: bool = True
    """Include the gap between the client itself and its nearest peer; if off, at least one peer is always selected
    (released code)."""
    include_below_gap: bool = True
    """Select the client just below the largest gap too, as in Algorithm 1; the released code does not."""
    weigh: Weighting = "samples"
    """Average the selected heads (Eq. 7) and the prototypes by sample counts, or with equal weights (released code)."""
    end_at_delta: bool = True
    """End the period also at a ratio of exactly δ (Eq. 9); the released code does not."""

    align: float = 0.0
    """λ: strength of feature alignment with class prototypes (+F; paper: 1); 0 disables it."""
    alternate: bool = False
    """Alternating training (+A): the head for E epochs, then the body for E epochs, instead of both jointly."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        if not 0 <= self.delta <= 1:
            raise BadInput(f"--delta must be in [0, 1], got {self.delta}.")
        at_least(1, self, "probes")
        at_least(0, self, "align")
        above_zero(self, "temperature", "probe_high")
        if self.peer_temperature is not None:
            above_zero(self, "peer_temperature")

    def supports(self, task: Task) -> bool:
        """Support every task; feature alignment (+F) needs classes."""
        return task.has_softmax or not self.align

    def called(self) -> str:
        """Return the title with the paper's name of the variant."""
        extensions = [letter for letter, on in (("A", self.alternate), ("F", self.align > 0)) if on]
        return f"{self.title}+{'&'.join(extensions)}" if extensions else self.title

    def role(self, net: Net, name: str) -> Role:
        """Send every parameter; each client receives its own head."""
        return Role.PERSONAL if net.in_head(name) else Role.SHARED

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Train all parameters jointly, or (+A) the head and then the body."""
        training = Phase(local.epochs, local.rate(moment), local.momentum)
        if not self.alternate:
            return (training,)
        return replace(training, trains=Net.in_head, loss=super().loss), replace(training, trains=Net.in_body)

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return the cross-entropy; with alignment (+F), + λ · mean (1/d)‖h − c̄_y‖²."""
        return aligned_loss(net, client, batch, self.align)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """With alignment, send the mean features by class after training."""
        if not self.align:
            return client, {}
        return client, client_prototypes(net, client, data)

    def server(self, net: Net, clients: int) -> State:
        """Return the initial state: the dependency map G (who selected whom how often) and the progress of the CCP."""
        known = initial_prototypes(net.classes, net.features_count) if self.align else {}
        # 16-bit counts suffice for 32,767 critical rounds; with 10,000 clients G takes 200 MB.
        dependencies = torch.zeros(clients, clients, dtype=torch.int16)
        return {"dependencies": dependencies, "peak": 0.0, "critical": True, **known}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Compute lines 7 to 20 of Algorithm 2."""
        body, heads = uploads.mean, uploads.params  # θ ← Σ |D_i| θ̂_i / |D|  (Eq. 6)
        weights, state, trace = self.match(net, state, heads, uploads, moment)
        prototypes = global_prototypes(state, uploads, self.weigh) if self.align else {}
        return Answer({**body, **prototypes}, mix(heads, weights), {**state, **prototypes}, trace)

    def match(
        self, net: Net, state: State, heads: dict[str, Tensor], uploads: Uploads, moment: Moment
    ) -> tuple[Tensor, State, dict[str, object]]:
        """Return the weight of each client's head in each other's average [k, k], the new state, and the trace."""
        present = uploads.clients
        dependencies = torch.as_tensor(state["dependencies"])
        identity = torch.eye(len(present), dtype=dependencies.dtype, device=dependencies.device)
        if len(present) < 2:
            return identity, state, {"critical": state["critical"], "set_sizes": [1] * len(present)}

        if not state["critical"]:
            dependencies = self._match_new_clients(net, dependencies, heads, uploads, moment)
            weights = _submatrix(dependencies, present)  # φ_k ← Σ g_ki φ̂_i / Σ g_ki  (Eq. 10)
            weights = torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, identity)
            trace = {"critical": False, "set_sizes": (weights > 0).sum(dim=1)}
            return weights, {**state, "dependencies": dependencies}, {**trace, "G": dependencies}

        relevant, gaps = self._relevant(net, heads, uploads, moment)  # A_k of each client, from S
        count = uploads.counts if self.weigh == "samples" else torch.ones_like(uploads.counts)
        weights = relevant * count  # φ_k ← Σ_{i∈A_k} |D_i| φ̂_i / |D_{A_k}|  (Eq. 7)

        dependencies = dependencies.clone()
        if len(present) == len(dependencies):
            dependencies += relevant  # the server updates G
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
        """Return the sets of relevant clients A_k [k, k] and the largest gaps Δs* [k], from the similarities S."""
        names = uploads.names or tuple(str(client) for client in uploads.clients.tolist())
        probes = draw_probes(net, moment, self.probes, self.probe_high, names if self.probe_per_client else ())
        sets: list[Tensor] = []
        gaps: list[Tensor] = []
        for rows in similarity_rows(net, heads, probes, self.temperature, self.peer_temperature):
            first = sum(map(len, sets))
            found = maximum_difference_segmentation(rows, self.gap_to_self, self.include_below_gap, first)
            sets.append(found[0])
            gaps.append(found[1])
        return torch.cat(sets), torch.cat(gaps)

    def _match_new_clients(
        self, net: Net, dependencies: Tensor, heads: dict[str, Tensor], uploads: Uploads, moment: Moment
    ) -> Tensor:
        """Match clients that first participate after the critical period once, to initialise their rows of G."""
        present = uploads.clients
        new = dependencies[present, present] == 0  # a matched client has selected at least itself
        if not new.any():
            return dependencies
        relevant, _ = self._relevant(net, heads, uploads, moment)
        dependencies = dependencies.clone()
        dependencies[present[new][:, None], present] = relevant[new].to(dependencies)
        return dependencies


def _submatrix(matrix: Tensor, present: Tensor) -> Tensor:
    """Return the rows and columns of a matrix [K, K] for the clients that are present."""
    return matrix if len(present) == len(matrix) else matrix[present][:, present]
