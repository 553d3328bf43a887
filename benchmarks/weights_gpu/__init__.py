"""New weights from parameters on a GPU to a real vLLM server that generates meanwhile; see `__main__`."""
