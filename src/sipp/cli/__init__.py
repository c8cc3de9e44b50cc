"""The command line: `main.py` lists the commands, `commands/` has one file for each, what they share lies beside."""
