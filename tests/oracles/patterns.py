"""N:M masks, group by group and weight by weight."""


def largest_in_groups(scores: list[list[float]], n: int, m: int) -> list[list[bool]]:
    """Of every m scores in a row the n largest, the earlier one of equals; what is left at the end is a group too."""
    masks = []
    for row in scores:
        mask = [False] * len(row)
        for start in range(0, len(row), m):
            group = range(start, min(start + m, len(row)))
            for column in sorted(group, key=lambda k: (-row[k], k))[:n]:
                mask[column] = True
        masks.append(mask)
    return masks


def obeys(rows: list[list[float]], n: int, m: int) -> bool:
    return all(sum(value != 0 for value in row[k : k + m]) <= n for row in rows for k in range(0, len(row), m))
