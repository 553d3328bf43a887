"""The trainer stage: megatron-core GRPO on batches from the run directory."""
