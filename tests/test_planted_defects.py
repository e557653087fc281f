"""The list of planted defects is up to date; tests/sweeps/mutants.py runs it."""

from sweeps.mutants import defects


def test_each_planted_defect_fits_code_and_tests() -> None:
    stale = [f"{defect.name}: {defect.problem}" for defect in defects() if defect.problem]
    assert not stale, "\n".join(stale)


def test_no_defect_is_planted_twice() -> None:
    result = [(defect.file, defect.old, defect.new) for defect in defects()]
    assert len(result) == len(set(result))
