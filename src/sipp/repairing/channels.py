"""Least squares without whole channels: which channels a layer can do without, and its weights without them (T23).

A layer with inputs X (P x K) wants the outputs T (P x F) and has the weights W (K x F here). With
    H = X'X + lam I,   R = X'T + lam W,   V = H^-1 R
removing the rows g of V (one for a linear layer, nine for a kernel of 3 x 3) adds exactly
    tr( V_g' (H^-1_gg)^-1 V_g )
to  ||T - X V||^2 + lam ||V - W||^2,  and leaves
    V   <- V    - H^-1_:g (H^-1_gg)^-1 V_g
    H^-1 <- H^-1 - H^-1_:g (H^-1_gg)^-1 H^-1_g:
The cheapest group goes first, then the cheapest of what is left: one nested order, with the error after each step.

V and H^-1 are updated for many groups at once, by products of matrices. In between, a group's cost follows from two
small matrices of each group, (H^-1)_gg and V_g V_g', which every removal updates.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sipp.results import numerics

RIDGE = 0.01  # of the mean square of an input
AT_ONCE = 64  # rows of V that go before all of it and of H^-1 are brought up to date


@dataclass
class Sums:
    """Sums over the patches that a layer met: of inputs x, wanted outputs t, and their products. All float64.

    With a free intercept, the first patches' means are subtracted from x and t, so that little is lost to rounding
    when the sums are taken about the means of all.
    """

    has_intercept: bool
    xx_KK: Tensor
    xt_KF: Tensor
    x_K: Tensor
    t_F: Tensor
    first_K: Tensor  # what was subtracted
    first_F: Tensor
    n: int = 0

    @staticmethod
    def zeros(fan_in: int, n_rows: int, device: torch.device, *, has_intercept: bool) -> Sums:
        shapes = (fan_in, fan_in), (fan_in, n_rows), (fan_in,), (n_rows,), (fan_in,), (n_rows,)
        xx, xt, x, t, first_x, first_t = (torch.zeros(s, dtype=numerics.BOUND_DTYPE, device=device) for s in shapes)
        return Sums(has_intercept, xx, xt, x, t, first_x, first_t)

    def add(self, x_PK: Tensor, t_PF: Tensor) -> None:
        """Adds some patches; products of one call are summed in float32."""
        x_PK, t_PF = (some.to(torch.promote_types(some.dtype, numerics.SCORE_DTYPE)) for some in (x_PK, t_PF))
        if self.has_intercept and self.n == 0:
            self.first_K, self.first_F = x_PK.mean(0).to(numerics.BOUND_DTYPE), t_PF.mean(0).to(numerics.BOUND_DTYPE)
        x_PK, t_PF = x_PK - self.first_K.to(x_PK.dtype), t_PF - self.first_F.to(t_PF.dtype)
        self.xx_KK += x_PK.T @ x_PK
        self.xt_KF += x_PK.T @ t_PF
        self.x_K += x_PK.sum(0)
        self.t_F += t_PF.sum(0)
        self.n += len(x_PK)

    def system(self, weight_KF: Tensor, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
        """H and R of the head of this file, about the means if there is an intercept.

        An input that never varies keeps its weight: the intercept takes what it gave.
        """
        xx_KK, xt_KF = self.xx_KK.clone(), self.xt_KF
        if self.has_intercept:
            xx_KK -= torch.outer(self.x_K, self.x_K) / self.n
            xt_KF = xt_KF - torch.outer(self.x_K, self.t_F) / self.n
        size = float(xx_KK.diagonal().mean()) if len(xx_KK) else 0.0
        lam = ridge * size if size > 0 else 1.0
        xx_KK.diagonal().add_(lam)
        return xx_KK, xt_KF + lam * weight_KF

    def intercept(self, weight_KF: Tensor) -> Tensor:
        """The best intercept for these weights."""
        return self.first_F + self.t_F / self.n - (self.first_K + self.x_K / self.n) @ weight_KF


@dataclass(frozen=True)
class Elimination:
    """The order in which channels go, what that adds to the squared error in all, and the weights at the end."""

    orders: list[Tensor]  # of the groups of each list, as many as were removed
    errors: Tensor  # errors[m]: what removing the first m added; errors[0] = 0
    weight_KF: Tensor


def eliminate(
    system_KK: Tensor,
    right_KF: Tensor,
    groups: Sequence[Tensor],
    n_removed: Sequence[int],
) -> Elimination:
    """Removes so many groups of inputs (G x S each) from each of these lists, the cheapest first."""
    groups_GS, device = torch.cat(list(groups)), system_KK.device
    of_list = [i for i, some in enumerate(groups) for _ in some]
    list_G = torch.tensor(of_list, dtype=torch.int64, device=device)
    left, start = list(n_removed), list(itertools.accumulate((len(some) for some in groups), initial=0))
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(system_KK))
    weight_KF = inverse_KK @ right_KF
    can_go_G = torch.tensor(left, dtype=torch.int64, device=device)[list_G] > 0
    orders: list[list[int]] = [[] for _ in groups]
    errors = [0.0]
    at_once = max(1, AT_ONCE // groups_GS.shape[1])
    while any(left):
        now = _Late.of(inverse_KK, weight_KF, groups_GS)
        for _ in range(min(at_once, sum(left))):
            cost_G = now.costs().masked_fill(~can_go_G, torch.inf)
            group = int(cost_G.argmin())
            errors.append(errors[-1] + max(0.0, float(cost_G[group])))
            now.remove(group)
            of = of_list[group]
            orders[of].append(group - start[of])
            left[of] -= 1
            can_go_G[group] = False
            if left[of] == 0:
                can_go_G &= list_G != of
        now.catch_up()
    found = [torch.tensor(order, dtype=torch.int64, device=device) for order in orders]
    return Elimination(found, torch.tensor(errors, dtype=numerics.BOUND_DTYPE, device="cpu"), weight_KF)


@dataclass
class _Late:
    """H^-1 and V as they were some removals ago, and what those take from them: B Q from H^-1, and B P from V."""

    inverse_KK: Tensor
    weight_KF: Tensor
    groups_GS: Tensor
    blocks_GSS: Tensor  # of H^-1, up to date: (H^-1)_gg
    squares_GSS: Tensor  # V_g V_g', up to date
    b_KR: Tensor
    q_RK: Tensor
    p_RF: Tensor
    gone: list[int]

    @staticmethod
    def of(inverse_KK: Tensor, weight_KF: Tensor, groups_GS: Tensor) -> _Late:
        rows_GSF = weight_KF[groups_GS]
        squares_GSS = rows_GSF @ rows_GSF.mT
        b_KR, p_RF = weight_KF.new_empty((len(weight_KF), 0)), weight_KF.new_empty((0, weight_KF.shape[1]))
        blocks_GSS = inverse_KK[groups_GS[:, :, None], groups_GS[:, None]]
        return _Late(inverse_KK, weight_KF, groups_GS, blocks_GSS, squares_GSS, b_KR, b_KR.T, p_RF, [])

    def costs(self) -> Tensor:
        """What the removal of each group adds to the squared error: the trace of (H^-1)_gg^-1 V_g V_g'."""
        if self.groups_GS.shape[1] == 1:
            return (self.squares_GSS / self.blocks_GSS).flatten()
        return torch.linalg.solve(self.blocks_GSS, self.squares_GSS).diagonal(dim1=1, dim2=2).sum(1)

    def remove(self, group: int) -> None:
        """Takes one group out."""
        at_S, block_SS = self.groups_GS[group], self.blocks_GSS[group]
        b_KS = self.inverse_KK[:, at_S] - self.b_KR @ self.q_RK[:, at_S]
        p_SF = torch.linalg.solve(block_SS, self.weight_KF[at_S] - self.b_KR[at_S] @ self.p_RF)
        q_SK = torch.linalg.solve(block_SS, b_KS.T)
        vp_KS = self.weight_KF @ p_SF.T - self.b_KR @ (self.p_RF @ p_SF.T)
        b_GSS, q_SGS, vp_GSS = b_KS[self.groups_GS], q_SK[:, self.groups_GS], vp_KS[self.groups_GS]
        crossed_GSS = b_GSS @ vp_GSS.mT
        self.squares_GSS += b_GSS @ (p_SF @ p_SF.T) @ b_GSS.mT - crossed_GSS - crossed_GSS.mT
        self.blocks_GSS -= b_GSS @ q_SGS.transpose(0, 1)
        self.blocks_GSS[group] = torch.eye(len(at_S), dtype=block_SS.dtype, device=block_SS.device)
        self.squares_GSS[group] = 0.0
        self.gone.append(group)
        self.b_KR, self.q_RK = torch.cat((self.b_KR, b_KS), 1), torch.cat((self.q_RK, q_SK))
        self.p_RF = torch.cat((self.p_RF, p_SF))

    def catch_up(self) -> None:
        """Brings H^-1 and V up to date, in place."""
        self.weight_KF -= self.b_KR @ self.p_RF
        self.inverse_KK -= self.b_KR @ self.q_RK
        gone = self.groups_GS[self.gone].flatten()
        self.weight_KF[gone] = 0.0
        self.inverse_KK[gone] = 0.0
        self.inverse_KK[:, gone] = 0.0
        self.inverse_KK[gone, gone] = 1.0  # what is gone changes nothing, and its block can still be inverted
