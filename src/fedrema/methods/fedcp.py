"""FedCP: a policy divides the features of each sample between a global and a personal head."""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Batch, Client, Method, Moment, Reports, Role, task_loss
from fedrema.errors import BadInput, at_least
from fedrema.methods.shared.layers import linear_layer
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)
"""a: widths of the kernels e^{−‖x − y‖²/(2a)} whose sum compares features (authors)."""


@dataclass(frozen=True)
class FedCP(Method):
    """Conditional policy: outputs are φ_k(s ⊙ h) + φ_g((1 − s) ⊙ h), with s in [0, 1] for each feature and sample.

    The policy computes s from the features h and from the client's own head: s = softmax over two of ReLU(LayerNorm(A(h
    ⊙ v_k) + a)), with v_k the sum over classes of the weights of φ_k, scaled to length 1. If the head has several
    layers, their weights are multiplied. A client trains the body θ, the policy and its personal head φ_k; the global
    head φ_g and v_k are constant during a round. The loss is F_k + λ MMD(h, h_g): the features h of a batch must not
    move far from h_g, those of the received body. MMD is the maximum mean discrepancy with Gaussian kernels.

    After training, a client sends θ, the policy, and ½(φ_k + φ_g) as its contribution to the global head; the server
    averages them by sample counts. φ_k is private. Clients are evaluated with the averages and their φ_k.

    The authors' code adds Gumbel noise to the policy, also in evaluation, and starts with a random v_k; here there is
    no noise, as in the paper's equations, and v_k follows from the head from the first round on.
    """

    name: ClassVar[str] = "fedcp"
    title: ClassVar[str] = "FedCP"
    paper: ClassVar[str] = (
        "Zhang et al., FedCP: Separating Feature Information for Personalized Federated Learning via Conditional"
        " Policy, KDD 2023"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(colour="#44AA99", stroke="--")

    align: float = 1.0
    """λ: strength of the alignment of features with those of the received body (authors: 5, with a learning rate of
    0.005 and no momentum); 0 disables it."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "align")

    def role(self, net: Net, name: str) -> Role:
        """Share everything except the personal head."""
        return Role.PRIVATE if name.startswith("personal.") else Role.SHARED

    def trains(self, net: Net, name: str) -> bool:
        """Exclude the global head."""
        return net.trains(name) and not net.in_head(name)

    def clip_group(self, net: Net, name: str) -> str:
        """Clip all parameters by one norm: the personal head is a part of the only model, not a second model."""
        return ""

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add the personal head, a copy of the global one, and the policy, identical for all clients."""
        head = {name: value for name, value in client.params.items() if net.in_head(name)}
        width, like = net.features_count, client.count
        policy = {
            **linear_layer("policy", width, 2 * width, moment, like),
            "policy.scale": like.new_ones(2 * width),
            "policy.offset": like.new_zeros(2 * width),
        }
        head_weights(net, copied(head, "personal"))  # raises an error if the head has none
        return client.having(params={**client.params, **copied(head, "personal"), **policy})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k + λ MMD(h, h_g)."""
        features = net.features(client.params, batch.x)
        loss = task_loss(net, outputs(net, client.params, client.received, features), batch)
        if not self.align:
            return loss
        received = net.features(client.received, batch.x).detach()
        return loss + self.align * mean_discrepancy(features, received, batch.mask)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Set the global head to ½(φ_k + φ_g)."""
        own = copy_of(client.params, "personal")
        mixed = {name: (value + client.params[name]) / 2 for name, value in own.items()}
        return client.having(params={**client.params, **mixed}), {}

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return φ_k(s ⊙ h) + φ_g((1 − s) ⊙ h)."""
        return outputs(net, client.params, client.params, net.features(client.params, x))


def outputs(net: Net, params: Tensors, before: Tensors, features: Tensor) -> Tensor:
    """Return φ_k(s ⊙ h) + φ_g((1 − s) ⊙ h), where v_k follows from the personal head in `before`."""
    direction = functional.normalize(head_weights(net, before).sum(dim=0), dim=0)
    hidden = features * direction @ params["policy.weight"].T + params["policy.bias"]
    hidden = functional.layer_norm(hidden, hidden.shape[1:], params["policy.scale"], params["policy.offset"])
    own, common = (features * share for share in torch.stack(hidden.relu().chunk(2, dim=1)).softmax(dim=0))
    return net.classify(copy_of(params, "personal"), own) + net.classify(params, common)


def head_weights(net: Net, params: Tensors) -> Tensor:
    """Return the product [C, d] of the weights of the personal head's layers."""
    weights = [value for value in copy_of(params, "personal").values() if value.dim() == 2]
    fits = bool(weights) and weights[0].shape[1] == net.features_count
    if not fits or any(after.shape[1] != before.shape[0] for before, after in itertools.pairwise(weights)):
        raise BadInput("FedCP needs a network whose head consists of linear layers.")
    product = weights[0]
    for weight in weights[1:]:
        product = weight @ product
    return product


def mean_discrepancy(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """Return the squared MMD between two sets of features [n, d], summed over `BANDWIDTHS`; padding does not count."""
    pairs = mask[:, None] * mask

    def mean_kernel(one: Tensor, other: Tensor) -> Tensor:
        squares = one.square().sum(dim=1)[:, None] + other.square().sum(dim=1) - 2 * one @ other.T
        kernel = torch.stack([(-squares / (2 * width)).exp() for width in BANDWIDTHS]).sum(dim=0)
        return (kernel * pairs).sum() / pairs.sum().clamp(min=1)

    return mean_kernel(first, first) + mean_kernel(second, second) - 2 * mean_kernel(first, second)
