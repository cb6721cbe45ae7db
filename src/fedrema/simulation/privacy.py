"""Differential privacy in the simulator: clips updates, adds keyed noise, and keeps account of ε.

The noise follows from the seed, so that runs can be repeated. It is for studying accuracy and does not protect data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedrema.base.random import torch_generator
from fedrema.core import Moment, Role, Simulation
from fedrema.core.aggregation import per_client
from fedrema.engine import ClientTensors, Cohort
from fedrema.engine.private_steps import SampleNoise
from fedrema.engine.sgd import gradient_norms
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net, Tensors
from fedrema.simulation import accounting
from fedrema.simulation.records import PrivacyRecord

QUANTILE = 0.5
"""Share of the updates whose norm is below the adapted norm (Andrew et al., 2021)."""
CLIP_RATE = 0.2
"""Learning rate of the adapted norm (Andrew et al., 2021)."""
FIRST_CLIP = 0.1
"""The adapted norm in the first round (Andrew et al., 2021)."""
COUNT_NOISE = 1 / 20
"""Noise on the number of updates below the adapted norm, relative to the number of updates (Andrew et al., 2021)."""
LOCAL_DELTA = 1e-5

RELEASES, CLIP, DIVERGENCES = "releases", "clip", "divergences"
"""Tensors of the privacy state: a client's releases or steps so far, the adapted norm, and the sum of divergences."""


def changes(cohort: Cohort, before: ClientTensors, names: list[str]) -> Tensors:
    """Return the change [k, ...] of parameters since the server sent them."""
    start = before.merged()
    return {name: cohort.params.own[name] - start[name] for name in names}


def sent_names(cohort: Cohort, roles: Mapping[str, Role]) -> list[str]:
    """Return the names of the parameters that leave their client."""
    return [name for name in cohort.params.own if roles[name] is not Role.PRIVATE]


