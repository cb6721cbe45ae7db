"""FedKD: a mentor that stays, a mentee that travels, and compressed updates."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Answer, Batch, Client, Method, Moment, Reports, Role, State, Uploads, cross_entropy
from fedrema.errors import BadInput, above_zero
from fedrema.methods.shared.second_models import copied, copy_of, model_of
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedKD(Method):
    """Every client trains a private mentor and a shared mentee, which teach each other; only the mentee travels.

    Both minimise L = CE_m + CE_s + [KL(s‖m) + KL(m‖s) + 2 MSE(h_m, h_s)] / (CE_m + CE_s): the better both are, the more
    they listen to each other. KL is averaged over samples and classes, MSE over samples and features. Of each matrix
    of the mentee's update only the largest singular values are kept, the fewest whose squares exceed the share e_t of
    all, e_t rising from 0.95 to 0.98 in the course of the run; the server averages the updates by sample counts and
    compresses the mean in the same way. Clients are scored with the mentor; the mentee's accuracy is beside it.

    The authors' mentor is the larger network (12 layers, 4 for the mentee); here both have the network of the run,
    and begin alike. Bytes in the records are those of whole updates: `sent_share` in the trace says which share of the
    numbers the compressed ones hold.
    """

    name: ClassVar[str] = "fedkd"
    title: ClassVar[str] = "FedKD"
    paper: ClassVar[str] = (
        "Wu et al., Communication-efficient federated learning via knowledge distillation, Nature Communications 2022"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(colour="#E69F00", stroke="-.")

    energy_first: float = 0.95
    """e at the start: share of the squared singular values that is kept (authors: 0.95); 1 compresses nothing."""
    energy_last: float = 0.98
    """e in the last round (authors: 0.98)."""
    least_loss: float = 0.01
    """What teaching is divided by at least (ours): two networks that make no mistake would divide it by 0."""
    predict_by: Literal["mentor", "mentee"] = "mentor"
    """Which of the two networks answers."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        above_zero(self, "least_loss")
        for name in ("energy_first", "energy_last"):
            if not 0 < getattr(self, name) <= 1:
                raise BadInput(f"--{name.replace('_', '-')} must lie in (0, 1], got {getattr(self, name)}.")

    def energy(self, moment: Moment) -> float:
        """Return e_t."""
        progress = moment.round / max(moment.rounds, 1)
        return self.energy_first + (self.energy_last - self.energy_first) * progress

    def role(self, net: Net, name: str) -> Role:
        """Share the mentee only."""
        return Role.PRIVATE if name.startswith("mentor.") else Role.SHARED

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add the mentor."""
        return client.having(params={**client.params, **copied(client.params, "mentor")})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """CE_m + CE_s + [KL(s‖m) + KL(m‖s) + 2 MSE(h_m, h_s)] / (CE_m + CE_s)."""
        mentor = copy_of(client.params, "mentor")
        hidden = [net.features(params, batch.x) for params in (mentor, client.params)]
        outputs = [net.classify(params, h) for params, h in zip((mentor, client.params), hidden, strict=True)]
        own = cross_entropy(outputs[0], batch) + cross_entropy(outputs[1], batch)
        teacher, learner = (functional.log_softmax(logits, dim=1) for logits in outputs)
        # KL(s‖m) + KL(m‖s) = Σ_c (s_c − m_c) (log s_c − log m_c)
        divergence = ((learner.exp() - teacher.exp()) * (learner - teacher)).mean(dim=1)
        apart = divergence + 2 * (hidden[0] - hidden[1]).square().mean(dim=1)
        return own + (apart * batch.mask).sum() / batch.mask.sum().clamp(min=1) / own.clamp(min=self.least_loss)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Compress the mentee's update."""
        changes = {name: client.params[name] - client.received[name] for name in net.initial}
        kept, share = compressed(changes, self.energy(moment))
        sent = {name: client.received[name] + value for name, value in kept.items()}
        return client.having(params={**client.params, **sent}), {"sent_share": share}

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with the mentor."""
        return copy_of(client.params, "mentor") if self.predict_by == "mentor" else model_of(net, client.params)

    def beside(self) -> Mapping[str, Method]:
        """Record the mentee's accuracy too."""
        return {} if self.predict_by == "mentee" else {"mentee": replace(self, predict_by="mentee")}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Compress the mean update."""
        changes = {name: mean - uploads.before[name] for name, mean in uploads.mean.items()}
        kept, share = compressed(changes, self.energy(moment))
        shared = {name: uploads.before[name] + value for name, value in kept.items()}
        trace = {"sent_share": uploads.extras["sent_share"].mean(), "returned_share": share}
        return Answer(shared=shared, state=state, trace=trace)


def compressed(changes: Tensors, energy: float) -> tuple[Tensors, Tensor]:
    """Return each tensor with its largest singular values only, and which share of the numbers that takes to send.

    A convolution is a matrix with a row per output; vectors are sent whole, and so is a matrix that would not shrink.
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
    """Return a wide matrix with the fewest singular values whose squares sum to more than a share of all, and how many.

    They come from the small square matrix A Aᵀ, whose eigenvalues are their squares: far cheaper than from A itself.
    Without double precision, many small ones may keep the solver from converging.
    """
    precise = matrix.double()
    # Of what has diverged there are no singular values; it must get through to where that is reported.
    squares, directions = torch.linalg.eigh(torch.nan_to_num(precise @ precise.T, posinf=1.0))  # ascending
    squares = squares.clamp(min=0)
    larger = squares.flip(0).cumsum(0).flip(0) - squares  # what all larger ones sum to
    keep = (larger <= energy * squares.sum()).double()
    return ((directions * keep) @ (directions.T @ precise)).to(matrix), keep.sum().to(matrix)
