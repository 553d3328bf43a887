"""What runs inside a step: one importable callable per stage. Stages meet only in `rundir` and `weights`."""
