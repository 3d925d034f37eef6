"""The job: what is trained, on what, and how. Ways in: `spec.JobSpec`, `file.load`."""
