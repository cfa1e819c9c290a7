"""Models that mkc ships; each file has one `MODEL`. They use the public `mkc` names only."""
