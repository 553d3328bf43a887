"""The exchange of weights through the run directory: publish, request, apply, prove, collect."""
