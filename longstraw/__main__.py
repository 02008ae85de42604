"""The ``longstraw`` command: import and run ``longstraw.run``; Ctrl-C while importing ends without a traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from longstraw.run import main as run

    run()


if __name__ == "__main__":
    main()
