"""What a run prints: a live table or plain lines while it trains, the closing lines at its end.

Decides nothing and computes nothing: figures come from `report/figures/`. Ways in:
`live.make_view`, `closing.closing_lines`.
"""
