"""`python -m ffmem` is `ffmem`."""

from ffmem.cli.app import main

if __name__ == "__main__":
    main()
