"""The states of the machine that goes over the bytes of a CSV file (`quotes/`)."""

RECORD, FIELD, PLAIN, QUOTED, CLOSED = range(5)
"""Between records; at the start of a field; in one without quotes; in one with; behind a quote
there, which ends the field or is the first of two."""

STATES = 5
