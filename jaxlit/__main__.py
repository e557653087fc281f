"""`python -m jaxlit`: what can be asked without training."""

import argparse

from jaxlit.errors import ArgumentError
from jaxlit.pipeline.chart import chart, comparison
from jaxlit.pipeline.schedules import SCHEDULES
from jaxlit.version import __version__

_LEGEND = """
bubble: the part of their time in which ranks wait. time: of a step, in forward passes of a rank (a backward takes two).
live: the most microbatches of which a rank holds the activations, as if it held one stage.
"""


def main(arguments: list[str] | None = None) -> None:
    """Run a command line.

    Args:
        arguments: Its words; those of this process if there are none.
    """
    parser = argparse.ArgumentParser(prog="python -m jaxlit", description="What can be asked without training.")
    parser.add_argument("--version", action="version", version=f"jaxlit {__version__}")
    commands = parser.add_subparsers(metavar="command")
    pipeline = commands.add_parser("pipeline", help="compare pipeline schedules, or draw one")
    pipeline.add_argument("--stages", type=int, required=True, help="ranks of the pipeline")
    pipeline.add_argument("--microbatches", type=int, required=True, help="parts of a batch")
    pipeline.add_argument("--comm", type=float, default=0.0, help="time to send to another rank, in forward passes")
    pipeline.add_argument("--schedule", choices=SCHEDULES, help="draw this one as well")
    given = parser.parse_args(arguments)
    if "stages" not in given:  # no command
        parser.print_help()
        return
    try:
        print(comparison(given.stages, given.microbatches, given.comm) + "\n" + _LEGEND)
        if given.schedule:
            schedule = SCHEDULES[given.schedule](given.stages)
            print(chart(schedule, given.microbatches))
    except ArgumentError as error:
        pipeline.error(str(error))


if __name__ == "__main__":
    main()
