"""A script that reads a command line of its own, and ends the program where that is wrong."""

import argparse

argparse.ArgumentParser().parse_args(["--of-another-program"])
