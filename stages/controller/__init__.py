"""The controller: asks the rollout instances for groups of completions, scores them, and writes the trainer's batches.

`stage` is the run, `dispatcher` keeps groups in flight, `staleness` says how many may be, `ledger` remembers every
prompt, `tasks` are where prompts and rewards come from. No torch: the stage runs on one processor beside the others.
"""
