"""Breaks a run on purpose and has it judged: `instep chaos`. Way in: `chaos.chaos`."""
