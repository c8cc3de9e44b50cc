"""The command line: `main.py` lists the commands, `commands/` has one file each; shared code is beside them."""
