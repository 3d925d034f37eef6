"""Figures of a run, computed from its records: rates, losses, recovery times, proofs.

Knows nothing of pages, terminals or colours. Ways in: `summary.summarise` (the contents of
`summary.json`), `proof.prove` (`instep audit`), `curves.charts`, `recovery.recoveries`, and
`progress.Progress` for a run that is still running.
"""
