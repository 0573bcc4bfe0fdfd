"""``python -m potluck`` is the command ``potluck``."""

from potluck.cli import main

main()
