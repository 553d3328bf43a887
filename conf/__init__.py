"""The Hydra tree and `schema`, the only place where an option is declared."""
