"""FedKD: a private mentor and a shared mentee distil from each other; updates are compressed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import (
    Alternative,
    Answer,
    Batch,
    Client,
    Method,
    Moment,
    Reports,
    Role,
    State,
    Trace,
    Uploads,
    task_loss,
)
from fedrema.errors import BadInput, above_zero
from fedrema.methods.shared.second_models import copied, copy_of, network_tensors
from fedrema.models.body_and_head import Net, Tensors
from fedrema.tasks import Task


@dataclass(frozen=True)
class FedKD(Method):
    """Each client trains a private mentor m and a shared mentee s that distil from each other; the mentee is sent.

    Both minimise L = CE_m + CE_s + [KL(s‖m) + KL(m‖s) + 2 MSE(h_m, h_s)] / (CE_m + CE_s): the smaller their losses, the
    larger the weight of distillation. KL is averaged over samples and classes, MSE over samples and features. Each
    matrix of the mentee's update is reduced to its largest singular values: the smallest number whose squares exceed
    the share e_t of the total, where e_t increases from 0.95 to 0.98 over the run. The server averages the updates by
    sample counts and compresses the mean in the same way. Clients are evaluated with the mentor; the accuracy of the
    mentee is recorded too.

    The authors' mentor is the larger network (12 layers; the mentee has 4); here both use the network of the run and
    have the same initial parameters. The recorded bytes are those of uncompressed updates; `sent_share` in the trace is
    the compressed share.
    """

    name: ClassVar[str] = "fedkd"
    title: ClassVar[str] = "FedKD"
    paper: ClassVar[str] = (
        "Wu et al., Communication-efficient federated learning via knowledge distillation, Nature Communications 2022"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#E69F00",
        stroke="-.",
        traces=(
            Trace(
                "sent_share",
                "sent part of an update",
                percent=True,
                description="Share of the numbers of an update that a client sends after compression.",
            ),
            Trace(
                "returned_share",
                "returned part of an update",
                percent=True,
                description="Share of the numbers of the mean update that the server sends after compression.",
            ),
        ),
        alternatives=(Alternative("mentee", "mentee"),),
    )

    energy_first: float = 0.95
    """e at the start: share of the sum of squared singular values that is kept (authors: 0.95); 1 disables
    compression."""
    energy_last: float = 0.98
    """e in the last round (authors: 0.98)."""
    least_loss: float = 1.0
    """Lower bound of the divisor CE_m + CE_s (ours), so that distillation has at most the weight 1. The authors have no
    bound; 0.01, which the leaderboard uses, is close to that."""
    predict_by: Literal["mentor", "mentee"] = "mentor"
    """Which of the two networks predicts."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        above_zero(self, "least_loss")
        for name in ("energy_first", "energy_last"):
            if not 0 < getattr(self, name) <= 1:
                raise BadInput(f"--{name.replace('_', '-')} must be in (0, 1], got {getattr(self, name)}.")

    def supports(self, task: Task) -> bool:
        """Support classes only: the networks exchange soft predictions."""
        return task.has_softmax

    def energy(self, moment: Moment) -> float:
        """Return e_t."""
        progress = moment.round / max(moment.rounds, 1)
        return self.energy_first + (self.energy_last - self.energy_first) * progress

    def role(self, net: Net, name: str) -> Role:
        """Share the mentee only."""
        return Role.PRIVATE if name.startswith("mentor.") else Role.SHARED

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Initialise the mentor as a copy of the mentee."""
        return client.having(params={**client.params, **copied(client.params, "mentor")})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return CE_m + CE_s + [KL(s‖m) + KL(m‖s) + 2 MSE(h_m, h_s)] / (CE_m + CE_s)."""
        mentor = copy_of(client.params, "mentor")
        features = [net.features(params, batch.x) for params in (mentor, client.params)]
        outputs = [net.classify(params, h) for params, h in zip((mentor, client.params), features, strict=True)]
        losses = task_loss(net, outputs[0], batch) + task_loss(net, outputs[1], batch)
        log_mentor, log_mentee = (functional.log_softmax(logits, dim=1) for logits in outputs)
        # KL(s‖m) + KL(m‖s) = Σ_c (s_c − m_c) (log s_c − log m_c)
        divergence = ((log_mentee.exp() - log_mentor.exp()) * (log_mentee - log_mentor)).mean(dim=1)
        distances = divergence + 2 * (features[0] - features[1]).square().mean(dim=1)
        distillation = (distances * batch.mask).sum() / batch.mask.sum().clamp(min=1)
        return losses + distillation / losses.clamp(min=self.least_loss)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Compress the mentee's update."""
        changes = {name: client.params[name] - client.received[name] for name in net.initial}
        kept, share = compress(changes, self.energy(moment))
        sent = {name: client.received[name] + value for name, value in kept.items()}
        return client.having(params={**client.params, **sent}), {"sent_share": share}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return the mentor, or the mentee with `predict_by="mentee"`."""
        return copy_of(client.params, "mentor") if self.predict_by == "mentor" else network_tensors(net, client.params)

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy of the mentee."""
        return {} if self.predict_by == "mentee" else {"mentee": replace(self, predict_by="mentee")}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Compress the mean update."""
        changes = {name: mean - uploads.before[name] for name, mean in uploads.mean.items()}
        kept, share = compress(changes, self.energy(moment))
        shared = {name: uploads.before[name] + value for name, value in kept.items()}
        trace = {"sent_share": uploads.extras["sent_share"].mean(), "returned_share": share}
        return Answer(shared=shared, state=state, trace=trace)


def compress(changes: Tensors, energy: float) -> tuple[Tensors, Tensor]:
    """Return each tensor with its largest singular values only, and the share of numbers that is sent.

    A convolution is a matrix with one row per output channel. Vectors, and matrices that would not shrink, are sent
    uncompressed.
    """
    kept, sent, total = {}, [], 0
    for name, value in changes.items():
        total += value.numel()
        if value.dim() < 2 or energy >= 1:
            kept[name] = value
            sent.append(value.new_full((), value.numel()))
            continue
        matrix = value.flatten(1)
        rows, columns = matrix.shape
        low, rank = low_rank(matrix if rows <= columns else matrix.T, energy)
        kept[name] = (low if rows <= columns else low.T).reshape(value.shape)
        sent.append((rank * (rows + columns)).clamp(max=value.numel()))
    return kept, sum(sent[1:], start=sent[0]) / total


def low_rank(matrix: Tensor, energy: float) -> tuple[Tensor, Tensor]:
    """Reduce a wide matrix A to its largest singular values, and return their number.

    Keeps the fewest whose squares sum to more than the share `energy` of all. They are computed from the small square
    matrix A Aᵀ, whose eigenvalues are their squares; this is much cheaper than an SVD of A. In single precision, many
    small eigenvalues may keep the solver from converging.
    """
    precise = matrix.double()
    # A diverged matrix has no singular values; it must not fail here but where divergence is reported.
    squares, directions = torch.linalg.eigh(torch.nan_to_num(precise @ precise.T, posinf=1.0))  # ascending
    squares = squares.clamp(min=0)
    larger = squares.flip(0).cumsum(0).flip(0) - squares  # sum of all larger ones
    keep = (larger <= energy * squares.sum()).double()
    return ((directions * keep) @ (directions.T @ precise)).to(matrix), keep.sum().to(matrix)
