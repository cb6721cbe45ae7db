"""Personalised federated learning: FedReMa and other methods, fast, on your own data.

>>> import fedrema
>>> run = fedrema.run("fedrema", rounds=3, out="runs/three-rounds", overwrite=True)
>>> 0 < run.summary["best_accuracy"] <= 1
True
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fedrema.api import compare as compare
    from fedrema.api import load as load
    from fedrema.api import make_federation as make_federation
    from fedrema.api import resume as resume
    from fedrema.api import resume_all as resume_all
    from fedrema.api import run as run
    from fedrema.core import Alternative as Alternative
    from fedrema.core import Answer as Answer
    from fedrema.core import Batch as Batch
    from fedrema.core import Client as Client
    from fedrema.core import LocalTraining as LocalTraining
    from fedrema.core import Matrix as Matrix
    from fedrema.core import Method as Method
    from fedrema.core import Moment as Moment
    from fedrema.core import Move as Move
    from fedrema.core import Period as Period
    from fedrema.core import Phase as Phase
    from fedrema.core import Reports as Reports
    from fedrema.core import Role as Role
    from fedrema.core import Trace as Trace
    from fedrema.core import Uploads as Uploads
    from fedrema.core import average as average
    from fedrema.core import cross_entropy as cross_entropy
    from fedrema.core import mix as mix
    from fedrema.core import task_loss as task_loss
    from fedrema.data import Federation as Federation
    from fedrema.data import federation_from as federation_from
    from fedrema.errors import BadInput as BadInput
    from fedrema.errors import Diverged as Diverged
    from fedrema.errors import FedremaError as FedremaError
    from fedrema.methods import find_method as find_method
    from fedrema.methods import registry as registry
    from fedrema.methods.shared.second_models import copied as copied
    from fedrema.methods.shared.second_models import copy_of as copy_of
    from fedrema.models.body_and_head import Net as Net
    from fedrema.reporting.comparison import Comparison as Comparison
    from fedrema.reporting.matrices import relations_figure as relations_figure
    from fedrema.reporting.verdict import verdicts as verdicts
    from fedrema.runs.callbacks import EarlyStopping as EarlyStopping
    from fedrema.runs.model_matrix import model_matrix as model_matrix
    from fedrema.runs.run import Run as Run

# Where each public name lives. Loaded when first used: `fedrema --help` need not wait for torch.
_HOMES = {
    "fedrema.api": ("compare", "load", "make_federation", "resume", "resume_all", "run"),
    "fedrema.methods.shared.second_models": ("copied", "copy_of"),
    "fedrema.core": (
        *("Answer", "Batch", "Client", "LocalTraining", "Method", "Moment", "Move", "Phase", "Role", "Uploads"),
        *("Alternative", "Matrix", "Period", "Reports", "Trace", "average", "cross_entropy", "mix", "task_loss"),
    ),
    "fedrema.data": ("Federation", "federation_from"),
    "fedrema.errors": ("BadInput", "Diverged", "FedremaError"),
    "fedrema.methods": ("find_method", "registry"),
    "fedrema.models.body_and_head": ("Net",),
    "fedrema.reporting.comparison": ("Comparison",),
    "fedrema.reporting.matrices": ("relations_figure",),
    "fedrema.reporting.verdict": ("verdicts",),
    "fedrema.runs.callbacks": ("EarlyStopping",),
    "fedrema.runs.model_matrix": ("model_matrix",),
    "fedrema.runs.run": ("Run",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fedrema' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
