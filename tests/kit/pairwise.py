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
        factors: The values of each factor, of two or more, by its name.
    """
    choices = [[(name, i) for i in range(len(values))] for name, values in factors.items()]
    pairs = itertools.combinations(itertools.chain(*choices), 2)
    missing = {pair: None for pair in pairs if pair[0][0] != pair[1][0]}  # in order: the cases are the same each time
    cases, used = [], Counter[tuple[str, int]]()
    while missing:
        case = list(next(iter(missing)))

        def worth(choice: tuple[str, int], case: list[tuple[str, int]] = case) -> tuple[int, int]:
            # Among equal values the rarer one so far: more triples occur.
            return sum((choice, x) in missing or (x, choice) in missing for x in case), -used[choice]

        for values in choices:
            if not set(values) & set(case):
                case.append(max(values, key=worth))
        used.update(case)
        for pair in itertools.permutations(case, 2):
            missing.pop(pair, None)
        cases.append({name: factors[name][dict(case)[name]] for name in factors})
    return cases
