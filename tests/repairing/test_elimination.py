"""Group elimination: the block updates give what solving every candidate anew gives (T23)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.channels import backward, fit_without

from sipp.repairing.channels import RIDGE, Sums, eliminate


def problem(seed: int, n_groups: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Correlated inputs, targets that are not quite linear in them, weights, and shuffled groups of inputs."""
    generator = torch.Generator().manual_seed(seed)
    n = n_groups * size
    mix = torch.eye(n, dtype=torch.float64) + 0.4 * torch.randn(n, n, generator=generator, dtype=torch.float64)
    x = torch.randn(5 * n, n, generator=generator, dtype=torch.float64) @ mix
    w = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    t = x @ w + torch.sin(x[:, :3])
    return x, t, w, torch.randperm(n, generator=generator).view(n_groups, size)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n_groups", "size", "n_removed"), [(6, 1, 5), (6, 4, 5), (72, 1, 69), (12, 9, 11)])
def test_the_order_the_errors_and_the_weights_are_those_of_the_definition(
    seed: int, n_groups: int, size: int, n_removed: int
) -> None:
    x, t, w, groups = problem(seed, n_groups, size)
    sums = Sums.zeros(*w.shape, x.device, has_intercept=False)
    for part in range(0, len(x), 7):
        sums.add(x[part : part + 7], t[part : part + 7])
    found = eliminate(*sums.system(w), [groups], [n_removed])
    lam = RIDGE * float((x**2).sum()) / x.shape[1]
    order, costs = backward(x.numpy(), t.numpy(), w.numpy(), lam, groups.tolist(), n_removed)
    assert found.orders[0].tolist() == order
    np.testing.assert_allclose(found.errors.numpy(), np.array(costs) - costs[0], rtol=1e-8)
    gone = groups[order].flatten().tolist()
    np.testing.assert_allclose(
        found.weight_KF.numpy(), fit_without(x.numpy(), t.numpy(), w.numpy(), lam, gone), atol=1e-9
    )


def test_each_list_of_groups_loses_as_many_as_it_is_told() -> None:
    x, t, w, groups = problem(0, 8, 2)
    sums = Sums.zeros(*w.shape, x.device, has_intercept=False)
    sums.add(x, t)
    found = eliminate(*sums.system(w), [groups[:3], groups[3:]], [1, 4])
    assert [len(order) for order in found.orders] == [1, 4]
    gone = torch.cat([groups[:3][found.orders[0]], groups[3:][found.orders[1]]]).flatten()
    assert (found.weight_KF[gone] == 0).all() and int((found.weight_KF == 0).all(1).sum()) == len(gone)


def test_an_input_that_never_occurs_goes_first_and_costs_nothing() -> None:
    x, _, w, groups = problem(2, 6, 1)
    x[:, groups[4, 0]] = 0.0
    w[groups[4, 0]] = 0.0
    sums = Sums.zeros(*w.shape, x.device, has_intercept=False)
    sums.add(x, x @ w)
    found = eliminate(*sums.system(w), [groups], [2])
    assert int(found.orders[0][0]) == 4 and float(found.errors[1]) < 1e-9 * float(found.errors[2])


def test_an_intercept_takes_the_means_out() -> None:
    x, t, w, groups = problem(3, 5, 1)
    far, t = x + 1e4, t - 2.0
    sums = Sums.zeros(*w.shape, x.device, has_intercept=True)
    for part in range(0, len(x), 6):
        sums.add(far[part : part + 6], t[part : part + 6])
    found = eliminate(*sums.system(w), [groups], [2])
    middle, middle_t = (x - x.mean(0)).numpy(), (t - t.mean(0)).numpy()
    lam = RIDGE * float((middle**2).sum()) / x.shape[1]
    order, costs = backward(middle, middle_t, w.numpy(), lam, groups.tolist(), 2)
    assert found.orders[0].tolist() == order
    np.testing.assert_allclose(found.errors.numpy(), np.array(costs) - costs[0], rtol=1e-6)
    torch.testing.assert_close((far @ found.weight_KF + sums.intercept(found.weight_KF)).mean(0), t.mean(0))
