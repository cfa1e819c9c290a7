"""Pictures of a plan. Every time in them is predicted; every picture has a JSON twin."""
