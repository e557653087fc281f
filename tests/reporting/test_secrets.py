"""Secrets are hidden by their names in whatever is written of hyperparameters and configs."""

import json
from pathlib import Path
from typing import Any

import pytest
from kit.batches import numbered
from kit.journal import hooks
from kit.modules import Mean
from kit.trainers import fit
from kit.wandb_runs import records

from jaxlit.callbacks import CSVLogger, WandbLogger
from jaxlit.reporting.secrets import hide

SECRETS = (
    "api_key apiKey API_KEY2 OPENAI_API_KEY token hf_token HFToken accessToken auth-token secret",
    "client_secret secrets password db_password passwd PGPASSWORD pwd PGPASS passphrase credential",
    "aws_credentials bearer Authorization auth private_key secret_access_key aws_access_key_id",
    "ssh_key jwt model.api_key secret_value pass db_pass smtpPass otp totp access_key_v2 api_key_prod api_keys",
    "db_token session_key GITHUB_PAT dsn SENTRY_DSN sas stripe_key dbpassword mysecret",
    "password_hash GOOGLE_CREDENTIALS_JSON bearer_token user_pass id_token passwords passphrases",
    "AZURE_STORAGE_ACCOUNT_KEY aws_session_token openai_org_key wandb/api_key",
)
ORDINARY = (
    "tokenizer author authors key key_dim keypoints keyword monkey num_tokens token_dropout token_type",
    "pad_token eos_token label_key sort_key secretary hash_key_type api_key_env password_file",
    "credentials_path tokens_per_batch compass bypass authentic passage forward_pass low_pass jwt_algorithm",
    "password_policy authorization_required session_id keys num_keys key_size max_tokens mask_token rng_key string",
    "caption_key prompt_key x_key obs_keys action_key state_key class_key blank_token prompt_token end_token",
)


def test_a_text_under_the_name_of_a_secret_is_hidden() -> None:
    for name in " ".join(SECRETS).split():
        paths: list[str] = []
        values = {"deep": [{name: "gpt2"}], name: {"x": ["gpt2"]}, "width": 3}
        assert hide(values, paths) == {"deep": [{name: "<redacted>"}], name: "<redacted>", "width": 3}
        assert paths == [f"deep[0].{name}", name]
        for plain in (None, "", True, 0.5, [None], "<pad>", "[MASK]"):
            assert hide({name: plain}, []) == {name: plain}


def test_a_name_that_is_about_something_else_is_ordinary() -> None:
    values = {name: "gpt2" for name in " ".join(ORDINARY).split()}
    assert hide({**values, "deep": [values]}, []) == {**values, "deep": [values]}


def test_a_password_in_a_url_is_hidden() -> None:
    paths: list[str] = []
    given = {"data": ["s3://AKIAKEY:planted@bucket/x", "http://host:8080/a@b", "gs://bucket/run@2", "a:b@c"]}
    assert hide(given, paths) == {"data": ["s3://<redacted>@bucket/x", *given["data"][1:]]}
    assert paths == ["data[0]"]


class Secretive(Mean):
    def __init__(self, width: int, api_key: str = "", **more: Any) -> None:
        super().__init__()
        self.hparams["later"] = {"hf_token": "planted"}


def test_no_secret_is_written_and_one_line_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    model = Secretive(7, api_key="planted", nested={"deep": [{"db_password": "planted"}]})
    wandb = WandbLogger(offline=True, config={"extra": {"password": "planted"}})
    given = {"logger": [wandb, CSVLogger()], "log_every_n_steps": 1, "default_root_dir": "run"}
    more = {"more": {"token": "planted"}, "lr": 0.1}
    tell = hooks(on_train_start=lambda t, m: [logger.log_hyperparams(more) for logger in t.loggers])
    fit(model, numbered(2), None, tell, **given)
    records()  # when W&B has written the last of them
    told = " ".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("Left out"))
    for name in ("api_key", "nested.deep[0].db_password", "later.hf_token", "extra.password", "more.token"):
        assert told.count(name) == 1, name
    assert "planted" not in told
    files = {path.name: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert {"state.json", "hparams.json", "metrics.csv"} <= files.keys()
    assert [name for name, content in files.items() if b"planted" in content] == []
    assert json.loads(files["hparams.json"])["lr"] == 0.1
