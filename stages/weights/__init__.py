"""The exchange of weights through the run directory: publish, request, apply, prove, collect (DESIGN section 6)."""
