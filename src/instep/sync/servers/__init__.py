"""Strategies whose parameters lie on servers, in step or each worker at its own pace."""
