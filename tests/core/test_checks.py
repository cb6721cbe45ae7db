"""Errors in a user's method become one sentence with the place and a remedy."""

import dataclasses
import inspect
import sys
import textwrap
from pathlib import Path

import pytest

import fedrema
from fedrema.cli import main
from fedrema.core.checks import HOOKS, check_method
from fedrema.errors import BadInput
from fedrema.methods import registry

HEADER = """
    import sys
    from dataclasses import dataclass
    from typing import ClassVar
    import torch
    from fedrema import Answer, Client, Method, Phase, Role, cross_entropy

    @dataclass(frozen=True)
    class Pull(Method):
        '''One of my own.'''
        name: ClassVar[str] = "pull"
        title: ClassVar[str] = "Pull"
        paper: ClassVar[str] = "none"
"""
FIRST = 14
"""The line on which the body of a case begins."""
QUICK = ("--rounds", "2", "--clients", "3", "--epochs", "1", "--quiet", "--out", "run", "--device", "cpu")


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that writes a class body into a module and returns the class."""
    monkeypatch.chdir(tmp_path)

    def loaded(body, header=HEADER):
        text = textwrap.dedent(header) + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n"
        (tmp_path / "pulling.py").write_text(text)
        sys.modules.pop("pulling", None)
        return "pulling:Pull"

    yield loaded
    sys.modules.pop("pulling", None)


WHEN_LOADED = {
    "misspelt hook": (
        "def agregate(self, net, state, uploads, moment): ...",
        f"Method Pull (pulling.py:{FIRST}) defines 'agregate', which is not a hook: did you mean 'aggregate'?",
    ),
    "wrong signature": (
        "def loss(self, net, batch): ...",
        f"Method Pull (pulling.py:{FIRST}): loss must take (self, net, client, batch), got (self, net, batch).",
    ),
    "static": (
        "@staticmethod\ndef loss(net, client): ...",
        f"Method Pull (pulling.py:{FIRST}): loss must take (self, net, client, batch), got (net, client).",
    ),
}
WHEN_RUN = {
    "end returns one value": (
        "def end(self, net, client, data, moment):\n    return client",
        f"Pull.end (pulling.py:{FIRST}) must return two values, the client and what it sends, got a Client:"
        " return client, {}.",
    ),
    "end sends a number": (
        "def end(self, net, client, data, moment):\n    return client, {'norm': 1.0}",
        "must return a tensor as 'norm' in what it sends, got a float: torch.tensor(value).",
    ),
    "begin returns nothing": (
        "def begin(self, net, client, data, moment):\n    client.params",
        f"Pull.begin (pulling.py:{FIRST}) must return the client, got None (is a `return` missing?)",
    ),
    "start keeps a number": (
        "def start(self, net, client, moment):\n    return client.having(memory={'steps': 0})",
        "must return a tensor as 'steps' in client.memory, got a int: torch.tensor(value).",
    ),
    "a loss per sample": (
        "def loss(self, net, client, batch):\n    return net(client.params, batch.x).sum(dim=1)",
        f"Pull.loss (pulling.py:{FIRST}) must return one number per batch, a tensor of shape (), got a tensor of"
        " shape (",
    ),
    "no loss": (
        "def loss(self, net, client, batch):\n    cross_entropy(net(client.params, batch.x), batch)",
        "got None (is a `return` missing?): take the mean over the batch",
    ),
    "a loss that fails": (
        "def loss(self, net, client, batch):\n    return client.memory['missing']",
        f"Pull.loss failed at pulling.py:{FIRST + 1}: KeyError: 'missing'.",
    ),
    "an exit": (
        "def loss(self, net, client, batch):\n    sys.exit(3)",
        f"Pull.loss failed at pulling.py:{FIRST + 1}: it called sys.exit(3); raise an exception instead.",
    ),
    "an exit in begin": (
        "def begin(self, net, client, data, moment):\n    sys.exit()",
        f"Pull.begin failed at pulling.py:{FIRST + 1}: it called sys.exit()",
    ),
    "one phase": (
        "def phases(self, local, moment):\n    return Phase(1, 0.1, 0.9)",
        f"Pull.phases (pulling.py:{FIRST}) must return a tuple of phases, got a Phase: return (Phase(…),).",
    ),
    "a role as text": (
        "def role(self, net, name):\n    return 'shared'",
        f"Pull.role (pulling.py:{FIRST}) must return a Role for 'body.1.weight', got a str: return Role.SHARED,",
    ),
    "predicted classes": (
        "def predict(self, net, client, x):\n    return net(client.params, x).argmax(dim=1)",
        "a row per sample and a column per class, got a tensor of shape (",
    ),
    "an aggregate without an answer": (
        "def aggregate(self, net, state, uploads, moment):\n    return uploads.mean",
        f"Pull.aggregate (pulling.py:{FIRST}) must return an Answer, got a dict: return Answer(shared=…, state=state).",
    ),
    "an aggregate that forgets": (
        "def aggregate(self, net, state, uploads, moment):\n    return Answer(shared={})",
        "Pull.aggregate must return 'body.1.weight' as shared.",
    ),
    "a shape": (
        "def aggregate(self, net, state, uploads, moment):\n"
        "    return Answer({name: value[None] for name, value in uploads.mean.items()})",
        "must return 'body.1.weight' of shape (32, 64), got a tensor of shape (1, 32, 64)",
    ),
    "personal for too few": (
        "def role(self, net, name):\n    return Role.PERSONAL\n"
        "def aggregate(self, net, state, uploads, moment):\n"
        "    return Answer({}, {name: value[:1] for name, value in uploads.params.items()})",
        "must return 'body.1.weight' of shape (3, 32, 64), got a tensor of shape (1, 32, 64)",
    ),
    "shared where it is personal": (
        "def role(self, net, name):\n    return Role.PERSONAL\n"
        "def aggregate(self, net, state, uploads, moment):\n"
        "    return Answer({name: value[0] for name, value in uploads.params.items()})",
        "must return 'body.1.weight' in personal, as it is personal",
    ),
    "a state that cannot be saved": (
        "def aggregate(self, net, state, uploads, moment):\n    return Answer(uploads.mean, state={'seen': [1]})",
        "must return a tensor or number as state['seen'], got a list",
    ),
    "random numbers that cannot be repeated": (
        "def aggregate(self, net, state, uploads, moment):\n    torch.randn(3)\n    return Answer(uploads.mean)",
        f"Pull.aggregate (pulling.py:{FIRST}) uses torch's global random generator, so runs are not reproducible",
    ),
}
IF = """
def loss(self, net, client, batch):
    loss = cross_entropy(net(client.params, batch.x), batch)
    if loss > 1:
        loss = 2 * loss
    return loss
