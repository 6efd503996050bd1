"""Whether counts can come from a distribution: Pearson's test at a fixed level."""

from collections import Counter


def chi_square(counts: Counter, probabilities: dict[tuple, float], draws: int) -> tuple[float, int]:
    """Pearson's statistic and degrees of freedom; rare cells are pooled until 8 are expected in each."""
    cells, pooled_count, pooled_expected = [], 0, 0.0
    for outcome, p in sorted(probabilities.items(), key=lambda item: item[1]):
        pooled_count, pooled_expected = pooled_count + counts[outcome], pooled_expected + p * draws
        if pooled_expected >= 8:
            cells.append((pooled_count, pooled_expected))
            pooled_count, pooled_expected = 0, 0.0
    return sum((n - e) ** 2 / e for n, e in cells), len(cells) - 1


def chi_square_limit(freedom: int) -> float:
    """What the statistic exceeds by chance once in 10,000 times (Wilson and Hilferty's approximation).

    3.719 is the normal quantile of 1 - 1e-4; for 10 to 100 degrees of freedom the limit is right to 0.3 %.
    """
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * spread**0.5) ** 3
