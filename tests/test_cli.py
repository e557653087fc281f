"""jl.cli.main: a script's command line from the signatures of its classes."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from jax.sharding import PartitionSpec as P
from kit.pages import DOCS, block_with, run_script
from kit.trainers import BARE, thinned

import jaxlit as jl

QUIET = [f"--trainer.{name}=false" for name in BARE]
PAGE = "scripts.md"


class Net(jl.TrainModule):
    """A line of several widths.

    Args:
        width: How wide it is.
    """

    def __init__(self, width: int = 4, items: int = 1, api_key: str | None = None, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(1, width, rngs=rngs)
        self.down = nnx.Linear(width, items, rngs=rngs)

    def training_step(self, batch: Any) -> Any:
        loss = jnp.mean((self.down(self.up(batch["x"])) - batch["y"]) ** 2)
        self.log("val/loss", loss)
        return loss

    validation_step = test_step = training_step

    def predict_step(self, batch: Any) -> Any:
        return self.down(self.up(batch["x"]))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class Rows(jl.DataModule):
    def __init__(self, batch_size: int = 16, path: str = "") -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> jl.ArrayLoader:
        x = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
        return jl.ArrayLoader({"x": x, "y": 3 * x}, self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Seen(jl.Callback):
    """Keeps what `predict` computes."""

    rows: list[np.ndarray] = []  # noqa: RUF012 - of the class, as a command line makes the object

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(np.asarray(outputs))


def run(*args: str, data: Any = Rows, **given: Any) -> jl.Trainer:
    return jl.cli.main(Net, data, args=list(args), **given)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return what a wrong command line prints."""
    with pytest.raises(SystemExit) as caught:
        run(*args)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.smoke
def test_options_reach_the_model_the_data_and_the_trainer() -> None:
    trainer = run("fit", *QUIET, "--model.width=8", "--data.batch_size=8", "--trainer.max_epochs=2", "--trainer.seed=3")
    assert trainer.module.hparams == {"width": 8, "items": 1, "api_key": None}
    assert trainer.datamodule.batch_size == 8
    assert trainer.global_step == 8
    by_hand = jl.Trainer(**BARE, max_epochs=2, seed=3)
    by_hand.fit(module := Net(8, rngs=nnx.Rngs(3)), datamodule=Rows(8))
    np.testing.assert_allclose(trainer.module.up.kernel[...], module.up.kernel[...], rtol=1e-5)


def test_callbacks_and_strategies_are_given_by_name() -> None:
    stop = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/loss"]
    timer = ["--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:01:00:00"]
    sharded = ["--trainer.strategy=FSDP", "--trainer.strategy.min_size=0"]
    trainer = run("fit", *QUIET, *stop, *timer, *sharded, "--model.width=16", "--trainer.max_epochs=1")
    first, second, *_ = trainer.callbacks
    assert repr(first) == repr(jl.callbacks.EarlyStopping("val/loss"))
    assert type(second) is jl.callbacks.Timer
    assert isinstance(trainer.strategy, jl.strategies.FSDP)
    kernel = trainer.module.up.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (1, 2)
    assert type(run("fit", *QUIET, "--trainer.strategy=ddp", "--trainer.max_epochs=1").strategy) is jl.strategies.DDP


STRATEGIES: list[Any] = [
    ("fsdp", [], 3, 1024),
    ("FSDP", [], 3, 1024),
    ("zero1", ["--trainer.strategy.min_size=0"], 1, 0),
    ("FSDP", ["--trainer.strategy.min_size=0"], 3, 0),
    ({"class_path": "zero2", "init_args": {"min_size": 0}}, [], 2, 0),
    ({"class_path": "FSDP", "init_args": {"min_size": 0}}, ["--trainer.strategy.stage=2"], 2, 0),
]


@pytest.mark.parametrize(("given", "more", "stage", "min_size"), thinned(STRATEGIES, *STRATEGIES[2::3]))
@pytest.mark.parametrize("place", thinned(["a file", "the command line"], "the command line", full=()))
def test_strategies_are_words_or_classes_with_or_without_arguments(
    place: str, given: Any, more: list[str], stage: int, min_size: int
) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    Path("run.yaml").write_text(f"trainer: {{strategy: {text}}}")
    where = "--config=run.yaml" if place == "a file" else f"--trainer.strategy={text}"
    strategy = run("fit", *QUIET, where, *more, "--trainer.fast_dev_run=1").strategy
    assert isinstance(strategy, jl.strategies.FSDP)
    assert strategy.stage == stage
    assert strategy.min_size == min_size


