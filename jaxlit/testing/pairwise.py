"""A few cases that cover every pair of choices."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return cases in which each value of a factor meets each value of every other factor at least once.

    They are about as many as the two longest factors have pairs of values, far fewer than all combinations, and the
    same at each call.

    Args:
        factors: The values of each factor, by its name.
    """
    names, sizes = list(factors), [len(values) for values in factors.values()]
    if len(names) < 2:
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())]
    chosen = [(i, value) for i, size in enumerate(sizes) for value in range(size)]
    # A dict is a set in order: the cases are the same each time.
    missing = {frozenset(pair): None for pair in itertools.combinations(chosen, 2) if pair[0][0] != pair[1][0]}
    cases, used = [], Counter[tuple[int, int]]()
    while missing:
        case = dict(next(iter(missing)))

        def worth(choice: tuple[int, int], case: dict[int, int] = case) -> tuple[int, int]:
            # Among equal values the rarer one so far: more triples occur.
            return sum(frozenset([choice, other]) in missing for other in case.items()), -used[choice]

        for i, size in enumerate(sizes):
            if i not in case:
                case[i] = max(((i, value) for value in range(size)), key=worth)[1]
        used.update(case.items())
        for pair in itertools.combinations(case.items(), 2):
            missing.pop(frozenset(pair), None)
        cases.append({name: factors[name][case[i]] for i, name in enumerate(names)})
    return cases
