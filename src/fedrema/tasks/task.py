"""Tasks: what a network's outputs mean, the loss that trains them, and how predictions are made from them."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

TaskName = Literal["multiclass", "binary", "multilabel", "ordinal", "regression", "count"]
LossName = Literal["squared", "absolute", "huber"]
TASKS: tuple[str, ...] = get_args(TaskName)
LOSSES: tuple[str, ...] = get_args(LossName)
CLASSIFICATION = frozenset({"multiclass", "binary"})
"""Tasks whose outputs are the logits of a softmax over classes."""


@dataclass(frozen=True)
class Task:
    """What clients predict.

    | task | target | outputs | loss |
    |---|---|---|---|
    | multiclass, binary | a class | a logit per class | cross-entropy |
    | multilabel | 0 or 1 for each label | a logit per label | binary cross-entropy, averaged over labels |
    | ordinal | a level 0 < 1 < … | levels − 1 logits of P(y > j given y ≥ j) | negative log-likelihood |
    | regression | a quantity | the quantity, standardised | squared, absolute or Huber |
    | count | a number of events | the logarithm of the rate relative to the mean | Poisson |
    """

    name: TaskName = "multiclass"
    classes: int = 1
    """Number of classes, levels or labels; 1 for quantities and counts."""
    centre: float = 0.0
    """Mean of the target over all training samples of the federation; quantities and counts only."""
    scale: float = 1.0
    """Standard deviation of the target over all training samples; quantities only."""
    loss_name: LossName = "squared"
    """Loss of a regression."""
    weights: tuple[float, ...] = ()
    """Weight of each class, level or label in the loss; empty: all equal."""
    rare: bool = False
    """Whether a class is so rare that log loss is the primary metric instead of accuracy."""

    @property
    def outputs(self) -> int:
        """Number of outputs of the network."""
        return self.classes - 1 if self.name == "ordinal" else self.classes

    @property
    def has_softmax(self) -> bool:
        """Whether outputs are logits of classes that exclude each other."""
        return self.name in CLASSIFICATION

    @property
    def has_classes(self) -> bool:
        """Whether a target is a class, a level or a set of labels, and not a number."""
        return self.name not in ("regression", "count")

    @property
    def primary(self) -> str:
        """Name of the metric by which rounds are chosen and methods are compared."""
        return self.usual[0]

    @property
    def usual(self) -> tuple[str, ...]:
        """Names of the metrics that are recorded in every round, the primary one first."""
        usual = self._usual
        return ("log_loss", *usual) if self.rare else usual

    @property
    def _usual(self) -> tuple[str, ...]:
        return {
            "multiclass": ("accuracy",),
            "binary": ("accuracy", "auc"),
            "multilabel": ("f1", "auc"),
            "ordinal": ("mae", "accuracy"),
            "regression": ("rmse", "r2"),
            "count": ("deviance", "rmse"),
        }[self.name]

    def weight_tensor(self, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """Return the weights as a tensor; None if all are equal."""
        return torch.tensor(self.weights, device=device, dtype=dtype) if self.weights else None

    def loss(self, outputs: Tensor, target: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss over the real samples, with `weight_tensor` weighted by class."""
        losses = self.losses(outputs, target, weights)
        if weights is None or self.name == "multilabel":  # labels are weighted within a sample
            return (losses * mask).sum() / mask.sum().clamp(min=1)
        weight = mask * weights[target]
        total = weight.sum()
        return (losses * weight).sum() / torch.where(total > 0, total, 1)

    def losses(self, outputs: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the loss of each sample [n]; `weights` apply to labels only."""
        if self.has_softmax:
            return functional.cross_entropy(outputs, target, reduction="none")
        if self.name == "multilabel":
            each = functional.binary_cross_entropy_with_logits(outputs, target.to(outputs.dtype), reduction="none")
            return each.mean(-1) if weights is None else (each * weights).sum(-1) / weights.sum()
        if self.name == "ordinal":
            levels = torch.arange(outputs.shape[-1], device=outputs.device)
            above = (target[..., None] > levels).to(outputs.dtype)
            reached = (target[..., None] >= levels).to(outputs.dtype)
            each = functional.binary_cross_entropy_with_logits(outputs, above, reduction="none")
            return (each * reached).sum(-1)
        wanted = self.standardised(target).to(outputs.dtype)
        output = outputs[..., 0]
        if self.name == "count":
            return output.exp() - wanted * output
        if self.loss_name == "absolute":
            return (output - wanted).abs()
        if self.loss_name == "huber":
            return functional.huber_loss(output, wanted, reduction="none")
        return (output - wanted).square()

    def standardised(self, target: Tensor) -> Tensor:
        """Return targets in the units of the output: standardised quantities, or counts relative to the mean."""
        if self.name == "count":
            return target / (self.centre or 1.0)
        return (target - self.centre) / self.scale

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the predicted classes or levels [...], labels [..., L], or quantities [...] in the target's units."""
        if self.has_softmax:
            return outputs.argmax(-1)
        if self.name == "multilabel":
            return (outputs > 0).long()
        if self.name == "ordinal":  # the median of the predicted distribution
            return (self._above(outputs) > 0.5).sum(-1)
        if self.name == "count":
            return outputs[..., 0].exp() * (self.centre or 1.0)
        return outputs[..., 0] * self.scale + self.centre

    def probabilities(self, outputs: Tensor) -> Tensor | None:
        """Return the probability of each class, level or label [..., C]; None for quantities and counts."""
        if self.has_softmax:
            return torch.softmax(outputs, -1)
        if self.name == "multilabel":
            return torch.sigmoid(outputs)
        if self.name == "ordinal":
            above = self._above(outputs)
            return torch.cat([1 - above[..., :1], above[..., :-1] - above[..., 1:], above[..., -1:]], -1)
        return None

    def soft_predictions(self, outputs: Tensor, temperature: float) -> Tensor | None:
        """Return distributions over outcomes [..., D] at a temperature, as FedReMa compares them; None for numbers.

        Multi-label outputs give a distribution for each label, scaled so that their concatenation is averaged over
        labels by a scalar product.
        """
        if self.has_softmax:
            return functional.normalize(torch.softmax(outputs / temperature, dim=-1), dim=-1)
        if self.name == "ordinal":
            levels = self.probabilities(outputs / temperature)
            assert levels is not None
            return functional.normalize(levels, dim=-1)
        if self.name == "multilabel":
            on = torch.sigmoid(outputs / temperature)
            pairs = functional.normalize(torch.stack([on, 1 - on], -1), dim=-1)
            return pairs.flatten(-2) / math.sqrt(outputs.shape[-1])
        return None

    @staticmethod
    def _above(outputs: Tensor) -> Tensor:
        """Return P(y > j) for every level j but the highest: the product of the conditional probabilities."""
        return torch.sigmoid(outputs).cumprod(-1)
