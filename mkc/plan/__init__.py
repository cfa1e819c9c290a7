"""The folder that `mkc compile` writes: the form of plan.json, and reading it back."""