@dataclass(frozen=True)
class Privacy:
    """Clipping, noise and accounting of a simulation with --dp."""

    settings: Simulation
    clients: int

    def __post_init__(self) -> None:
        """Report a missing package before training."""
        if self.settings.dp_noise:
            accounting.check_available()

    @property
    def mode(self) -> str:
        """central, local or sample."""
        return self.settings.dp

    @property
    def sends_counts(self) -> bool:
        """Whether the server receives sample counts; if not, all clients have the same weight."""
        return self.mode == "sample"

    @property
    def delta(self) -> float:
        """The δ for which ε is computed."""
        if self.settings.dp_delta is not None:
            return self.settings.dp_delta
        return float(max(self.clients, 2) ** -1.1) if self.mode == "central" else LOCAL_DELTA

    @property
    def sample_noise(self) -> SampleNoise | None:
        """Clipping and noise of gradient steps; None unless the mode is sample."""
        if self.mode != "sample":
            return None
        return SampleNoise(self._fixed_clip(), self.settings.dp_noise)

    def check(self, net: Net, roles: Mapping[str, Role]) -> None:
        """Raise `BadInput` for a network whose statistics noise would destroy, or whose loss couples samples."""
        if self.mode == "sample":
            if net.batch_norm:
                raise BadInput(
                    "--dp sample needs gradients of single samples, but batch norm couples the samples of a batch: use"
                    " a network without it."
                )
            return
        sent = [name for name, role in roles.items() if role is not Role.PRIVATE]
        if not sent:
            raise BadInput(f"--dp {self.mode} has no effect: clients of this method send no parameters.")
        statistics = [name for name in sent if not net.trains(name)]
        if statistics:
            raise BadInput(
                f"--dp {self.mode} cannot add noise to {statistics[0]}, a statistic that could become negative: use a"
                " network without batch norm, or a method that keeps its statistics private."
            )

    def check_extras(self, extras: Tensors) -> None:
        """Raise `BadInput` if clients send tensors that are not clipped."""
        if extras and self.mode != "sample":
            raise BadInput(
                f"--dp {self.mode} does not cover {', '.join(sorted(extras))}, which the method sends in addition to"
                " parameters: choose a method that sends parameters only."
            )

    def start(self) -> Tensors:
        """Return the privacy state before the first round."""
        state = {RELEASES: torch.zeros(self.clients, dtype=torch.int64)}
        if self.mode == "central":
            state[CLIP] = torch.tensor(self.settings.clip_norm or FIRST_CLIP, dtype=torch.float64)
            state[DIVERGENCES] = torch.zeros(len(accounting.ORDERS), dtype=torch.float64)
        return state

    # Clipping and noise

    def protected(
        self,
        cohort: Cohort,
        before: ClientTensors,
        roles: Mapping[str, Role],
        state: Tensors,
        moment: Moment,
        updates: int,
        exempt: Tensor | None = None,
    ) -> tuple[Cohort, Tensor]:
        """Return the clients as they send their parameters, and the norms [k] of their updates before clipping.

        With central privacy, parameters of which the server uses only the mean are clipped, and the server adds noise
        to the mean; all others are noised for each client. `exempt` [k] marks clients that do not follow the protocol.
        """
        names = sent_names(cohort, roles)
        clip = self._clip(state)
        updated = changes(cohort, before, names)
        norms = gradient_norms({name: value.double() for name, value in updated.items()}, axes=1)
        factors, finite = (clip / norms.clamp(min=1e-300)).clamp(max=1), torch.isfinite(norms)
        noised = [name for name in names if self.mode == "local" or roles[name] is not Role.SHARED]
        noise = self._client_noise(cohort, noised, moment, clip * self._multiplier(updates))
        if exempt is not None and self.mode == "local":
            factors = torch.where(exempt, 1.0, factors)
            noise = {name: value.masked_fill(per_client(exempt, value), 0) for name, value in noise.items()}
        start = before.merged()
        own = dict(cohort.params.own)
        for name, value in updated.items():
            # An update that is not finite cannot be clipped and counts as 0.
            clipped = (value * per_client(factors.to(value), value)).masked_fill(per_client(~finite, value), 0)
            own[name] = start[name] + (clipped + noise[name] if name in noise else clipped)
        return replace(cohort, params=ClientTensors(own, cohort.params.common)), norms

    def _client_noise(self, cohort: Cohort, names: list[str], moment: Moment, deviation: float) -> Tensors:
        """Return noise [k, ...] for the named tensors, keyed by the seed, the round and each client's name."""
        if not names or not deviation:
            return {}
        rows: dict[str, list[Tensor]] = {name: [] for name in names}
        for client in cohort.names:
            generator = torch_generator(moment.seed, moment.round, client, "dp")
            for name in sorted(names):
                like = cohort.params.own[name]
                rows[name].append(torch.randn(like.shape[1:], generator=generator, dtype=like.dtype))
        return {name: deviation * torch.stack(each).to(cohort.params.own[name]) for name, each in rows.items()}

    def noised_mean(self, mean: Tensors, state: Tensors, moment: Moment, updates: int) -> Tensors:
        """Return the mean of clipped updates with the server's noise; unchanged unless the mode is central."""
        if self.mode != "central" or not self.settings.dp_noise:
            return mean
        deviation = self._clip(state) * self._multiplier(updates) / updates
        generator = moment.generator("dp")
        noised = {}
        for name, value in sorted(mean.items()):
            drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            noised[name] = value + deviation * drawn.to(value)
        return {name: noised[name] for name in mean}

    def _fixed_clip(self) -> float:
        clip = self.settings.clip_norm
        assert clip is not None
        return clip

    def _clip(self, state: Tensors) -> float:
        return float(state[CLIP]) if CLIP in state else self._fixed_clip()

    def _count_noise(self, updates: int) -> float:
        """Return the standard deviation of the noise on the number of updates below the adapted norm.

        At least the noise multiplier: with few clients, a twentieth of them would spend the whole budget.
        """
        return max(COUNT_NOISE * updates, self.settings.dp_noise)

    def _multiplier(self, updates: int) -> float:
        """Return the noise on updates relative to the norm; with an adapted norm the noisy count needs a share of ε."""
        noise = self.settings.dp_noise
        if self.settings.clip_norm is not None or not noise:
            return noise
        return 1 / math.sqrt(noise**-2 - (2 * self._count_noise(updates)) ** -2)

    def _adapted_clip(self, clip: float, norms: Tensor, moment: Moment) -> float:
        """Return the norm for the next round: C · exp(−η (b − γ)), b the noisy share of updates below C."""
        updates = len(norms)
        drawn = torch.randn((), generator=moment.generator("dp count"), dtype=torch.float64)
        noise = float(drawn) * self._count_noise(updates) if self.settings.dp_noise else 0.0
        share = (float((norms <= clip).sum()) + noise) / updates
        return clip * math.exp(-CLIP_RATE * (share - QUANTILE))

    # Accounting

    def after_round(
        self, state: Tensors, releases: Tensor, norms: Tensor | None, sampled: float, moment: Moment
    ) -> Tensors:
        """Return the privacy state after a round.

        Parameters
        ----------
        state
            The privacy state before.
        releases
            [K] how many releases, or gradient steps, each client made in this round.
        norms
            The norms of all updates before clipping; None unless the mode is central.
        sampled
            Share of the clients that was drawn for this round.
        moment
            The round.
        """
        new = {**state, RELEASES: state[RELEASES] + releases.to(state[RELEASES])}
        if self.mode == "central":
            assert norms is not None
            if self.settings.clip_norm is None:
                new[CLIP] = torch.tensor(self._adapted_clip(self._clip(state), norms, moment), dtype=torch.float64)
            if self.settings.dp_noise:
                spent = accounting.without_replacement(sampled, self.settings.dp_noise / 2)
                new[DIVERGENCES] = state[DIVERGENCES] + torch.from_numpy(spent)
        return new

    def record(self, before: Tensors, after: Tensors, roles: Mapping[str, Role], rates: Tensor) -> PrivacyRecord:
        """Return what is recorded of a round: the spent ε of the client that has spent most, δ, and the norm used.

        `rates` [K] are the probabilities with which a client's sample is in a batch.
        """
        return PrivacyRecord(self._epsilon(after, roles, rates), self.delta, self._clip(before))

    def _epsilon(self, state: Tensors, roles: Mapping[str, Role], rates: Tensor) -> float | None:
        noise = self.settings.dp_noise
        if not noise:
            return None
        releases = state[RELEASES]
        if not bool(releases.any()):
            return 0.0
        if self.mode == "sample":
            pairs = set(zip(rates.tolist(), releases.tolist(), strict=True))
            return max(accounting.epsilon(steps * accounting.poisson(rate, noise), self.delta) for rate, steps in pairs)
        # If one client is replaced by another, its clipped update changes by at most 2 C: the multiplier is z/2.
        of_worst = int(releases.max()) * accounting.gaussian(noise / 2)
        if self.mode == "local" or any(role in (Role.PERSONAL, Role.COLLECTED) for role in roles.values()):
            # A client's own tensors show in which rounds it participated: sampling does not reduce ε.
            return accounting.epsilon(of_worst, self.delta)
        sampled = np.asarray(state[DIVERGENCES])
        # Both bounds are valid: the first for a secret choice of participants, the second for a known one.
        return min(accounting.epsilon(each, self.delta) for each in (sampled, of_worst))
