"""What looks like a secret is left out of everything that is written, and nothing else."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb as sdk
from kit.batches import numbered
from kit.modules import Mean
from kit.refusals import refuses
from kit.trainers import fit, make_trainer
from kit.wandb_runs import records

import jaxlit as jl
from jaxlit.callbacks import CSVLogger, JSONLLogger, WandbLogger
from jaxlit.errors import CheckpointError
from jaxlit.reporting.redaction import Redaction, restored

HEX = "0123456789abcdef0123456789abcdef01234567"


def redact(value: Any) -> Any:
    return Redaction()(value)


def test_secrets_are_redacted_at_any_depth_and_ordinary_values_are_kept() -> None:
    secrets = {
        "API_KEY": "x",
        "apiKey": ["x"],
        "a": {"hf_token": "x", "list": [{"client_secret": {"y": "x"}}, ({"PASSWORD": 1234},)]},
        "aws_credentials": "x",
        "Authorization": "x",
    }
    text = json.dumps(redact(secrets)).replace("<redacted>", "")
    assert "x" not in text and "1234" not in text
    plain = {"width": 8, "max_tokens": 4096, "names": ["a", {"lr": 0.1}], "api_key": None, "token": ""}
    plain |= {"tokenizer": "bpe", "author": "me"}
    assert redact(plain) == plain


def test_a_password_in_a_url_and_what_is_signed_are_redacted() -> None:
    config = {"db": "postgres://me:planted@host:5432/x", "all": ["see redis://:planted@host and s3://u:planted@b/c"]}
    config["blob"] = "https://h/x?sv=1&sig=planted%2F&se=2"
    config["aws"] = "https://h/x?X-Amz-Signature=planted&X-Amz-Date=1#top"
    assert redact(config) == {
        "db": "postgres://me:<redacted>@host:5432/x",
        "all": ["see redis://:<redacted>@host and s3://u:<redacted>@b/c"],
        "blob": "https://h/x?sv=1&sig=<redacted>&se=2",
        "aws": "https://h/x?X-Amz-Signature=<redacted>&X-Amz-Date=1#top",
    }
    for plain in ("http://host:80/a@b", "https://me@host/a:b", "a: b@c", "host:80", "https://h/x?key=train&n=3"):
        assert redact({"url": plain}) == {"url": plain}


def test_a_command_line_is_redacted_as_a_list_as_a_text_and_inside_json() -> None:
    line = ["train.py", "--api-key", "planted", "--token=planted", "model.secret=planted", "--lr", "0.1", "-v"]
    found = [
        "train.py",
        "--api-key",
        "<redacted>",
        "--token=<redacted>",
        "model.secret=<redacted>",
        "--lr",
        "0.1",
        "-v",
    ]
    assert redact({"argv": line}) == {"argv": found}
    assert redact({"argv": " ".join(line)}) == {"argv": " ".join(found)}
    assert redact({"given": '{"password": "planted", "lr": "0.1"}'}) == {
        "given": '{"password": "<redacted>", "lr": "0.1"}'
    }
    assert redact({"shown": "Config(lr=0.1, password='planted')"})["shown"].startswith("Config(lr=0.1, password=<red")


def test_a_state_keeps_hashes_and_what_only_may_be_a_secret() -> None:
    state = {"rng_key": "Zx9bQ1r8Tt2Lm4Vw7Yd0", "arrays": HEX, "note": "--token x", "token": "x", "db": "s3://u:p@b"}
    kept = {"rng_key": "Zx9bQ1r8Tt2Lm4Vw7Yd0", "arrays": HEX, "note": "--token x"}
    assert Redaction(is_state=True)(state) == kept | {"token": "<redacted>", "db": "s3://u:<redacted>@b"}


def test_what_was_left_out_comes_from_its_owner_or_not_at_all() -> None:
    saved = {"n": 1, "token": "<redacted>", "deep": {"url": "x://<redacted>@h", "m": 2}, "list": ["<redacted>", 3]}
    now = {"n": 9, "token": "mine", "deep": {"url": "own"}, "list": ["first", 9]}
    assert restored(saved, lambda: now) == {
        "n": 1,
        "token": "mine",
        "deep": {"url": "own", "m": 2},
        "list": ["first", 3],
    }
    assert restored(saved) == {"n": 1, "deep": {"m": 2}, "list": [3]}
    assert restored({"n": 1}, lambda: pytest.fail("nothing was left out")) == {"n": 1}


# A whole training

VALUES = {
    **{name: f"planted-{name}" for name in ("api_key", "token", "secret", "password", "credential", "pwd", "bearer")},
    **{name: f"planted-{name}" for name in ("PGPASS", "aws_access_key_id", "private_key")},
    "key": "Planted9bQ1r8Tt2Lm4Vw7",
    "hf": "hf_PlantedIjKlMnOpQrStUvWx",
    "b": HEX,
    "blob": "https://host/data?sv=1&sig=planted%2Fsig",
    "db": "postgres://me:planted-url@host/x",
    "nested": {"deep": [{"client": {"db_password": "planted-nested"}}]},
}
OF_ENVIRONMENT = {"MY_API_KEY": "planted-env-1", "HF_TOKEN": "hf_plantedEnv2", "WANDB_API_KEY": "planted3" * 5}


class Secretive(Mean):
    """Is given secrets under their names, and under innocent ones."""

    def __init__(self, width: int, innocent: str = "", argv: Any = (), api_key: str = "", **more: Any) -> None:
        super().__init__()


class Keeps(jl.Callback):
    """Has a secret in its state, and puts one into the checkpoint."""

    def __init__(self, auth_token: str) -> None:
        self.auth_token, self.seen, self.found = auth_token, 0, dict[str, Any]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"client_secret": "planted-hook", "kept": 3}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["mine"]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "auth_token": self.auth_token}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen, self.auth_token = state_dict["seen"], state_dict["auth_token"]


class Tells(jl.Callback):
    """Logs texts and hyperparameters with secrets in them."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams({"more": {"token": "planted-later"}})
            if not isinstance(logger, CSVLogger):
                logger.log_text("note", f"the key is {OF_ENVIRONMENT['MY_API_KEY']}, or {VALUES['hf']} or {HEX}")
                logger.log_table("table", ["cell"], [[OF_ENVIRONMENT["HF_TOKEN"]]])


