"""Makes a starter policy where there is none: tokenizer by code, small model, supervised steps, cached HF folder.

`key` is what the launcher imports (no torch); `python -m stages.warmup` does the work in a process of its own.
"""
