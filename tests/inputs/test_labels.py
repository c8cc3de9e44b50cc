"""Class numbers in every form people write them: each place that reads labels understands all, or says why not."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sipp
from sipp.errors import DataError
from sipp.inputs.labels import cross_entropy, truth_of
from sipp.verbs.evaluate import evaluate

N, K = 40, 4
FORMS: dict[str, Callable[[Tensor], object]] = {
    "int64": lambda y: y,
    "int32": lambda y: y.int(),
    "uint8": lambda y: y.to(torch.uint8),
    "float": lambda y: y.float(),
    "float16": lambda y: y.half(),
    "column": lambda y: y[:, None],
    "float column": lambda y: y[:, None].double(),
    "one-hot": lambda y: F.one_hot(y, K),
    "float one-hot": lambda y: F.one_hot(y, K).float(),
    "bool one-hot": lambda y: F.one_hot(y, K).bool(),
    "list": lambda y: y.tolist(),
    "numpy": lambda y: y.numpy(),
    "numpy column": lambda y: y.numpy()[:, None].astype(np.float32),
}
NONE: dict[str, object] = {
    "halves": torch.arange(N) / 2,
    "NaN": torch.full((N,), torch.nan),
    "infinite": torch.full((N,), torch.inf),
    "several classes": torch.ones(N, K),
    "no class": torch.zeros(N, K),
    "probabilities": torch.full((N, K), 1 / K),
    "too many classes": F.one_hot(torch.zeros(N, dtype=torch.int64), K + 1),
    "too few": torch.zeros(N - 1, dtype=torch.int64),
    "one number": torch.tensor(1),
    "maps": torch.zeros(N, K, 2, dtype=torch.int64),
    "complex": torch.zeros(N, dtype=torch.complex64),
    "words": ["cat"] * N,
}


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, K)).eval()


@pytest.fixture
def x() -> Tensor:
    return torch.rand(N, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def y() -> Tensor:
    return torch.randint(0, K, (N,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_names_the_same_classes(form: str, net: nn.Module, x: Tensor, y: Tensor) -> None:
    labels = FORMS[form](y)
    found = truth_of(labels, N, K).classes_n
    assert found is not None and found.dtype == torch.int64 and torch.equal(found, y)
    assert float(cross_entropy(net(x), labels)) == float(F.cross_entropy(net(x), y))


@pytest.mark.parametrize("form", ["float column", "one-hot"])
def test_claims_and_scores_read_every_form(form: str, net: nn.Module, x: Tensor, y: Tensor) -> None:
    both = (y, FORMS[form](y))
    pruned = sipp.prune(net, None, keep=0.7, method="magnitude")
    assert len({sipp.certify_accuracy(net, pruned, [(x, one)]).n_lost for one in both}) == 1
    assert len({evaluate(net, net, [(x, one)]) for one in both}) == 1
    plain, given = (sipp.compare(net, [(x, one)], keeps=(0.5,)) for one in both)
    assert given.dense_accuracy == plain.dense_accuracy is not None and "snip" in {row.method for row in given.rows}
    kept = [sipp.prune(net, [(x, one)], keep=0.5, method="snip").masks for one in both]
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


@pytest.mark.parametrize("form", NONE)
def test_what_names_no_class_is_said(form: str) -> None:
    found = truth_of(NONE[form], N, K)
    assert found.classes_n is None and found.why.startswith("labels are")


def test_why_there_is_no_accuracy_is_said(net: nn.Module, x: Tensor, y: Tensor) -> None:
    assert "not measured: labels are" in str(evaluate(net, net, [(x, torch.rand(N))]))
    assert "accuracy" not in str(evaluate(net, net, [x]))
    assert "only 40 of 80 inputs have labels" in str(evaluate(net, net, [(x, y), x]))
    assert "the output is n x 1, not n x classes" in str(evaluate(nn.Linear(6, 1), nn.Linear(6, 1), [(x, y)]))
    with pytest.raises(DataError, match="labels are float32") as caught:
        sipp.certify_accuracy(net, net, [(x, torch.rand(N))])
    assert caught.value.fix


def test_soft_labels_keep_their_loss(net: nn.Module, x: Tensor) -> None:
    soft = torch.softmax(torch.rand(N, K), 1)
    assert float(cross_entropy(net(x), soft)) == float(F.cross_entropy(net(x), soft))