@pytest.mark.full
def test_rules_of_a_strategy_are_read_back_from_the_config() -> None:
    rules = ["--trainer.strategy=TensorParallel", '--trainer.strategy.rules={"up.kernel$": [null, tp]}']
    run("fit", *rules, "--model.width=16", "--trainer.max_epochs=1", "--trainer.default_root_dir=a")
    strategy = run("validate", "--config=a/config.yaml", "--ckpt_path=last").strategy
    assert strategy.rules.sharding("up.kernel", np.zeros((1, 16)), P(), strategy.mesh).spec == P(None, "tp")


class Typed(Net):
    seen: list[Any] = []  # noqa: RUF012 - of the class, as a command line makes the object

    def __init__(
        self, width, dtype: Any = jnp.bfloat16, act: Callable[..., Any] = nnx.gelu, scale=1.0, *, rngs: nnx.Rngs
    ) -> None:
        super().__init__(width, rngs=rngs)
        self.seen.append((width, dtype, act, scale))


@pytest.mark.full
def test_functions_dtypes_and_arguments_without_a_type_are_read_back() -> None:
    def typed(*args: str) -> tuple[Any, ...]:
        jl.cli.main(Typed, Rows, args=[*args])
        return Typed.seen[-1]

    folder, more = "--trainer.default_root_dir=a", ["--model.width=8", "--trainer.max_epochs=1"]
    assert typed("fit", folder, *more, "--model.scale=2") == (8, jnp.bfloat16, nnx.gelu, 2)
    assert "act" not in Path("a/config.yaml").read_text()  # left out, as it has its default
    assert typed("validate", "--config=a/config.yaml") == (8, jnp.bfloat16, nnx.gelu, 2)
    typed("fit", "--trainer.default_root_dir=b", *more, "--model.act=jax.nn.relu")
    assert typed("validate", "--config=b/config.yaml")[2] is nnx.relu


def test_an_argument_without_a_type_may_be_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        jl.cli.main(Typed, Rows, args=["fit"])
    assert "error: the following arguments are required: model.width" in capsys.readouterr().err


def test_the_config_of_a_run_leads_to_its_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    folder = run("fit", "--trainer.max_epochs=1").run_dir
    run("validate", f"--config={folder}/config.yaml", "--ckpt_path=best")
    assert f"validate: {folder}/checkpoints/step_00000002" in capsys.readouterr().out


@pytest.mark.full
def test_the_config_of_a_fit_runs_the_other_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    stop = [f"--trainer.callbacks{x}" for x in ("+=EarlyStopping", ".monitor=val/loss", ".patience=7")]
    options = ("--model.width=8", "--trainer.max_epochs=2", "--trainer.default_root_dir=a", "--trainer.strategy=ddp")
    run("fit", *options, *stop)
    config = yaml.safe_load(Path("a/config.yaml").read_text())
    assert list(config) == ["model", "data", "trainer"]
    assert config["model"] == {"width": 8, "items": 1, "api_key": None}
    assert config["trainer"]["strategy"] == "ddp"
    assert config["trainer"]["seed"] == 0  # a default, which may change in another version
    reached = run("validate", "--config=a/config.yaml", "--ckpt_path=a").callback_metrics["val/loss"]
    tested = run("test", "--config=a/config.yaml", "--ckpt_path=last")
    assert tested.callback_metrics["val/loss"] == pytest.approx(reached)
    run("follow", "--config=a/config.yaml", "--trainer.default_root_dir=c", "--run=a", "--monitor=val/loss")
    assert run("validate", "--config=a/config.yaml", "--ckpt_path=a/best").callback_metrics["val/loss"] == reached
    again = run("fit", "--config=a/config.yaml", "--trainer.default_root_dir=b")
    assert again.early_stopping_callback.patience == 7
    assert again.callback_metrics["val/loss"] == pytest.approx(reached)
    assert "FLOP" not in capsys.readouterr().out
    run("plan", "--config=a/config.yaml", "--devices=2", "--strategies=[ddp,fsdp]")
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["ddp", "2", "16"] in lines
    assert ["fsdp", "2", "16"] in lines


