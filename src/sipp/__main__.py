"""`python -m sipp`: the command line, also for `torchrun -m sipp`."""

from sipp.cli.main import main

if __name__ == "__main__":
    main()
