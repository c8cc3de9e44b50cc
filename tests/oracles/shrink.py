"""The widths of a chain without dead channels, by definition: channels are removed one at a time.

A chain is linear layers with a bias, and an activation between each two. A channel between two layers is dispensable
if no row that is left reads it, or if its row reads nothing that varies: then it is a constant, which the bias of the
next layer takes. Take out any dispensable channel; go on until there is none. One channel of each layer always stays.
"""

from __future__ import annotations


def widths(weights: list[list[list[float]]]) -> list[int]:
    """The numbers of channels between the layers that are left; weights are rows of numbers."""
    left = [set(range(len(weight))) for weight in weights]  # rows of each layer
    n_inputs = len(weights[0][0])
    constant: list[set[int]] = []
    for i, weight in enumerate(weights):
        varies = set(range(n_inputs)) if i == 0 else left[i - 1] - constant[i - 1]
        constant.append({r for r, row in enumerate(weight) if not any(row[c] != 0 for c in varies)})
    changed = True
    while changed:
        changed = False
        for i in range(len(weights) - 1):
            for r in sorted(left[i]):
                is_read = any(weights[i + 1][row][r] != 0 for row in left[i + 1])
                if not is_read or r in constant[i]:
                    left[i].discard(r)
                    changed = True
    return [max(1, len(rows)) for rows in left[:-1]]
