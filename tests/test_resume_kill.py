"""A training that is killed twice and started again each time equals one that was not, bit by bit."""

import signal
from pathlib import Path

import pytest
from resume_model import fit, make_trainer
from resume_runs import ended, problems_of, start_child, write_final

EPOCHS, EVERY = 2, 2  # 20 optimizer steps
# Where the first and the second process die: the hook, and the step from which on. In `on_train_batch_start` a
# checkpoint may just be being written, and at the first kill of `pmap` none is there.
KILLS = {
    "single": (("on_train_batch_start", 4), ("on_validation_batch_end", 12)),
    "ddp": (("on_train_batch_end", 7), ("on_safe_point", 10)),
    "fsdp": (("on_validation_batch_end", 5), ("on_train_epoch_end", 10)),
    "pmap": (("on_log", 1), ("on_train_batch_start", 19)),
}


@pytest.mark.parametrize("strategy", KILLS)
def test_killed_training_goes_on_exactly(strategy: str, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for number, kill in enumerate(KILLS[strategy]):
        code, output = ended(start_child(killed, number, strategy, epochs=EPOCHS, every=EVERY, kill=kill))
        assert code == -signal.SIGKILL, output
    last = start_child(killed, 2, strategy, epochs=EPOCHS, every=EVERY)
    try:
        # In this process, and without checkpoints.
        reference = fit(make_trainer(strategy, whole, name="journal0", max_epochs=EPOCHS))
        write_final(reference, whole)
    finally:
        code, output = ended(last)
    assert code == 0, output
    found = problems_of(killed, whole, 3)
    assert found.pop("lost") > 0  # something was done again, so the kills came where they should
    assert not found
