"""The file that knows the ids of W&B's runs."""

import json
from pathlib import Path

import pytest

from jaxlit.reporting.wandb_ids import read_id, write_id


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff\xfe", b'{"/one": 3}', b'{"/one": ""}'])
def test_a_damaged_file_of_ids_has_none_and_is_replaced(damage):
    file = Path("run/wandb_run_ids.json")
    file.parent.mkdir()
    file.write_bytes(damage)
    assert read_id(file.parent, "/one") is None
    write_id(file.parent, "/one", "abc")
    assert json.loads(file.read_text()) == {"/one": "abc"}


def test_ids_of_several_projects_stand_beside_each_other():
    for key, id in (("/one", "a"), ("me/two", "b"), ("/one", "c")):
        write_id(Path("deep/run"), key, id)
    assert [read_id(Path("deep/run"), key) for key in ("/one", "me/two", "/three")] == ["c", "b", None]
