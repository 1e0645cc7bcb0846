"""The command ``comrope``, and ``python -m comrope`` for torchrun and accelerate launch.

Processes that load data import this module, too; only ``main`` prepares the process.
"""

from __future__ import annotations

import faulthandler

from comrope.experiments.common import interrupts, streams

__all__ = ["main"]


def main() -> None:
    """Run the command line in this process, with its encoding, streams and signals."""
    streams.use_utf8()
    streams.connect()
    interrupts.handle()  # before the imports
    faulthandler.enable()  # print a traceback for crashes in native code
    from comrope.experiments.cli import main as run

    run()


if __name__ == "__main__":
    main()
