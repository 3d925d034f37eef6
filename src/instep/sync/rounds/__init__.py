"""Strategies that agree now and then: participants train alone, and what changed is averaged."""
