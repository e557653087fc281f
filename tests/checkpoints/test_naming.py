"""What follows the step in a checkpoint's name."""

import math

import pytest
from kit.refusals import refuses

from jaxlit.checkpoints.files import check_filename, filled
from jaxlit.errors import ArgumentError

METRICS = {"val/loss": 0.12345, "bad": math.nan}


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("{epoch}-{val/loss:.3f}", "epoch=3-val_loss=0.123"),
        ("{step:04d}", "step=0040"),
        ("best of/{epoch:02d} é", "best_of_epoch=03_é"),
        ("../../up", ".._.._up"),
        ("{val/loss:.1e}+{val/loss}", "val_loss=1.2e-01+val_loss=0.12345"),
        ("{bad:.2f},{epoch}", "bad=nan,epoch=3"),
    ],
)
def test_a_filename_is_filled_and_fit_for_a_folders_name(filename, name):
    check_filename(filename)
    assert filled(filename, {"epoch": 3, "step": 40}, METRICS.__getitem__) == name


def test_a_filename_that_is_no_format_is_refused():
    cases = {"{epoch:.3q}": r"epoch:\.3q is no format", "{epoch:.2f}{step:x}{val:d}": "val:d is no format"}
    cases |= dict.fromkeys(("{epoch:d", "{}", "a}", "{{epoch}}"), "has a brace without its other, or an empty pair")
    for filename, words in cases.items():
        refuses(ArgumentError, lambda filename=filename: check_filename(filename), words)
