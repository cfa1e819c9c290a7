"""The `mkc` command: one module per subcommand."""
