"""The OpenAI-compatible server of `mkc serve`."""
