"""Training inside processes that somebody else has started. Way in: `joining.join`."""
