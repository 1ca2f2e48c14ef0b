"""The program `ffmem`, which `python -m ffmem` is too: ready to be stopped before anything slow is imported."""

from ffmem.cli.ending import ended


def main() -> None:
    """Run the command line; a signal before everything is imported ends the program in one line too."""
    ended(_run, for_good=True)


def _run() -> None:
    from ffmem.cli.app import main

    main()


if __name__ == "__main__":
    main()
