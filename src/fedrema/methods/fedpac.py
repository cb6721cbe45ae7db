"""FedPAC: features are aligned to global prototypes; heads are combined by an estimate of bias and variance."""

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
    Phase,
    Reports,
    Role,
    State,
    Trace,
    Uploads,
    mix,
)
from fedrema.errors import at_least
from fedrema.methods.shared.prototypes import (
    Weighting,
    aligned_loss,
    class_means,
    client_prototypes,
    global_prototypes,
    initial_prototypes,
)
from fedrema.methods.shared.simplex import minimise_on_simplex
from fedrema.models.body_and_head import Net, Tensors
from fedrema.tasks import Task

NEGLIGIBLE = 1e-3
"""Smaller weights are treated as solver error and set to 0, as in the authors' code."""


@dataclass(frozen=True)
class FedPAC(Method):
    """Personalisation with feature alignment and classifier collaboration.

    A client trains its head for one epoch on the cross-entropy, then its body for E epochs on CE + λ · mean (1/d)‖h −
    c̄_y‖², where c̄ are the global prototypes; for a class without a global prototype, the client uses its own from
    before training. The server averages the bodies by sample counts. It sends client i the head Σ_j α_ij φ̂_j whose
    weights minimise an estimate of the client's expected loss, variance plus squared bias: αᵀ P⁽ⁱ⁾ α subject to Σ α =
    1, α ≥ 0, where P⁽ⁱ⁾ = diag(V) + D⁽ⁱ⁾ and D⁽ⁱ⁾_jl = Σ_c ⟨h_ic − h_jc, h_ic − h_lc⟩. With H the matrix of rows h_k
    and G = HHᵀ, D⁽ⁱ⁾_jl = G_ii − G_il − G_ij + G_jl, so the cost does not grow with the square of the number of
    features.

    h_kc = p_kc µ_kc and V_k are computed with the received body, before training. Clients are evaluated with the
    averaged body and their combined head; the accuracy directly after local training, which the authors also report, is
    recorded too. The authors reset the momentum in every round: `--no-keep-momentum`.
    """

    name: ClassVar[str] = "fedpac"
    title: ClassVar[str] = "FedPAC"
    paper: ClassVar[str] = (
        "Xu et al., Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023"
    )
    absence_revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#CC79A7",
        traces=(
            Trace(
                "own_weight",
                "own weight",
                percent=True,
                description="Mean weight of a client's own head in its new head.",
            ),
            Trace(
                "set_sizes",
                "number of peers",
                per_client=True,
                description="From how many clients each one learns, itself included: those with a weight above 0.",
            ),
            Trace(
                "feature_norm",
                "feature norm",
                description="Root mean square of the norms of the clients' features, with the body they received.",
            ),
            Trace("head_norm", "head norm", description="Mean norm of the heads that clients sent."),
        ),
        matrices=(
            Matrix(
                "weights",
                "Weights of classifiers",
                "weights",
                description="Weight of the classifier of a column's client in the new classifier of the row's client.",
            ),
        ),
    )

    align: float = option(1.0, joint=True)
    """λ: strength of the alignment of features with their class prototype; 0 disables alignment."""
    head_epochs: int = 1
    """Epochs of training the head before the body."""
    head_lr: float = 0.1
    """Learning rate of the head, not affected by --schedule (authors: 0.1); 0: that of the body, as in public code."""
    reset_head_momentum: bool = option(False, added=True)
    """Start each round's training of the head with zero momentum, as the authors do; more stable in a test with few
    samples that docs/reproduction.md describes."""
    weigh: Weighting = "samples"
    """Average prototypes by sample counts (authors) or with equal weights over the clients that have them (public
    code)."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "align", "head_epochs", "head_lr")

    def supports(self, task: Task) -> bool:
        """Support classes only: the weights of classifiers follow from statistics by class."""
        return task.has_softmax

    def role(self, net: Net, name: str) -> Role:
        """Send every parameter; each client receives its own head."""
        return Role.PERSONAL if net.in_head(name) else Role.SHARED

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute h_kc, V_k and the client's own prototypes with the received body."""
        features = net.features(client.params, data.x)
        means, counts = class_means(features, data, net.classes)
        share = counts / client.count  # p_kc
        weighted = share[:, None] * means  # h_kc = p_kc µ_kc
        mean_square = (features.square().sum(dim=1) * data.mask).sum() / client.count  # Σ_c p_kc E[‖f‖² | c]
        variance = (mean_square - weighted.square().sum()).clamp(min=0) / client.count  # V_k; negative by rounding only
        inbox = {"weighted": weighted, "variance": variance, "own": means, "held": (counts > 0).to(means)}
        return client.having(inbox={**client.inbox, **inbox})

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Train the head only, then the body only."""
        rate = local.rate(moment)
        head = Phase(self.head_epochs, self.head_lr or rate, local.momentum, trains=Net.in_head, loss=super().loss)
        return (
            replace(head, reset_momentum=self.reset_head_momentum),
            Phase(local.epochs, rate, local.momentum, trains=Net.in_body),
        )

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return CE + λ · mean (1/d)‖h − c̄_y‖², the second term from the second round on."""
        inbox = client.inbox
        if "prototypes" in inbox:
            prototypes = torch.where(inbox["known"][:, None] > 0, inbox["prototypes"], inbox["own"])
            known = torch.maximum(inbox["known"], inbox["held"])
            client = client.having(inbox={**inbox, "prototypes": prototypes, "known": known})
        return aligned_loss(net, client, batch, self.align)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send the statistics of the received body and, with alignment, the prototypes of the trained body."""
        statistics = {name: client.inbox[name] for name in ("weighted", "variance")}
        if not self.align:
            return client, statistics
        return client, {**client_prototypes(net, client, data), **statistics}

    def server(self, net: Net, clients: int) -> State:
        """Return the initial prototypes; they are kept for classes whose clients are absent in a round."""
        return initial_prototypes(net.classes, net.features_count) if self.align else {}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Return the mean body, the averaged prototypes and the combined heads."""
        prototypes = global_prototypes(state, uploads, self.weigh) if self.align else {}
        weights = combination_weights(uploads.extras["weighted"], uploads.extras["variance"]).to(uploads.counts)
        trace = {
            "own_weight": weights.diagonal().mean(),
            "set_sizes": (weights > 0).sum(dim=1),
            "feature_norm": feature_norm(uploads),
            "head_norm": torch.stack([value.flatten(1).square().sum(1) for value in uploads.params.values()])
            .sum(0)
            .sqrt()
            .mean(),
            "weights": weights,
        }
        return Answer(
            shared={**uploads.mean, **prototypes},
            personal=mix(uploads.params, weights),
            state={**prototypes},
            trace=trace,
        )