"""
RANDN = """
def loss(self, net, client, batch):
    x = batch.x
    return cross_entropy(net(client.params, x + torch.randn(x.shape)), batch)
"""


def refusal(capsys) -> str:
    """Return the one line that the command line printed."""
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1, complaint
    return complaint


@pytest.mark.parametrize("case", [*WHEN_LOADED, *WHEN_RUN])
def test_a_broken_method_is_refused_in_one_sentence_with_place_and_remedy(case, load, capsys, tmp_path):
    body, sentence = {**WHEN_LOADED, **WHEN_RUN}[case]
    assert main(["run", load(body), *QUICK]) == 2
    assert sentence in refusal(capsys)
    if case in WHEN_LOADED:
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", [*WHEN_LOADED, "end returns one value", "a loss per sample", "an exit"])
def test_an_instance_in_python_is_checked_too(case, load):
    body, sentence = {**WHEN_LOADED, **WHEN_RUN}[case]
    load(body)
    sys.path.insert(0, "")
    try:
        from pulling import Pull
    finally:
        sys.path.remove("")
    with pytest.raises(BadInput) as caught:
        fedrema.run(Pull(), rounds=2, clients=3, out="run")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("attribute", ["name", "title", "paper"])
def test_a_missing_attribute_is_named(attribute, load, capsys):
    lines = [line for line in HEADER.splitlines() if f"    {attribute}: ClassVar" not in line]
    assert main(["run", load("...", "\n".join([*lines, ""])), *QUICK]) == 2
    said = refusal(capsys)
    assert f"Method Pull (pulling.py:8) has no {attribute}: add `{attribute}: ClassVar[str] = " in said


def test_a_forgotten_decorator_is_named(load, capsys):
    header = HEADER.replace("@dataclass(frozen=True)", "")
    assert main(["run", load("mu: float = 0.1", header), *QUICK]) == 2
    assert "is not a dataclass: put @dataclass(frozen=True) above `class Pull`" in refusal(capsys)


@pytest.mark.parametrize(
    ("body", "line", "remedy"),
    [
        (IF, FIRST + 2, "use torch.where, or --backend loop"),
        (IF.replace("loss > 1", "loss.item() > 1"), FIRST + 2, "use torch.where, or --backend loop"),
        (IF.replace("loss > 1", "float(loss.detach()) > 1"), FIRST + 2, "use torch.where, or --backend loop"),
        (RANDN, FIRST + 2, "and put them into client.inbox, or use --backend loop"),
    ],
)
def test_code_that_cannot_be_stacked_is_named_and_the_remedy_works(body, line, remedy, load, capsys):
    method = load(body)
    assert main(["run", method, *QUICK, "--backend", "stacked"]) == 2
    said = refusal(capsys)
    assert f"Pull.loss failed at pulling.py:{line}: " in said
    assert remedy in said
    assert main(["run", method, *QUICK, "--backend", "loop", "--overwrite"]) == 0


def test_random_numbers_drawn_in_begin_reach_the_loss(load):
    body = """
    def begin(self, net, client, data, moment):
        noise = torch.randn(data.x.shape[1:], generator=moment.generator("noise"))
        return client.having(inbox={**client.inbox, "noise": noise})

    def loss(self, net, client, batch):
        return cross_entropy(net(client.params, batch.x + client.inbox["noise"]), batch)
    """
    method = load(body)
    curves = []
    for backend in ("loop", "stacked"):
        assert main(["run", method, *QUICK, "--backend", backend, "--overwrite", "--precision", "float64"]) == 0
        curves.append(fedrema.load("run").curve("loss")[1])
    assert curves[0] == pytest.approx(curves[1], abs=1e-9)


def test_no_method_of_ours_is_refused_and_every_hook_is_known():
    for kind in registry().values():
        assert check_method(kind) is kind
    assert {"role", "start", "begin", "phases", "loss", "end", "adapt", "model", "predict", "server"} < set(HOOKS)


def test_an_error_of_fedrema_itself_keeps_its_traceback(monkeypatch, tmp_path):
    from fedrema.methods.fedavg import FedAvg

    def broken(self, net, client, batch):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(FedAvg, "loss", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        fedrema.run("fedavg", rounds=1, clients=3, out=tmp_path / "run")


def test_the_page_lists_every_hook_with_its_signature_and_every_field():
    page = (Path(__file__).parents[2] / "docs" / "own-method.md").read_text(encoding="utf-8")
    for hook in HOOKS:
        signature = f"`{hook}({', '.join(inspect.signature(getattr(fedrema.Method, hook)).parameters)})`"
        assert f"| {signature} |" in page
    for kind in (fedrema.Batch, fedrema.Client, fedrema.Moment, fedrema.Uploads, fedrema.Answer):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{kind.__name__}` |")]
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in row, f"{kind.__name__}.{field.name}"
