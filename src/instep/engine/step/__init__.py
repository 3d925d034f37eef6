"""What one step is agreed on by, and written down in.

Ways in: `agreement.Agreement`, `records.StepRecords`.
"""
