"""`python -m launch.doctor`: learns what this site does, says what Libra will do about it, writes a site profile.

Facts and judgement are kept apart. `inside/` runs in one Slurm job (or, without Slurm, on this machine) and only measures:
every program there leaves JSON in the doctor's folder. `slurm_facts.py` asks Slurm where the doctor was started. Then each
file of `probes/` judges: a pure function from the evidence to findings, so that every judgement is tested without a cluster.

Nothing is claimed that was not measured: what could not be tried is a finding too, with the reason.
"""
