"""Stand-ins whose behaviour can be computed by hand."""