@pytest.mark.full
def test_a_resume_with_another_command_keeps_both_configs() -> None:
    folder = "--trainer.default_root_dir=a"
    run("fit", folder, "--trainer.max_epochs=1")
    first = Path("a/config.yaml").read_text()
    trainer = run("fit", folder, "--trainer.max_epochs=2", "--trainer.resume=auto")
    assert trainer.global_step == 4
    run("fit", folder, "--trainer.max_epochs=2", "--trainer.resume=auto")  # the same again
    assert sorted(path.name for path in Path("a").glob("config*")) == ["config.yaml", "config_0.yaml"]
    assert Path("a/config_0.yaml").read_text() == first
    assert yaml.safe_load(Path("a/config.yaml").read_text())["trainer"]["max_epochs"] == 2


def test_predict_is_for_callbacks() -> None:
    Seen.rows.clear()
    run("predict", *QUIET, f"--trainer.callbacks={__name__}.Seen")
    assert [rows.shape for rows in Seen.rows] == [(16, 1), (16, 1)]


def test_no_secret_is_written_to_the_config() -> None:
    secrets = ("--model.api_key=planted", "--data.path=s3://me:planted@bucket/x")
    run("fit", "--trainer.default_root_dir=a", "--trainer.max_epochs=1", *secrets)
    # Left out, so that a command which reads the file takes the default and not a text in its place.
    saved = yaml.safe_load(Path("a/config.yaml").read_text())
    assert saved["model"] == {"width": 4, "items": 1}
    assert saved["data"] == {"batch_size": 16}


def test_a_trial_writes_no_config() -> None:
    run("fit", "--trainer.fast_dev_run=1")
    assert list(Path().iterdir()) == []


def test_defaults_of_the_trainer_may_be_others() -> None:
    assert run("fit", *QUIET, trainer_defaults={"max_epochs": 1}).max_epochs == 1
    with pytest.raises(jl.errors.ArgumentTypeError, match="no argument 'max_epoch'. Did you mean 'max_epochs'"):
        run("fit", trainer_defaults={"max_epoch": 1})
    assert run("fit", *QUIET, "--trainer.max_epochs=2", trainer_defaults={"max_epochs": 1}).max_epochs == 2


class OwnData(Net):
    def train_dataloader(self) -> Any:
        return Rows().train_dataloader()


def test_a_module_may_have_the_loaders() -> None:
    trainer = jl.cli.main(OwnData, args=["fit", *QUIET, "--trainer.max_epochs=1"])
    assert trainer.global_step == 2


def test_the_help_has_types_choices_and_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("fit", "--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--trainer.precision {32-true,bf16-mixed,bf16-true,16-mixed,32,bf16,16}" in text
    assert "--trainer.nan_policy {raise,skip,rollback,ignore}" in text
    assert "(type: Optional[Literal['norm', 'value']], default: null)" in text
    assert 'A name ("single", "ddp", "fsdp", "zero2"' in text
    assert "Literal['auto', 'single', 'ddp', 'fsdp', 'zero1', 'zero2', 'hsdp'" in text
    assert "--model.width WIDTH How wide it is. (type: int, default: 4)" in text
    assert "rngs" not in text.split("--trainer.strategy")[0]
    assert "--init_from" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--trainer.stratgy=x"], ["--trainer.stratgy=x"]),
        (["--timeout=8"], ["--timeout=8"]),  # of another command
        (["--trainer.callbacks+=EarlyStoping"], ["trainer.callbacks", "EarlyStoping"]),
        (["--trainer.callbacks+=EarlyStopping"], ["trainer.callbacks", "EarlyStopping", "required", "monitor"]),
        (["--trainer.callbacks+=Timer", "--trainer.callbacks.duratoin=1"], ["Timer", "'duratoin'"]),
        (["--trainer.strategy=fspd"], ["Unknown strategy 'fspd'", "Did you mean 'fsdp'?"]),
        (["--trainer.strategy=zero1", "--trainer.strategy.min=0"], ["FSDP", "'min'"]),
        (["--trainer.precision=8"], ["trainer.precision", "'bf16-mixed'"]),
        (["--trainer.max_epochs=x"], ["trainer.max_epochs", "int", "x"]),
        (["--trainer.max_steps=-3"], ["Trainer(max_steps=...) takes an int of at least -1, got -3."]),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=a", "--trainer.callbacks.patience=-1"],
            ["EarlyStopping(patience=...) takes an int of at least 0, got -1."],
        ),
        ([], ["Trainer.fit has no limit."]),
        (["--trainer.max_epochs=1", "--ckpt_path=nowhere"], ["'nowhere' is not a checkpoint"]),
        (["--config=wrong.yaml"], ["'trainer.max_epoch'"]),
        (["--config=flow.yaml"], ["line 2"]),
        (["--config=value.yaml"], ["trainer.max_epochs", "int", "x"]),
        (["--config=empty.yaml"], ["config"]),
        (["--config=number.yaml"], ["error: number.yaml: trainer takes arguments by name, such as ", ", got 3"]),
        (["--config=list.yaml"], ["error: list.yaml: model takes arguments by name, such as ", ", got [4]"]),
        (
            ["--trainer.max_epochs=1", "--trainer.default_root_dir=flow.yaml"],
            ["Trainer(default_root_dir=...) takes a folder, got 'flow.yaml'."],
        ),
    ],
    ids=lambda x: " ".join(x) if not x or x[0].startswith("--") else "",
)
def test_a_wrong_argument_is_an_error_of_one_line(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"wrong": "trainer: {max_epoch: 1}\n", "flow": "a: {b: 1\nc: d\n", "value": "trainer: {max_epochs: x}\n"}
    files |= {"empty": "", "number": "trainer: 3\n", "list": "model: [4]\n"}
    for name, content in files.items():
        Path(f"{name}.yaml").write_text(content)
    (line,) = refused(capsys, "fit", *args).splitlines()
    assert ": error: " in line
    for word in words:
        assert word in line


