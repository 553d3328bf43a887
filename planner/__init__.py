"""Measurements and configuration become a plan. Pure: no torch, no submitit, no subprocess."""
