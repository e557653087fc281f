"""Arguments of WandbLogger that are refused."""

import pytest
from kit.refusals import refuses

from jaxlit.callbacks import WandbLogger
from jaxlit.errors import ArgumentError

WRONG = {
    **dict.fromkeys(("project", "name", "entity", "group", "job_type", "notes"), ("", 3)),
    "id": ["", 3, "a/b", "a\\b", "a#b", "a?b", "a%b", "a:b"],
    "save_dir": [3],
    "tags": ["one", [1], [""], ["x" * 65]],
    "config": [[("a", 1)]],
    "offline": ["yes"],
    "log_model": ["latest", 1, None],
    "watch": ["grads", True],
    "watch_every_n_steps": [0, 1.5, True],
    "processes": ["all", "shared"],
    "on_error": ["ignore"],
    **dict.fromkeys(("init_timeout", "finish_timeout"), (0, -1.0, float("inf"), True, "5")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_by_name(name):
    for value in WRONG[name]:
        error = refuses(ArgumentError, lambda value=value: WandbLogger(**{name: value}), rf"WandbLogger\({name}=")
        assert repr(value) in str(error)