class Broken(Net):
    def training_step(self, batch: Any) -> Any:
        raise jl.errors.ArgumentError("of a step")


def test_an_error_of_the_run_keeps_its_traceback() -> None:
    with pytest.raises(jl.errors.ArgumentError, match="of a step"):
        jl.cli.main(Broken, Rows, args=["fit", *QUIET, "--trainer.max_epochs=1"])


def test_a_wrong_verb_lists_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'fit', 'validate', 'follow', 'test', 'predict', 'plan'" in refused(capsys, "fti")
    assert "{fit,validate,follow,test,predict, ..." in refused(capsys)


@pytest.mark.parametrize(("model", "data"), [(Rows, None), (Net(rngs=nnx.Rngs(0)), None), (Net, Net)])
def test_what_is_no_class_of_the_kind_is_refused(model: Any, data: Any) -> None:
    with pytest.raises(jl.errors.ArgumentError, match=r"jl.cli.main\((model|data)=...\) takes a subclass of jl\."):
        jl.cli.main(model, data, args=["fit"])


def test_without_jsonargparse_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    words = r'jl\.cli\.main needs jsonargparse.* Run `pip install "jsonargparse\[signatures\]"`\.'
    with pytest.raises(jl.errors.ArgumentError, match=words):
        run("fit")


def test_a_plan_takes_lists_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    assert "2,8" in refused(capsys, "plan", "--devices=2,8")
    assert "Unknown strategy 'fspd'. Did you mean 'fsdp'?" in refused(capsys, "plan", "--strategies=[ddp,fspd]")


@pytest.mark.full
def test_the_commands_of_the_page_run_in_a_shell(tmp_path: Path) -> None:
    code = block_with(PAGE, "import Line, line_data") + block_with(PAGE, "class Numbers")
    (block,) = re.findall(r"```text\n(python train\.py fit .*?)```", (DOCS / PAGE).read_text(), re.S)
    fit, validate, _ = (line.split()[2:] for line in block.replace("\\\n", " ").splitlines())
    assert "done 3 epochs" in run_script(tmp_path / "train.py", code, *fit)
    assert yaml.safe_load((tmp_path / "runs/a/config.yaml").read_text())["data"] == {"batch_size": 64}
    slope, x = 0.0, np.linspace(-1, 1, 64)
    for _ in range(3):
        slope -= 0.05 * np.mean(2 * (slope - 3) * x * x)
    logged = re.search(r"val/loss (\S+)", run_script(tmp_path / "train.py", code, *validate))
    assert logged is not None
    assert float(logged[1]) == pytest.approx(np.mean(((slope - 3) * x) ** 2), rel=1e-3)
