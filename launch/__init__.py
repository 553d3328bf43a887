"""A config becomes a running job: compose, validate, plan, render, submit, follow."""
