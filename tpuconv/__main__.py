"""The program `tpuconv`, which `python -m tpuconv` is too."""

import signal


def begin() -> None:
    """Runs the command. An interruption while it is imported ends the process as if it had no handler: an exception
    would be shown with the lines of the import."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tpuconv.cli import main

    main()


if __name__ == "__main__":
    begin()
