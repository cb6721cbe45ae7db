"""Networks for sequences [time, features]: LSTM, GRU and transformer.

They also take images [channels, height, width], which they read row by row: time is the height, and a step has
channels × width features.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedrema.errors import BadInput
from fedrema.models.heads import Shape, with_linear_head

WIDTH = 128
"""Hidden units of the recurrent networks, and width of the transformer."""
LAYERS, ATTENTION_HEADS = 2, 4
"""Depth and attention heads of the transformer."""


class Rows(nn.Module):
    """Reads images [n, channels, height, width] as sequences [n, height, channels × width]."""

    def forward(self, images: Tensor) -> Tensor:
        """Return one step per row."""
        return images.transpose(1, 2).flatten(2)


class LastOutput(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, recurrent: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, steps: Tensor) -> Tensor:
        """Return the output [n, hidden] after the last of the steps [n, time, features]."""
        outputs: Tensor = self.recurrent(steps)[0]
        return outputs[:, -1]


class TokenEncoder(nn.Module):
    """Learnt positions, pre-norm transformer layers without dropout, and the mean over all tokens."""

    def __init__(self, tokens: int, width: int, depth: int, heads: int) -> None:
        super().__init__()

        def layer() -> nn.TransformerEncoderLayer:
            return nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)

        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.encoder = nn.TransformerEncoder(layer(), depth, enable_nested_tensor=False)
        # torch copies one layer, with its weights; each layer needs its own initial weights.
        self.encoder.layers = nn.ModuleList([layer() for _ in range(depth)])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return features [n, width] of tokens [n, count, width]."""
        encoded: Tensor = self.encoder(tokens + self.positions)
        return encoded.mean(dim=1)


def lstm(shape: Shape, classes: int, projection: int = 0) -> nn.Module:
    """Return one LSTM layer with 128 hidden units; the head is a linear layer on its last output."""
    first, _, features = _read_steps("lstm", shape)
    body = nn.Sequential(*first, LastOutput(nn.LSTM(features, WIDTH, batch_first=True)))
    return with_linear_head(body, WIDTH, projection, classes)


def gru(shape: Shape, classes: int, projection: int = 0) -> nn.Module:
    """Return one GRU layer with 128 hidden units; the head is a linear layer on its last output."""
    first, _, features = _read_steps("gru", shape)
    body = nn.Sequential(*first, LastOutput(nn.GRU(features, WIDTH, batch_first=True)))
    return with_linear_head(body, WIDTH, projection, classes)


def transformer(shape: Shape, classes: int, projection: int = 0) -> nn.Module:
    """Return a transformer with 2 layers of width 128 and 4 attention heads; the head takes the mean over time."""
    first, time, features = _read_steps("transformer", shape)
    encoder = TokenEncoder(time, WIDTH, LAYERS, ATTENTION_HEADS)
    return with_linear_head(nn.Sequential(*first, nn.Linear(features, WIDTH), encoder), WIDTH, projection, classes)


SEQUENCE_NETWORKS: dict[str, Callable[..., nn.Module]] = {"lstm": lstm, "gru": gru, "transformer": transformer}


def _read_steps(name: str, shape: Shape) -> tuple[list[nn.Module], int, int]:
    """Return the layers that turn a sample into steps, the number of steps, and the features of a step."""
    if len(shape) == 2:
        return [], shape[0], shape[1]
    if len(shape) == 3:
        channels, height, width = shape
        return [Rows()], height, channels * width
    raise BadInput(
        f"--net {name} takes sequences [time, features] or images [channels, height, width],"
        f" not samples of shape {shape}: use --net mlp."
    )
