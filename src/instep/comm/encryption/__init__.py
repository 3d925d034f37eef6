"""TLS between the processes of a run: its authority, certificates, and encrypted links."""