def train(*callbacks: jl.Callback, auth_token: str = "planted-state", **arguments: Any) -> tuple[jl.Trainer, Keeps]:
    keeps = Keeps(auth_token)
    argv = [*sys.argv, "--hf-token", "planted-argv", "--secret=planted-argv-2"]
    model = Secretive(7, f"model of {OF_ENVIRONMENT['MY_API_KEY']}", argv, **VALUES)  # type: ignore[arg-type]
    given = {"default_root_dir": "run", "resume": "auto"} | arguments
    return fit(model, numbered(2), None, keeps, *callbacks, **given), keeps


def test_no_secret_is_on_the_disk_and_one_line_tells_where_they_stood(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sdk.setup()  # which keeps the environment that it finds, for the tests to come as well
    for name, value in OF_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train.py", "--password", "planted-argv-3"])
    wandb = WandbLogger(offline=True, config={"extra": {"password": "planted-config"}}, notes="planted-env-1 used")
    trainer, _ = train(Tells(), logger=[wandb, CSVLogger(), JSONLLogger()], log_every_n_steps=1)
    records()  # when W&B has written the last of them
    assert trainer.global_step == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Left out")]
    told = ",".join(lines)  # with what a hook and a call have added later
    assert len(lines) == 4
    for name in (
        "token",
        "key",
        "hf",
        "innocent",
        "argv[2]",
        "blob",
        "nested.deep[0].client.db_password",
        "Keeps.auth_token",
    ):
        assert f" {name}," in f"{told},"
    assert "planted" not in told.lower() and "width" not in told
    files = [path for path in Path("run").rglob("*") if path.is_file()]
    assert {"state.json", "hparams.json", "metrics.csv", "metrics.jsonl"} <= {path.name for path in files}
    found = [path for path in files if b"planted" in path.read_bytes().lower() or HEX.encode() in path.read_bytes()]
    assert found == []
    assert b'"width":7' in next(Path("run").rglob("state.json")).read_bytes()


def test_a_resume_gives_callbacks_their_state_with_the_secret_that_they_have_now(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train()
    assert capsys.readouterr().out.count("Left out") == 2  # the second time of what a hook has added
    trainer, keeps = train(auth_token="new", max_epochs=2)
    assert trainer.global_step == 4 and (keeps.seen, keeps.auth_token) == (4, "new")
    assert keeps.found == {"kept": 3}
    assert capsys.readouterr().out.count("Left out") == 2  # in each run
    given: dict[str, Any] = {"innocent": "mine", **VALUES}
    for missing, held in (("argv", {}), ("nested", {"argv": None})):  # a text in a list, and one further below
        known = {name: value for name, value in (given | held).items() if name != missing}
        words = (
            rf"does not keep '{missing}', which is or holds a secret.*load_from_checkpoint\(path, {missing}=\.\.\.\)"
        )
        refuses(CheckpointError, lambda known=known: Secretive.load_from_checkpoint("run", **known), words)
    assert Secretive.load_from_checkpoint("run", argv=None, **given).hparams["token"] == VALUES["token"]


class Streams:
    """A loader of a user's own, which stands where a token says."""

    def __init__(self) -> None:
        self.page_token, self.at = "", 0

    def __iter__(self) -> Any:
        for self.at, batch in enumerate(numbered(4), 1):
            self.page_token = f"page {self.at}"
            yield batch
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"page_token": self.page_token}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.page_token = state["page_token"]
        Streams.loaded = self.page_token  # type: ignore[attr-defined]


def test_so_does_a_data_module_and_where_a_loader_stands_is_kept() -> None:
    class Data(jl.DataModule):
        def __init__(self, password: str) -> None:
            self.password, self.loader = password, Streams()

        def train_dataloader(self) -> Any:
            return self.loader

        def state_dict(self) -> dict[str, Any]:
            return {"password": self.password}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.password = state_dict["password"]

    given = {"default_root_dir": "run", "resume": "auto"}
    make_trainer(**given, max_steps=2, max_epochs=-1).fit(Mean(), datamodule=Data("planted"))
    assert b"planted" not in next(Path("run").rglob("state.json")).read_bytes()
    data = Data("new")
    make_trainer(**given).fit(Mean(), datamodule=data)
    assert data.password == "new" and Streams.loaded == "page 2"  # type: ignore[attr-defined]
