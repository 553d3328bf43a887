"""The rollout stage: an agent per instance that keeps one guarded vLLM server running at the newest proved weights."""
