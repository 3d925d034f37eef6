"""`python -m instep` is `instep`."""

from instep.cli import run_main

run_main()
