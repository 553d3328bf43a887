"""What runs in the doctor's job: the driver in the batch shell, one `node` program per node, trivial steps, and two that need torch."""
