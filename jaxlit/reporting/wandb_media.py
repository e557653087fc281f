"""What is no number, as W&B takes it. Each function returns what makes it, for the thread that sends it to call."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def table(columns: list[str], rows: list[list[Any]]) -> Callable[[], Any]:
    """Return what makes a table."""

    def make() -> Any:
        import wandb

        return wandb.Table(columns=columns, data=rows, allow_mixed_types=True)  # type: ignore[arg-type]

    return make


def histogram(counted: Any) -> Callable[[], Any]:
    """Return what makes a histogram of counts and edges."""
    return lambda: histograms({"": counted})[""]


def histograms(counted: Mapping[str, Any]) -> dict[str, Any]:
    """Make several histograms of counts and edges, by name."""
    import wandb

    return {name: wandb.Histogram(np_histogram=found) for name, found in counted.items()}


def images(pairs: Sequence[tuple[Any, str | None]]) -> Callable[[], Any]:
    """Return what makes a list of images, given each with its caption."""

    def make() -> Any:
        import wandb

        return [wandb.Image(x, caption=text) for x, text in pairs]

    return make


def figure(drawn: Any) -> Callable[[], Any]:
    """Draw a matplotlib figure now, and return what makes an image of it."""
    picture = io.BytesIO()
    drawn.savefig(picture, format="png")

    def make() -> Any:
        import wandb
        from PIL import Image

        return wandb.Image(Image.open(picture))

    return make
