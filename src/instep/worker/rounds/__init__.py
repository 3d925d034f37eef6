"""Rounds of averaging: participants take local steps, and give how far they came."""