def feature_norm(uploads: Uploads) -> Tensor:
    """Return the root mean square of the norms of all clients' features: E‖f‖² of a client is n V + Σ_c ‖h_c‖²."""
    squares = uploads.counts * uploads.extras["variance"] + uploads.extras["weighted"].square().sum((1, 2))
    return ((uploads.counts * squares).sum() / uploads.counts.sum()).sqrt()


def combination_weights(weighted: Tensor, variance: Tensor) -> Tensor:
    """Return α [k, k] from h [k, C, d] and V [k]: row i minimises αᵀ (diag(V) + D⁽ⁱ⁾) α on the simplex.

    As Σ α = 1, αᵀ D⁽ⁱ⁾ α = G_ii − 2 Σ_j α_j G_ij + αᵀ G α: only the linear term differs between the clients. A client
    whose weights cannot be computed, because values are not finite, keeps its own head.
    """
    rows = weighted.flatten(1).double()
    rows = rows - rows.mean(dim=0)  # D⁽ⁱ⁾ contains differences only; smaller numbers lose fewer digits
    gram = rows @ rows.T  # G = HHᵀ
    quadratic = torch.diag(variance.double()) + gram
    found = minimise_on_simplex(quadratic.expand(len(gram), -1, -1), -gram)
    found = torch.where(found.isnan(), torch.eye(len(found)).to(found), found)
    negligible = min(NEGLIGIBLE, 0.1 / len(found))  # relative to 1/k, so that a row never becomes 0
    found = torch.where(found < negligible, 0.0, found)
    return found / found.sum(dim=1, keepdim=True)
