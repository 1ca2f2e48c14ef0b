"""The program `ffmem`, which `python -m ffmem` is too: ready to be stopped before anything slow is imported."""

from ffmem.cli.ending import ended


def main() -> None:
    ended(_run, for_good=True)


def _run() -> None:
    from ffmem.cli.app import main

    main()


if __name__ == "__main__":
    main()
